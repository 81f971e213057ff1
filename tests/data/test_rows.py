import csv
import datetime
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from lightrl.data import DataSource
from lightrl.data.rows import read_rows
from lightrl.data.streamed import StreamedRows, open_stream

ROWS = [{"question": "a", "answer": "1"}, {"question": "b", "answer": "2"}, {"question": "c", "answer": "3"}]


def write(path: Path) -> str:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(ROWS, indent=1))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["question", "answer"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif path.suffix == ".arrow":
        table = pyarrow.Table.from_pylist(ROWS)
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return str(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet", ".arrow"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    source = write(tmp_path / f"train{suffix}")
    assert list(read_rows(source)) == ROWS
    assert list(read_rows(source, max_rows=2)) == ROWS[:2]


def test_a_small_file_of_lines_that_is_written_again_in_place_gives_what_it_had(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    rows = read_rows(write(path))
    path.write_text("")
    assert list(rows) == ROWS


def test_values_of_a_csv_file_stay_the_text_that_they_are(tmp_path: Path):
    path = tmp_path / "train.csv"
    path.write_text('question,answer,note\na,007,NA\nb,1.50,\n"c\nd",null,"3,4"\n')
    assert list(read_rows(str(path))) == [
        {"question": "a", "answer": "007", "note": "NA"},
        {"question": "b", "answer": "1.50", "note": ""},
        {"question": "c\nd", "answer": "null", "note": "3,4"},
    ]


def test_a_csv_file_that_has_changed_is_read_again(tmp_path: Path):
    path = tmp_path / "train.csv"
    for answer in ("1", "22"):
        path.write_text(f"answer\n{answer}\n")
        assert list(read_rows(str(path))) == [{"answer": answer}]


def test_a_missing_folder_is_named_with_the_nearest_one(tmp_path: Path):
    (tmp_path / "gsm8k").mkdir()
    with pytest.raises(ValueError, match=r"does not exist.* There is no folder .*gsm9k\. Nearest in .*: gsm8k\."):
        read_rows(str(tmp_path / "gsm9k" / "train.jsonl"))


def test_a_hub_name_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"'openai/gsm8k-nowhere' \(name='main', split='train'\) cannot be loaded"):
        read_rows("openai/gsm8k-nowhere", name="main")


def test_a_local_dataset_folder_is_read_by_datasets(tmp_path: Path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl")
    assert list(read_rows(str(tmp_path / "set"), max_rows=2)) == ROWS[:2]


def test_columns_that_are_no_json_become_text(tmp_path: Path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"day": datetime.date(2024, 2, 1), "n": 3}]), path)
    assert list(read_rows(str(path))) == [{"day": "2024-02-01", "n": 3}]


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
def test_chats_in_parquet_lack_the_keys_that_only_other_messages_have(tmp_path: Path, streaming: bool):
    call = {"role": "assistant", "tool_calls": [{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]}
    row = {"messages": [{"role": "user", "content": "1 + 1?"}, call], "level": None}
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    if streaming:
        (shard,) = open_stream(str(path), name=None, split="train", arguments={})
        rows = StreamedRows(DataSource("chats"), "train", [shard], seed=0, shuffle=False)
        assert rows.key_at(0).item == row
    else:
        assert list(read_rows(str(path))) == [row]
