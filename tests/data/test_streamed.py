"""Sources that are read in order while they are used."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from data_cases import set_up, write_rows
from torch.utils.data import IterableDataset

from lightrl.data import DataSource, PreferenceDataModule, PromptDataModule, SFTDataModule, prompts
from lightrl.data.streamed import StreamedRows, open_stream, shards_of

SIZES = (7, 5, 6)  # rows of the shards


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A dataset of three Parquet files."""
    (tmp_path / "data").mkdir()
    for shard, size in enumerate(SIZES):
        rows = [{"question": f"{shard}-{place}", "answer": str(place)} for place in range(size)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), tmp_path / f"data/train-0000{shard}-of-00003.parquet"
        )
    return str(tmp_path)


def opened(folder: str, *, shuffle: bool = True, buffer_rows: int = 4, **settings: Any) -> StreamedRows:
    source = DataSource(folder, streaming=True, shuffle_buffer=buffer_rows, **settings)
    shards = open_stream(folder, name=None, split="train", arguments={})
    return StreamedRows(source, "train", shards, seed=1, shuffle=shuffle)


def questions(rows: StreamedRows, first: int, end: int) -> list[str]:
    return [rows.key_at(number).item["question"] for number in range(first, end)]


ALL = [f"{shard}-{place}" for shard, size in enumerate(SIZES) for place in range(size)]


def test_every_pass_has_each_row_once_in_an_order_of_its_own(folder: str):
    rows = opened(folder)
    passes = [questions(rows, start, start + 18) for start in (0, 18, 36)]
    assert all(sorted(one) == sorted(ALL) for one in passes)
    assert len({tuple(one) for one in passes}) == 3
    assert {one[0][0] for one in passes} != {"0"}  # the shards too have an order of their own


def test_without_shuffling_the_order_is_that_of_the_shards(folder: str):
    rows = opened(folder, shuffle=False)
    assert questions(rows, 0, 20) == [*ALL, *ALL[:2]]
    assert [rows.where(rows.key_at(number)) for number in (0, 8)] == [
        f"Row 1 of shard 1 of {folder!r}", f"Row 2 of shard 2 of {folder!r}"
    ]  # fmt: skip


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("lowest", [0, 3, 9, 17, 18, 30, 41])
def test_a_resumed_stream_gives_the_same_rows(folder: str, shuffle: bool, lowest: int):
    rows = opened(folder, shuffle=shuffle)
    expected = questions(rows, 0, 60)
    state = json.loads(json.dumps(rows.state_dict(lowest)))
    assert lowest - 4 < state["number"] <= lowest
    resumed = opened(folder, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert questions(resumed, lowest, 60) == expected[lowest:]
    assert questions(resumed, 0, 20) == expected[:20]  # from the start, if it must be


def test_a_resumed_stream_does_not_read_what_comes_before(folder: str):
    opened_shards: list[int] = []
    rows = opened(folder, shuffle=False)
    questions(rows, 0, 17)
    resumed = opened(folder, shuffle=False)
    shards = enumerate(resumed.shards)
    resumed.shards = [lambda shard=shard, n=n: opened_shards.append(n) or shard() for n, shard in shards]
    resumed.load_state_dict(rows.state_dict(17))
    assert questions(resumed, 17, 18) == ALL[17:]
    assert opened_shards == [2]


def numbers(split: str, num: int) -> Iterator[dict[str, str]]:
    return ({"question": f"{split} {number}", "answer": "1"} for number in range(num))


class Stateful(IterableDataset):
    """Counts from where it is."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[int]:
        while self.next < 10:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize(
    "make", [lambda: (number for number in range(10)), Stateful], ids=["a generator is skipped", "a state is loaded"]
)
def test_any_iterable_resumes_exactly(make: Any):
    ten = DataSource("ten", streaming=True, shuffle_buffer=4)
    rows = StreamedRows(ten, "train", shards_of(make), seed=0, shuffle=True)
    expected = [rows.key_at(number).item for number in range(40)]
    assert Counter(expected) == dict.fromkeys(range(10), 4)
    resumed = StreamedRows(ten, "train", shards_of(make), seed=0, shuffle=True)
    resumed.load_state_dict(rows.state_dict(27))
    assert [resumed.key_at(number).item for number in range(27, 40)] == expected[27:]


def streamed(source: str, **settings: Any) -> DataSource:
    return DataSource(source, **({"streaming": True, "shuffle_buffer": 4} | settings))


def make_data(tokenizer: Any, source: Any, kind: type = PromptDataModule, **settings: Any) -> PromptDataModule:
    source = streamed(source) if isinstance(source, str) else source
    return set_up(kind(source, **({"batch_size": 2, "seed": 3} | settings)), tokenizer)


def test_prompts_of_a_stream_have_ids_and_fields_of_their_rows(folder: str, plain_tokenizer: Any):
    stream = make_data(plain_tokenizer, folder).prompt_stream
    one_epoch = [stream[position] for position in range(18)]
    assert {prompt.id for prompt in one_epoch} == {f"train-{question}" for question in ALL}
    assert all(prompt.id == f"train-{prompt.fields['question']}" for prompt in one_epoch)
    assert plain_tokenizer.decode(one_epoch[0].token_ids) == one_epoch[0].fields["question"]


@pytest.mark.parametrize("source", ["data/*.parquet", "lines.jsonl", "test_streamed.numbers"])
def test_patterns_lines_and_functions_can_be_streamed(folder: str, plain_tokenizer: Any, source: str):
    write_rows(Path(folder) / "lines.jsonl", ({"question": question, "answer": "1"} for question in ALL))
    is_function = source.startswith("test_")
    path = streamed(source, arguments={"num": 18}) if is_function else str(Path(folder) / source)
    stream = make_data(plain_tokenizer, path).prompt_stream
    found = {stream[position].fields["question"] for position in range(18)}
    assert found == ({f"train {number}" for number in range(18)} if is_function else set(ALL))


def test_streamed_and_other_sources_are_mixed_by_weight(folder: str, tmp_path: Path, plain_tokenizer: Any):
    path = write_rows(tmp_path / "few.jsonl", ({"problem": problem, "answer": "1"} for problem in "xy"))
    few = DataSource(path, label="few", columns={"question": "problem"})
    stream = make_data(plain_tokenizer, [streamed(folder, weight=3, label="many"), few]).prompt_stream
    ids = [stream[position].id for position in range(24)]
    assert len({name for name in ids if name.startswith("train-many-")}) == 18
    assert [name for name in ids if "few" in name].count("train-few-0") == 3


def test_a_bad_row_of_a_stream_is_named_when_it_is_met(folder: str, plain_tokenizer: Any, monkeypatch):
    monkeypatch.setattr(prompts, "ROWS_AT_ONCE", 4)
    stream = make_data(plain_tokenizer, folder, shuffle=False, row_filter=lambda row: row["question"] != "0-1",
                       answer_column="answer", max_prompt_tokens=3).prompt_stream  # fmt: skip
    path = next((Path(folder) / "data").glob("train-00001*"))
    rows = [{"question": "too long", "answer": "1"}] * 5
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    stream.prepare(0, 12)
    assert stream[1] is None
    assert stream[6].id == "train-0-6"
    with pytest.raises(ValueError, match=r"Row 1 of shard 2 of .* has 8 prompt tokens, but at most 3 fit"):
        stream[7]


def test_a_source_that_breaks_is_named_with_the_row(plain_tokenizer: Any):
    def breaks() -> Iterator[int]:
        yield 0
        raise OSError("the network is gone")

    rows = StreamedRows(DataSource("far away"), "train", [breaks], seed=0, shuffle=False)
    for _ in range(2):  # and again
        with pytest.raises(ValueError, match=r"Row 2 of 'far away' cannot be read: the network is gone"):
            rows.key_at(0)


def test_a_hub_name_without_a_network_says_so(plain_tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"Dataset 'nobody/nothing' .* cannot be loaded: .*Fix the name, or go online"):
        make_data(plain_tokenizer, "nobody/nothing")


def test_a_source_without_rows_is_refused(plain_tokenizer: Any):
    with pytest.raises(ValueError, match=r"Data 'test_streamed.numbers' has no rows"):
        make_data(plain_tokenizer, streamed("test_streamed.numbers", arguments={"num": 0}))


def test_the_rows_of_a_pass_can_be_bounded_and_validation_is_read_at_once(folder: str, plain_tokenizer: Any):
    train, validation = streamed(folder, max_rows=8), streamed(folder, split="train", max_rows=3)
    data = make_data(plain_tokenizer, train, shuffle=False, validation=validation)
    assert [data.prompt_stream[position].fields["question"] for position in (7, 8, 16)] == ["1-0", "0-0", "0-0"]
    assert [prompt.fields["question"] for prompt in data.prompts["validation"]] == ["0-0", "0-1", "0-2"]


class Counted(SFTDataModule):
    def collate(self, rows: Any) -> Any:
        return [row.id for row in rows]


class CountedPairs(PreferenceDataModule):
    collate = Counted.collate


def batches(data: Any, num: int) -> list[list[str]]:
    loader = data.train_dataloader()
    return [loader.batch_at(number) for number in range(num)]


@pytest.mark.parametrize("streaming", [True, False])
def test_chats_are_rendered_when_they_are_read(folder: str, plain_tokenizer: Any, streaming: bool, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_CHECKED", 4)
    monkeypatch.setattr("lightrl.data.completions.BATCHES", 3)
    source = streamed(folder) if streaming else DataSource(folder)
    settings = {"row_filter": lambda row: row["question"] != "0-1"}
    data = make_data(plain_tokenizer, source, Counted, **settings)
    assert data.prompts["train"].checked is None
    expected = batches(data, 51)
    assert all(len(batch) == 2 for batch in expected)
    times = Counter(name for batch in expected for name in batch)  # 6 epochs of 17 rows, in windows of 6
    assert len(times) == 17
    assert set(times.values()) == {6}
    first = data.state_dict()["windows"]["starts"]
    resumed = make_data(plain_tokenizer, source, Counted, **settings)
    resumed.load_state_dict(json.loads(json.dumps(data.state_dict())))
    loader = resumed.train_dataloader()
    assert [loader.batch_at(number) for number in range(48, 51)] == expected[48:]
    starts = resumed.state_dict()["windows"]["starts"]
    assert min(starts)[0] >= min(first)[0] > 0  # nothing was read from the start
    assert [loader.batch_at(number) for number in range(3)] == expected[:3]


def test_pairs_are_rendered_when_they_are_read_in_the_order_of_the_stream(folder: str, plain_tokenizer: Any):
    data = make_data(plain_tokenizer, folder, CountedPairs, prompt_column="question", shuffle=False,
                     chosen_column="question", rejected_column="answer", max_tokens=7)  # fmt: skip
    assert batches(data, 10)[8:] == [["train-2-4", "train-2-5"], ["train-0-0", "train-0-1"]]
    assert data.train_dataloader().num_batches is None


def test_a_bad_chat_is_named_when_it_is_read(folder: str, plain_tokenizer: Any, monkeypatch):
    monkeypatch.setattr(prompts, "ROWS_AT_ONCE", 0)  # rows that are checked at the start
    data = make_data(plain_tokenizer, folder, Counted, max_tokens=4)
    with pytest.raises(ValueError, match=r"The chat of prompt 'train-\d-\d' has 5 tokens, more than 4"):
        batches(data, 1)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_an_address_of_a_file_is_read_as_it_is(suffix: str, tmp_path: Path, plain_tokenizer: Any):
    rows = datasets.Dataset.from_list([{"question": "1", "answer": "2"}, {"question": "3", "answer": "4"}])
    file = tmp_path / f"rows.{suffix}"
    rows.to_parquet(file) if suffix == "parquet" else rows.to_json(file)
    stream = make_data(plain_tokenizer, f"file://{file}").prompt_stream
    assert {stream[position].fields["answer"] for position in range(2)} == {"2", "4"}
