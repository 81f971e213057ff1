"""Weighted sources: shares, orders and resume, at any number of ranks."""

import logging
import re
from collections import Counter
from pathlib import Path

import pytest
from data_cases import set_up, write_rows

from lightrl.data import DataSource, MixtureOrder, PromptDataModule
from lightrl.rollout.prompts import PromptCursor
from lightrl.trajectory import Prompt


def made_rows(split: str, num: int = 5, word: str = "made") -> list[dict]:
    return [{"question": f"{word} {split} {index}", "answer": str(index)} for index in range(num)]


def source(num: int, weight: float = 1.0, **settings) -> DataSource:
    return DataSource("test_mixture.made_rows", weight=weight, arguments={"num": num, **settings})


def make_data(tokenizer, train, **settings) -> PromptDataModule:
    data = PromptDataModule(train, **{"batch_size": 4, "seed": 3, **settings})
    return set_up(data, tokenizer, max_prompt_tokens=100)


def ids(data: PromptDataModule, start: int, end: int) -> list[str]:
    return [data.prompt_stream[position].id for position in range(start, end)]


@pytest.mark.parametrize(
    ("weights", "length"),
    [((3, 1), 4), ((0.5, 0.25, 0.25), 4), ((2, 1), 3), ((1, 1, 1, 7), 10), ((0.999, 0.001), 1000)],
)
def test_every_stretch_of_positions_has_the_shares_of_the_weights(weights, length):
    order = MixtureOrder([11] * len(weights), weights, seed=0)
    turns = [order[position] // 11 for position in range(4000)]
    for start in (0, 17, 1003):
        found = Counter(turns[start : start + 2 * length])
        for number, weight in enumerate(weights):
            share = weight / sum(weights) * 2 * length
            assert abs(found[number] - share) <= 2.1, (start, number)


def test_a_source_gives_each_row_once_before_any_comes_again():
    order = MixtureOrder([5, 8], [1, 3], seed=7)
    rows = [order[position] for position in range(4 * 5 * 8)]
    first, second = [row for row in rows if row < 5], [row - 5 for row in rows if row >= 5]
    assert all(sorted(first[start : start + 5]) == list(range(5)) for start in range(0, 40, 5))
    assert all(sorted(second[start : start + 8]) == list(range(8)) for start in range(0, 120, 8))
    assert len({tuple(first[start : start + 5]) for start in range(0, 40, 5)}) > 1


def test_prompts_of_several_sources_have_ids_of_their_own_and_a_batch_has_both(plain_tokenizer):
    data = make_data(
        plain_tokenizer, [source(6, weight=3, word="many"), DataSource("test_mixture.made_rows", label="few")]
    )
    assert len(data.prompt_stream) == 11
    assert Counter(name.split("-")[1] for name in ids(data, 0, 4)) == {"0": 3, "few": 1}
    assert data.prompt_stream[0].id.startswith("train-")


def test_the_position_is_all_there_is_to_resume_at_whatever_the_number_of_ranks(plain_tokenizer, monkeypatch):
    """Rank 0 owns the prompts: its cursor is the same state for 1, 2 or 8 ranks, and goes on where it stood."""
    train = [source(6, weight=3), DataSource("test_mixture.made_rows", label="few")]
    straight = PromptCursor(make_data(plain_tokenizer, train).prompt_stream)
    expected = [straight.at(straight.choose(0)) for _ in range(60)]
    played: list[Prompt | None] = []
    position = 0
    for world_size, until in ((1, 13), (8, 30), (2, 60)):
        monkeypatch.setenv("WORLD_SIZE", str(world_size))
        monkeypatch.setenv("RANK", "0")
        cursor = PromptCursor(make_data(plain_tokenizer, train).prompt_stream)
        cursor.next_position = position
        played += [cursor.at(cursor.choose(0)) for _ in range(until - position)]
        position = cursor.next_position
    assert None not in expected
    assert played == expected


def test_other_weights_are_another_stream_which_a_resume_refuses(plain_tokenizer):
    few = DataSource("test_mixture.made_rows", label="few")
    one, other = (make_data(plain_tokenizer, [source(6, weight=weight), few]).prompt_stream for weight in (1, 2))
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *[({"weight": weight}, "must be above 0 and finite") for weight in (0, -1, float("inf"))],
        ({"shuffle_buffer": 100}, r"shuffle_buffer=100 has no effect without streaming\. Remove it"),
        ({"max_rows": 0}, "max_rows must be >= 1, got 0"),
    ],
    ids=str,
)
def test_settings_of_a_source_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataSource("train.jsonl", **settings)


@pytest.mark.parametrize(
    "data", [[{"question": "1 + 1?"}], made_rows, {"question": ["1 + 1?"]}], ids=["rows", "a function", "columns"]
)
def test_an_object_that_is_no_source_is_named_with_what_to_do(data):
    named = "dict" if isinstance(data, list) else type(data).__name__
    with pytest.raises(TypeError, match=rf"Data must be a file, .* got a {named}\. Write other data to a \.jsonl file"):
        PromptDataModule(data, batch_size=1)


def test_two_sources_of_the_same_label_are_refused():
    with pytest.raises(ValueError, match="labels of the data's sources must be unique"):
        PromptDataModule([DataSource("a", label="x"), DataSource("b", label="x")], batch_size=1)


def test_a_source_of_which_nothing_is_left_is_named(plain_tokenizer):
    with pytest.raises(ValueError, match=r"No row in 'test_mixture.made_rows' passes the filters"):
        make_data(plain_tokenizer, [source(6), source(3, word="b")], row_filter=lambda row: row["question"][0] != "b")


def test_columns_are_renamed_for_each_source(tmp_path: Path, plain_tokenizer):
    one = write_rows(tmp_path / "a.jsonl", [{"problem": "1+1", "solution": "2", "level": 3}])
    other = write_rows(tmp_path / "b.jsonl", [{"text": "1+2", "solution": "3"}])
    first = DataSource(one, columns={"question": "problem", "answer": "solution"})
    second = DataSource(other, columns={"question": "text", "answer": "solution"})
    data = make_data(plain_tokenizer, [first, second], batch_size=1)
    assert data.prompts["train"][0].fields == {"question": "1+1", "answer": "2", "level": 3}
    assert [prompt.fields["question"] for prompt in data.prompts["train"]] == ["1+1", "1+2"]


def test_rows_are_filtered_and_counted_and_keep_their_ids(plain_tokenizer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        data = make_data(plain_tokenizer, "test_mixture.made_rows", row_filter="test_mixture.is_odd", batch_size=2)
    assert [prompt.id for prompt in data.prompts["train"]] == ["train-1", "train-3"]
    assert "row_filter dropped 3 of 5 rows of 'test_mixture.made_rows'." in caplog.text


def is_odd(row: dict) -> bool:
    return int(row["answer"]) % 2 == 1


def test_short_prompts_are_left_out_and_counted(plain_tokenizer, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        limits = {"min_prompt_tokens": 12, "max_prompt_tokens": 12}
        data = make_data(plain_tokenizer, "test_mixture.made_rows", batch_size=1, **limits)
    assert len(data.prompts["train"]) == 5
    with caplog.at_level(logging.WARNING), pytest.raises(ValueError, match=r"All 5 rows .* were dropped"):
        make_data(plain_tokenizer, "test_mixture.made_rows", min_prompt_tokens=13)
    assert "Dropped 5 of 5 prompts with fewer than 13 tokens." in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param({"nun": 3}, r"raised TypeError.*unexpected keyword argument 'nun'", id="unknown argument"),
        pytest.param({"num": 0}, r"has no rows", id="no rows"),
    ],
)
def test_a_function_that_makes_no_rows_is_named(plain_tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_data(plain_tokenizer, DataSource("test_mixture.made_rows", arguments=arguments))


@pytest.mark.parametrize("setting", ["name", "split"])
@pytest.mark.parametrize("streaming", [False, True])
def test_settings_of_hub_datasets_are_refused_for_a_file(
    train_file: str, plain_tokenizer, setting: str, streaming: bool
):
    with pytest.raises(ValueError, match=rf"{setting}='main' of data '.*' has no effect on a file"):
        make_data(plain_tokenizer, DataSource(train_file, streaming=streaming, **{setting: "main"}))


def test_arguments_without_a_function_are_refused(train_file: str, plain_tokenizer):
    with pytest.raises(ValueError, match="only functions and task folders take arguments"):
        make_data(plain_tokenizer, DataSource(train_file, arguments={"num": 3}))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_the_weight_of_a_source_that_is_not_mixed_is_refused(split: str):
    sources = {"train": source(3), split: source(3, weight=2)}
    with pytest.raises(ValueError, match=rf"weight=2 has no effect on {split} data 'test_mixture.made_rows'"):
        PromptDataModule(**sources, batch_size=1)


@pytest.mark.parametrize("source", ["/", ".", "empty", "empty/"])
def test_a_folder_that_is_no_dataset_is_refused_by_name(source: str, plain_tokenizer, tmp_path: Path, monkeypatch):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"Dataset '{re.escape(source)}' .* cannot be loaded"):
        set_up(PromptDataModule(source, batch_size=1), plain_tokenizer)


@pytest.mark.parametrize("source", ["", " \n"])
def test_an_empty_source_is_refused_before_it_is_looked_up(source: str) -> None:
    with pytest.raises(ValueError, match="source of data must be a file, a hub name or a function"):
        PromptDataModule(train=source, batch_size=1)
