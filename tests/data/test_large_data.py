"""Data of any size: train prompts that are made when their turn comes."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from data_cases import set_up, write_rows

from lightrl.data import DataSource, PromptDataModule, prompts, rows, stream
from lightrl.errors import RolloutError
from lightrl.rollout.prompts import PromptCursor


@pytest.fixture(autouse=True)
def _many_are_five(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_CHECKED", 4)
    monkeypatch.setattr(prompts, "NUM_CHECKED", 2)
    monkeypatch.setattr(stream, "FINGERPRINT_PROMPTS", 1)


def write(path: Path, questions: list[str]) -> str:
    content = [{"question": question, "answer": str(len(question))} for question in questions]
    if path.suffix != ".parquet":
        return write_rows(path, content)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return str(path)


def make_data(tokenizer, train, **settings) -> PromptDataModule:
    return set_up(PromptDataModule(train, **({"batch_size": 2, "seed": 3} | settings)), tokenizer)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_that_are_not_checked_at_the_start_give_the_same_prompts(
    tmp_path: Path, plain_tokenizer, suffix: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stream, "FINGERPRINT_PROMPTS", 9)
    source = write(tmp_path / f"train{suffix}", ["a" * size for size in range(1, 10)])
    unchecked = make_data(plain_tokenizer, source)
    monkeypatch.setattr(prompts, "MAX_CHECKED", 9)
    checked = make_data(plain_tokenizer, source)
    assert (unchecked.prompts["train"].checked is None, checked.prompts["train"].checked is None) == (True, False)
    assert unchecked.prompt_stream.num_iterations == checked.prompt_stream.num_iterations
    one, other = ([data.prompt_stream[position] for position in range(20)] for data in (unchecked, checked))
    assert one == other
    assert unchecked.prompt_stream.fingerprint == checked.prompt_stream.fingerprint


def test_only_the_first_rows_are_rendered_at_the_start(tmp_path: Path, plain_tokenizer, monkeypatch):
    rendered: list[str] = []
    whole = prompts.ChatRenderer.rendered
    monkeypatch.setattr(
        prompts.ChatRenderer,
        "rendered",
        lambda self, prompts, where: rendered.extend(item.id for item in prompts) or whole(self, prompts, where),
    )
    data = make_data(plain_tokenizer, write(tmp_path / "train.jsonl", ["ab"] * 9), shuffle=False)
    assert rendered == ["train-0", "train-1", "train-0"]  # the last for the fingerprint
    assert data.prompt_stream[7].id == rendered[-1] == "train-7"


def test_rows_that_are_dropped_are_skipped_and_counted(tmp_path: Path, plain_tokenizer):
    source = write(tmp_path / "train.jsonl", ["a", "bbbbbb", "c", "dd", "e", "ffffff"])
    limits = {"max_prompt_tokens": 4, "prompt_overflow": "drop", "row_filter": lambda row: row["question"] != "c"}
    data = make_data(plain_tokenizer, source, shuffle=False, **limits)
    cursor = PromptCursor(data.prompt_stream)
    assert [cursor.choose(0) for _ in range(4)] == [0, 3, 4, 6]
    assert cursor.num_skipped == 3
    assert [prompt.id for prompt in data.prompt_stream.first(3).prompts if prompt] == ["train-0"]


def test_a_filter_that_leaves_nothing_ends_the_run(tmp_path: Path, plain_tokenizer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("lightrl.rollout.prompts.MAX_SKIPPED", 50)
    data = make_data(plain_tokenizer, write(tmp_path / "train.jsonl", ["a"] * 6), row_filter=lambda row: False)
    with pytest.raises(RolloutError, match="50 consecutive rows yielded no prompt"):
        PromptCursor(data.prompt_stream).choose(0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "x"', "Line 5 of .* is not valid JSON"),
        ('{"answer": "1"}', "Line 5 of .* has no column 'question'"),
        ('{"question": "xxxxx", "answer": "1"}', "Line 5 of .* has 5 prompt tokens, but at most 4 fit"),
    ],
)
def test_a_bad_row_is_named_when_its_turn_comes(tmp_path: Path, plain_tokenizer, line: str, message: str):
    path = Path(write(tmp_path / "train.jsonl", ["a"] * 6))
    path.write_text("\n".join([*path.read_text().splitlines()[:4], line, '{"question": "x", "answer": "1"}']))
    data = make_data(plain_tokenizer, str(path), shuffle=False, max_prompt_tokens=4)
    cursor = PromptCursor(data.prompt_stream)
    assert [cursor.choose(0) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(RolloutError, match=message):
        cursor.choose(0)


def test_a_bad_row_among_the_first_is_found_at_the_start(tmp_path: Path, plain_tokenizer):
    with pytest.raises(ValueError, match=r"Line 2 of .* has an empty column 'question'"):
        make_data(plain_tokenizer, write(tmp_path / "train.jsonl", ["a", " ", "b", "c", "d"]))


def test_a_bad_row_of_the_fingerprint_is_refused_at_the_start(tmp_path: Path, plain_tokenizer, monkeypatch):
    monkeypatch.setattr(stream, "FINGERPRINT_PROMPTS", 2)
    with pytest.raises(ValueError, match=r"Line 4 of .* has an empty column 'question'"):
        make_data(plain_tokenizer, write(tmp_path / "train.jsonl", ["a", "b", "c", " ", "d", "e"]))


def test_a_row_has_one_prompt_in_all_its_epochs(tmp_path: Path, plain_tokenizer):
    prompt_stream = make_data(plain_tokenizer, write(tmp_path / "train.jsonl", ["a", "b"]), shuffle=False).prompt_stream
    prompt_stream.prepare(0, 3)
    prompt_stream.prepare(3, 3)
    assert [prompt_stream[position].id for position in range(4)] == ["train-0", "train-1", "train-0", "train-1"]
    assert all(prompt_stream[position] is prompt_stream[position % 2] for position in range(6))


def test_blank_lines_do_not_count_and_the_last_may_lack_its_end(tmp_path: Path):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'\n{"a": 1}\r\n  \n\n{"a": 2}\n{"a": 3}')
    assert list(rows.read_rows(str(path))) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert list(rows.read_rows(str(path), max_rows=2)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize(
    ("name", "content", "lines"),
    [
        ("a.jsonl", '\n{"question": "a"}\n\n \n{"question": "b"}\n{"question": "c"}\n', [2, 5, 6]),
        ("a.csv", 'question,x\n"a\nb",1\n\n"a",2\r\n"a\r\n\rb",3\na,4', [2, 5, 6, 9]),
        ("a.json", '[{"question": "a"},\n\n{"question": "b"}]', [1, 2]),  # its rows, which may share lines
    ],
)
def test_a_row_is_named_by_its_line_after_blank_ones(
    tmp_path: Path, plain_tokenizer, name: str, content: str, lines: list[int], streaming: bool
):
    path = tmp_path / name
    path.write_bytes(content.encode())
    data = PromptDataModule(DataSource(str(path), streaming=streaming), batch_size=1)
    data.attach(plain_tokenizer)
    problems = [str(error) for made in data.prompts_on_reading("train").one_pass() for error in made]
    kind = "Row" if name == "a.json" else "Line"
    assert [problem.partition(" has no column 'answer'")[0] for problem in problems] == [
        f"{kind} {line} of '{path}'" for line in lines
    ]
