import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from data_cases import set_up, write_rows

from lightrl.data import DataSource, PromptDataModule
from lightrl.data.tasks import Task
from lightrl.trajectory import Prompt


def test_a_row_becomes_a_prompt_with_id_messages_tokens_and_fields(train_file: str, chat_tokenizer, rows):
    data = set_up(PromptDataModule(train_file, batch_size=2, system_prompt="Add."), chat_tokenizer)
    prompt = data.prompts["train"][3]
    assert prompt.id == "train-3"
    assert prompt.fields == rows[3]
    assert prompt.messages == [{"role": "system", "content": "Add."}, {"role": "user", "content": "3 + 1?"}]
    assert chat_tokenizer.decode(prompt.token_ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n3 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_train_loader_is_a_clock_and_prompts_come_from_the_stream(train_file: str, plain_tokenizer):
    data = set_up(PromptDataModule(train_file, batch_size=3, shuffle=False), plain_tokenizer)
    assert list(data.train_dataloader()) == [0, 1, 2]
    assert [data.prompt_stream[position].id for position in (0, 9, 10)] == ["train-0", "train-9", "train-0"]


def test_data_without_a_tokenizer_or_train_data_is_refused(train_file: str, plain_tokenizer):
    with pytest.raises(ValueError, match=r"PromptDataModule has no tokenizer \(tokenizer=None\)"):
        PromptDataModule(train_file, batch_size=2).setup("fit")
    with pytest.raises(ValueError, match=r"has no train prompts \(train=None\).*Set train to a file or a hub name"):
        set_up(PromptDataModule(None, batch_size=1), plain_tokenizer)


def test_the_order_of_prompts_follows_from_seed_everything(
    train_file: str, plain_tokenizer, monkeypatch: pytest.MonkeyPatch
):
    def order(seed: int | None) -> list[str]:
        data = set_up(PromptDataModule(train_file, batch_size=2, seed=seed), plain_tokenizer)
        return [data.prompt_stream[position].id for position in range(10)]

    monkeypatch.setenv("PL_GLOBAL_SEED", "5")
    assert order(None) == order(5) != order(6)


def test_the_first_rows_are_taken_where_their_number_is_bounded(train_file: str, plain_tokenizer):
    few = [DataSource(train_file, max_rows=num) for num in (4, 3)]
    data = set_up(PromptDataModule(*few, batch_size=2), plain_tokenizer)
    assert [prompt.id for prompt in data.prompts["train"]] == [f"train-{index}" for index in range(4)]
    assert len(data.prompts["validation"]) == 3


def test_long_prompts_are_dropped_and_counted_on_request(
    tmp_path: Path, plain_tokenizer, caplog: pytest.LogCaptureFixture
):
    path = write_rows(tmp_path / "train.jsonl", ({"question": "x" * size, "answer": "y"} for size in (3, 9, 4, 8)))
    data = PromptDataModule(path, batch_size=1, max_prompt_tokens=5, prompt_overflow="drop")
    with caplog.at_level(logging.WARNING):
        set_up(data, plain_tokenizer, max_prompt_tokens=100)
    assert [prompt.id for prompt in data.prompts["train"]] == ["train-0", "train-2"]
    assert "Dropped 2 of 4 prompts with more than 5 tokens." in caplog.text


def test_a_bad_row_of_a_small_file_is_named_before_training(tmp_path: Path, plain_tokenizer):
    path = write_rows(tmp_path / "train.jsonl", [{"question": "x", "answer": "y"}] * 6 + [{"question": "x"}])
    for train, validation in ((path, None), (DataSource(path, max_rows=6), path)):
        with pytest.raises(ValueError, match=r"Line 7 of .* has no column 'answer'"):
            set_up(PromptDataModule(train, validation, batch_size=1), plain_tokenizer)


def test_prompts_are_made_again_for_every_batch_of_validation(train_file: str, plain_tokenizer):
    data = set_up(PromptDataModule(train_file, train_file, batch_size=2, validation_batch_size=4), plain_tokenizer)
    first, second = (next(iter(data.val_dataloader())) for _ in range(2))
    assert first == second
    assert first[0] is not second[0]  # none is kept


def test_prompts_of_a_subclass_keep_the_weights_of_their_sources(train_file: str, plain_tokenizer):
    class Marked(PromptDataModule):
        def make_prompts(self, split):
            return [replace(prompt, fields={"split": split}) for prompt in super().make_prompts(split)]

    data = Marked([DataSource(train_file, weight=3), DataSource(train_file, label="few")], batch_size=2)
    set_up(data, plain_tokenizer)
    prompts = [data.prompt_stream[position] for position in range(8)]
    assert sum(prompt.id.startswith("train-few-") for prompt in prompts) == 2
    assert {prompt.fields["split"] for prompt in prompts} == {"train"}


def test_a_prompt_belongs_to_the_source_of_the_longest_label(train_file: str, plain_tokenizer):
    class Own(PromptDataModule):
        def make_prompts(self, split):
            ids = [f"{split}-math-{n}" for n in range(3)] + [f"{split}-math-hard-{n}" for n in range(2)]
            chats = [[{"role": "user", "content": "x" * size}] for size in range(1, 6)]
            return list(map(Prompt, ids, chats)) if split == "train" else []

    sources = [DataSource(train_file, label="math", weight=3), DataSource(train_file, label="math-hard")]
    data = set_up(Own(sources, batch_size=2), plain_tokenizer)
    assert [(part.source.label, part.num_rows) for part in data.prompts["train"].parts] == [
        ("math", 3),
        ("math-hard", 2),
    ]
    with pytest.raises(ValueError, match=r"Prompt 'train-math-hard-1' has 5 prompt tokens, but at most 4 fit"):
        set_up(Own(sources, batch_size=2, max_prompt_tokens=4), plain_tokenizer)


def test_weights_that_no_id_shows_are_said_to_be_unused(train_file: str, plain_tokenizer, caplog):
    class Own(PromptDataModule):
        def make_prompts(self, split):
            names = ("train-0-0", "train-1-0", "other") if split == "train" else ()
            return [Prompt(id=name, messages=[{"role": "user", "content": "x"}]) for name in names]

    data = set_up(Own([DataSource(train_file, weight=3), DataSource(train_file)], batch_size=2), plain_tokenizer)
    assert "The sources' weights have no effect: id 'other' of make_prompts has no label" in caplog.text
    assert len(data.prompts["train"]) == 3


def test_prompts_of_a_subclass_keep_the_task_of_their_source(train_file: str, plain_tokenizer):
    class Own(PromptDataModule):
        def make_prompts(self, split):
            sources = {"train-a": None, "train-b": "games"} if split == "train" else {}
            chat = [{"role": "user", "content": "x"}]
            return [Prompt(id=name, messages=chat, source=source) for name, source in sources.items()]

    def found(*given: DataSource) -> dict[str, str | None]:
        data = set_up(Own(list(given), batch_size=2), plain_tokenizer)
        return {prompt.id: prompt.source for prompt in (data.prompt_stream[0], data.prompt_stream[1])}

    math = DataSource(train_file, label="math", task=Task(group_size=3))
    assert found(math) == {"train-a": "math", "train-b": "games"}
    assert found() == {"train-a": None, "train-b": "games"}
    with pytest.raises(ValueError, match=r"ids of make_prompts must begin with 'train-math-' .* got 'train-a'"):
        found(math, DataSource(train_file))


def test_rows_need_no_answer_where_no_column_is_asked_for(tmp_path: Path, plain_tokenizer):
    path = write_rows(tmp_path / "train.jsonl", [{"question": "x"}])
    data = set_up(PromptDataModule(path, batch_size=1, answer_column=None), plain_tokenizer)
    assert data.prompts["train"][0].fields == {"question": "x"}


def test_the_chat_template_and_its_arguments_become_the_tokenizers(train_file: str, plain_tokenizer, chat_tokenizer):
    template = chat_tokenizer.chat_template + "{% if add_generation_prompt and deep is not false %}<think>\n{% endif %}"
    data = PromptDataModule(train_file, batch_size=2, chat_template=template, chat_template_kwargs={"deep": False})
    set_up(data, plain_tokenizer)
    asked = [{"role": "user", "content": "hi"}]
    text = plain_tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert plain_tokenizer.decode(data.prompts["train"][0].token_ids).endswith("<|im_start|>assistant\n")


def test_columns_of_a_row_are_arguments_of_the_chat_template(tmp_path: Path, chat_tokenizer):
    chat_tokenizer.chat_template = (
        "{% if tools %}{{ tools | length }} tools {% endif %}" + chat_tokenizer.chat_template + "{{ style }}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    given = [{"question": "1", "tools": [tool], "chat_template_kwargs": {"style": "brief"}}, {"question": "2"}]
    path = Path(write_rows(tmp_path / "rows.jsonl", given))
    data = set_up(PromptDataModule(path, batch_size=2, answer_column=None), chat_tokenizer)
    first, second = (chat_tokenizer.decode(prompt.token_ids) for prompt in data.prompts["train"])
    assert first == "1 tools <|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nbrief"
    assert second == "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "settings", "shown"),
    [
        (r"{prompt} \boxed{answer}", {}, ["answer"]),
        (r"{prompt} \boxed{{answer}}", {}, []),
        *[(f"{{prompt}} {{answer{form}}}", {}, ["answer"]) for form in ("!r", ":>9", "[0]", ":{prompt[0]}>9")],
        ("{prompt:{answer}}", {}, ["answer"]),
        ("{question}", {"answer_column": "question"}, []),
        ("{reward_model[truth]}", {"columns": {"answer": "reward_model.truth"}}, ["reward_model"]),
        ("{reward_model[truth]}", {"answer_column": "reward_model.truth"}, ["reward_model"]),
    ],
)
def test_a_template_that_shows_what_the_reward_reads_is_warned_of_once(
    template: str, settings: dict[str, Any], shown: list[str], plain_tokenizer, tmp_path: Path, caplog
):
    row = {"question": "1+1?", "answer": "2", "reward_model": {"truth": 2}}
    settings = dict(settings)
    columns = settings.pop("columns", {})
    source = DataSource(write_rows(tmp_path / "a.jsonl", [row, row]), columns=columns)
    set_up(PromptDataModule(source, batch_size=1, prompt_template=template, **settings), plain_tokenizer)
    warnings = [record.message for record in caplog.records if "shows column" in record.message]
    assert [warning.split("'")[1] for warning in warnings] == shown


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_bad_rows_are_dropped_and_counted_up_to_a_fraction(
    tmp_path: Path, plain_tokenizer, caplog: pytest.LogCaptureFixture, split: str, streaming: bool, suffix: str
):
    first, good, bad = [], [json.dumps({"question": str(n), "answer": "1"}) for n in range(6)], ["{", "[1]"]
    bad += ['{"question": "7"}', '{"question": " ", "answer": "1"}']
    where = "Line 1 of .* is not valid JSON"
    if suffix == "csv":
        first, good, bad = ["question,answer"], [f"{n},1" for n in range(6)], ["7", "7,1,2", "7,", ",1"]
        where = "Line 2 of .* has 1 column, but the first line has 2"
    (tmp_path / f"rows.{suffix}").write_text("\n".join([*first, *bad[:2], *good, *bad[2:]]))
    (tmp_path / f"good.{suffix}").write_text("\n".join([*first, *good]))

    def questions(**settings: Any) -> list[str]:
        given = {"train": f"good.{suffix}", "validation": None, split: f"rows.{suffix}"}
        sources = {
            name: None if file is None else DataSource(str(tmp_path / file), streaming=streaming)
            for name, file in given.items()
        }
        data = set_up(PromptDataModule(**sources, batch_size=2, shuffle=False, **settings), plain_tokenizer)
        if split == "validation":
            return [prompt.fields["question"] for prompt in data.prompts[split]]
        return [prompt.fields["question"] for n in range(10) if (prompt := data.prompt_stream[n]) is not None][:6]

    with pytest.raises(ValueError, match=rf"{where}.*`data.bad_rows: drop` drops them"):
        questions()
    assert questions(bad_rows="drop", max_bad_fraction=0.4) == list("012345")
    assert re.search(rf"Dropping bad rows \(bad_rows: drop\). The first one: {where}", caplog.text)
    assert (f"Dropped 4 of 10 {split} rows as bad" in caplog.text) is not (split == "train" and streaming)
    few = 0.001 if split == "train" and streaming else 0.3  # of 1,000 rows, as there may be more
    with pytest.raises(ValueError, match=r"Bad rows: \d+ of the first \d+, more than max_bad_fraction=.* one: Line"):
        questions(bad_rows="drop", max_bad_fraction=few)


@pytest.mark.parametrize("value", [None, float("nan")])
def test_a_column_without_a_value_is_not_shown_as_a_word(value: object, plain_tokenizer, tmp_path: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"question": "1+1?", "answer": "2", "context": value}])
    with pytest.raises(ValueError, match=r"Line 1 of .*a.jsonl' has no value in 'context'"):
        set_up(PromptDataModule(path, batch_size=1, prompt_template="{context} {prompt}"), plain_tokenizer)
