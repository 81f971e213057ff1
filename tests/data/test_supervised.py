import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from data_cases import set_up, write_rows
from transformers import PreTrainedTokenizerFast

from lightrl.data import ChatBatch, PromptDataModule, SFTDataModule


def make_data(train_file: str, tokenizer: PreTrainedTokenizerFast, **settings) -> SFTDataModule:
    data = SFTDataModule(train_file, train_file, **{"batch_size": 4, "seed": 1, **settings})
    return set_up(data, tokenizer, max_prompt_tokens=100)


def completions(batch: ChatBatch, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [tokenizer.decode(ids[mask]) for ids, mask in zip(batch.token_ids, batch.loss_mask, strict=True)]


def test_loss_falls_on_the_completion_and_its_end_token_only(train_file: str, chat_tokenizer):
    data = make_data(train_file, chat_tokenizer, shuffle=False, answer_pattern_remove="<<.*?>>")
    batch = next(iter(data.train_dataloader()))
    assert completions(batch, chat_tokenizer) == [f"it is {number + 1}<|im_end|>" for number in range(4)]
    assert chat_tokenizer.decode(batch.token_ids[2]) == (
        "<|im_start|>user\n2 + 1?<|im_end|>\n<|im_start|>assistant\nit is 3<|im_end|>"
    )


def test_the_prompt_has_the_tokens_that_a_rollout_begins_with(train_file: str, chat_tokenizer):
    settings = {"batch_size": 1, "system_prompt": "Add.", "prompt_template": "What is {prompt}", "shuffle": False}
    prompts = set_up(PromptDataModule(train_file, **settings), chat_tokenizer)
    batch = next(iter(make_data(train_file, chat_tokenizer, **settings).train_dataloader()))
    prompt_ids = batch.token_ids[0][: int(batch.loss_mask[0].int().argmax())]
    assert prompt_ids.tolist() == prompts.prompt_stream[0].token_ids


def test_padding_is_on_the_right_and_has_no_loss(tmp_path: Path, plain_tokenizer):
    path = write_rows(tmp_path / "train.jsonl", ({"question": "q" * n, "answer": "a"} for n in (1, 3)))
    batch = next(iter(make_data(path, plain_tokenizer, batch_size=2, shuffle=False).train_dataloader()))
    assert batch.token_ids.shape == (2, 5)
    assert batch.token_ids[0, 3:].tolist() == [0, 0]
    assert batch.loss_mask.tolist() == [[False, True, True, False, False], [False, False, False, True, True]]


def test_an_epoch_holds_each_chat_once_and_follows_from_seed_and_epoch(train_file: str, plain_tokenizer):
    loader = make_data(train_file, plain_tokenizer).train_dataloader()
    epochs = [
        [completions(loader.batch_at(epoch, index), plain_tokenizer) for index in range(len(loader))]
        for epoch in (0, 1)
    ]
    assert len(loader) == 3
    assert all(len({text for batch in epoch for text in batch}) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]
    assert [
        completions(batch, plain_tokenizer) for batch in make_data(train_file, plain_tokenizer).train_dataloader()
    ] == (epochs[0])


def test_chats_of_like_length_share_a_batch(tmp_path: Path, plain_tokenizer):
    path = write_rows(tmp_path / "train.jsonl", ({"question": "q" * (n % 7 + 1), "answer": "a"} for n in range(28)))
    loader = make_data(path, plain_tokenizer).train_dataloader()
    widths = [batch.loss_mask.sum().item() and set((batch.token_ids != 0).sum(1).tolist()) for batch in loader]
    assert [len(lengths) for lengths in widths] == [1] * 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"answer_column": "solution"}, r"Line 1 of '.*' has no column 'solution'", id="no such column"),
        pytest.param(
            {"answer_pattern_remove": ".*"}, r"Column 'answer' of prompt 'train-0' is empty", id="nothing left"
        ),
        pytest.param(
            {"answer_pattern_remove": "("}, r"answer_pattern_remove='\(' must be a regular expression", id="bad pattern"
        ),
        pytest.param({"max_tokens": 12}, r"The chat of prompt 'train-0' has 21 tokens, more than 12", id="long"),
        pytest.param({"max_tokens": 1}, "max_tokens must be >= 2, got 1", id="no room"),
        pytest.param(
            {"max_tokens": 12, "prompt_overflow": "drop"},
            r"All 10 rows of train=.* or a length limit \(more than 12 tokens, or a prompt of",
            id="all dropped",
        ),
    ],
)
def test_chats_that_cannot_be_learned_from_are_refused(train_file: str, plain_tokenizer, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        make_data(train_file, plain_tokenizer, **settings)


def test_short_prompts_are_counted_where_nothing_limits_the_longest(tmp_path: Path, plain_tokenizer, caplog):
    path = write_rows(tmp_path / "train.jsonl", ({"question": "q" * n, "answer": "a"} for n in (1, 9)))
    set_up(SFTDataModule(path, batch_size=1, min_prompt_tokens=2, prompt_overflow="drop"), plain_tokenizer)
    assert "with a prompt of fewer than 2 tokens." in caplog.text


def test_long_chats_are_dropped_on_request(tmp_path: Path, plain_tokenizer):
    path = write_rows(tmp_path / "train.jsonl", ({"question": "q", "answer": "a" * n} for n in (1, 9, 2, 1, 2)))
    data = make_data(path, plain_tokenizer, max_tokens=5, prompt_overflow="drop")
    assert len(data.prompts["train"]) == 4


CALL = {"type": "function", "function": {"name": "look", "arguments": '{"city": "Oslo"}'}}
LOOKS = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}]


def chats(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, *chats: Any, data: Any = SFTDataModule, **settings: Any
) -> Any:
    path = write_rows(tmp_path / "chats.jsonl", ({"messages": chat, "answer": "x"} for chat in chats))
    return set_up(data(path, batch_size=1, prompt_column="messages", **settings), tokenizer)


@pytest.mark.parametrize("data", [SFTDataModule, PromptDataModule])
def test_calls_that_no_template_writes_are_refused_and_broken_ones_too(data: Any, tmp_path: Path, chat_tokenizer):
    settings = {"data": data, "answer_column": None} if data is SFTDataModule else {"data": data}
    with pytest.raises(ValueError, match="ignores the tool_calls"):
        chats(tmp_path, chat_tokenizer, [*LOOKS, {"role": "user", "content": "!"}, *LOOKS[1:]], **settings)
    for call in ({"name": "look", "arguments": "[1]"}, {"name": "look", "arguments": [1]}, {"name": None}):
        broken = [LOOKS[0], {**LOOKS[1], "tool_calls": [{"function": call}]}]
        with pytest.raises(
            ValueError, match=r"Line 1 of .*message 2 must have tool calls with a name, and with arguments as an object"
        ):
            chats(tmp_path, chat_tokenizer, broken, **settings)
    chat_tokenizer.chat_template = None
    if data is SFTDataModule:
        with pytest.raises(ValueError, match="tool_calls need a chat template"):
            chats(tmp_path, chat_tokenizer, LOOKS, **settings)


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": "", "tool_calls": json.dumps([CALL])},
        {"role": "assistant", "content": "", "function_call": CALL["function"]},
        {"from": "gpt", "value": "", "tool_calls": [CALL]},
    ],
)
def test_calls_are_read_in_the_forms_of_data_sets(turn: Any, tmp_path: Path, chat_tokenizer):
    shown = "{% for c in message.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    chat_tokenizer.chat_template = chat_tokenizer.chat_template.replace("<|im_end|>", f"{shown}<|im_end|>")
    data = chats(tmp_path, chat_tokenizer, [LOOKS[0], turn], answer_column=None)
    assert completions(next(iter(data.train_dataloader())), chat_tokenizer) == ['{"city": "Oslo"}<|im_end|>']


@pytest.mark.parametrize("key", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("has_template", [True, False])
def test_thinking_that_no_template_reads_is_counted(key: str, has_template: bool, tmp_path: Path, caplog, request):
    tokenizer = request.getfixturevalue("chat_tokenizer" if has_template else "plain_tokenizer")
    thinks = [LOOKS[0], {"role": "assistant", "content": "2", key: "one and one"}]
    chats(tmp_path, tokenizer, thinks, thinks, [LOOKS[0], {"role": "assistant", "content": "2"}], answer_column=None)
    assert f"2 turns of train have {key}, which is not trained on because the chat template does not" in caplog.text


def test_a_chat_stored_as_json_text_is_a_chat_and_other_text_is_text(tmp_path: Path, chat_tokenizer):
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    rows = [json.dumps(chat), json.dumps(chat[0]), json.dumps({"messages": chat}), json.dumps([{"id": 1, **chat[0]}])]
    rows += ["{'from': 'Oslo'}", '[{"role": "user"}]', "[1, 2,", '{"role": 3', '{"content": "1"}']
    prompts = chats(tmp_path, chat_tokenizer, *rows, data=PromptDataModule).prompts["train"]
    assert [prompt.messages[0]["content"] for prompt in prompts] == ["1", "1", "1", "1", *rows[4:]]
    (batch,) = chats(tmp_path, chat_tokenizer, rows[0], answer_column=None).train_dataloader()
    assert completions(batch, chat_tokenizer) == ["2<|im_end|>"]
    with pytest.raises(ValueError, match=r"Line 1 of .*: 'messages' is a chat as printed by Python"):
        chats(tmp_path, chat_tokenizer, str(chat), data=PromptDataModule)


def test_ranks_that_start_apart_have_the_date_of_rank_0(train_file: str, chat_tokenizer, monkeypatch):
    chat_tokenizer.chat_template = "{{ strftime_now('%F') }}" + chat_tokenizer.chat_template
    monkeypatch.setenv("LIGHTRL_RUN_START", "2026-11-30T00:01:00")
    data = PromptDataModule(train_file, batch_size=2)
    rank_0 = SimpleNamespace(broadcast=lambda own: "2026-11-29T23:59:00")  # what its strategy sends
    data.trainer = cast(Any, SimpleNamespace(strategy=rank_0, lightning_module=None))
    set_up(data, chat_tokenizer)
    assert chat_tokenizer.decode(data.prompts["train"][0].token_ids).startswith("2026-11-29<|im_start|>")


def test_the_date_of_a_template_is_that_of_the_runs_start_also_in_the_run_that_resumes(
    train_file: str, chat_tokenizer, monkeypatch
):
    chat_tokenizer.chat_template = "{% set f = '%-d %b %Y' %}{{ strftime_now(f) }}" + chat_tokenizer.chat_template
    for make in (PromptDataModule, SFTDataModule):
        monkeypatch.setenv("LIGHTRL_RUN_START", "2026-11-29T23:59:00")
        first = set_up(make(train_file, batch_size=2), chat_tokenizer)
        assert chat_tokenizer.decode(first.prompts["train"][0].token_ids).startswith("29 Nov 2026<|im_start|>")
        monkeypatch.setenv("LIGHTRL_RUN_START", "2026-11-30T00:01:00")
        resumed = set_up(make(train_file, batch_size=2), chat_tokenizer)
        assert resumed.prompt_stream.fingerprint != first.prompt_stream.fingerprint
        state = {"run_start": "2026-11-29T23:59:00"}
        resumed.load_state_dict(state)
        assert (resumed.prompt_stream.fingerprint, resumed.state_dict()) == (first.prompt_stream.fingerprint, state)
