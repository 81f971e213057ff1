"""Data with an error: one message with file and line, at the start, whether rows are read at once or streamed."""

import gzip
import json
import logging
from pathlib import Path

import pytest
import tiny
from bad_input_rows import each, row
from hypothesis import given, settings
from hypothesis import strategies as st

from lightrl.data import DataSource, PromptDataModule, TrajectoryDataModule
from lightrl.data.chat import row_messages
from lightrl.data.rows import read_csv, read_json, read_lines, require_column

pytestmark = pytest.mark.bad_input

OK = b'{"question": "1", "answer": "2"}\n'
CSV = b"question,answer\n"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def line(question="1", answer="2"):
    return json.dumps({"question": question, "answer": answer}).encode()


def message(**fields):
    return line([fields])


# A file's name and content.
FILES = [
    row("latin-1 in .jsonl", ("a.jsonl", OK + '{"question": "é"}'.encode("latin-1")), "Line 2 of 'a.jsonl'", "not UTF-8", "0xe9", "iconv"),
    row("latin-1 in .json", ("a.json", '[\n{"question": "é"}]'.encode("latin-1")), "Line 2 of 'a.json'", "not UTF-8", "iconv"),
    row("latin-1 in .csv", ("a.csv", CSV + "é,2".encode("latin-1")), "Line 2 of 'a.csv'", "not UTF-8", "iconv"),
    row("UTF-16 in .jsonl", ("a.jsonl", OK.decode().encode("utf-16")), "'a.jsonl' is UTF-16", "iconv"),
    row("a pointer of Git LFS as .jsonl", ("a.jsonl", POINTER), "'a.jsonl' is a Git LFS pointer", "git lfs pull"),
    row("a pointer of Git LFS as .parquet", ("a.parquet", POINTER), "'a.parquet' is a Git LFS pointer", "git lfs pull"),
    row("a gzipped file cut short", ("a.jsonl", gzip.compress(OK * 99)[:40]), "'a.jsonl' cannot be unpacked", "Create it again"),
    row("a web page", ("a.jsonl", b"<!doctype html>"), "Line 1 of 'a.jsonl' is not valid JSON"),
    row("a line cut short", ("a.jsonl", OK + b'{"question": "1", "ans'), "Line 2 of 'a.jsonl' is not valid JSON"),
    row("lines that end with CR alone", ("a.jsonl", OK[:-1] + b"\r" + OK), "Line 1 of 'a.jsonl' is not valid JSON", "Extra data"),
    row("JSON 100,000 deep", ("a.jsonl", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "Line 1 of 'a.jsonl'", "too deep"),
    row("a .json file 100,000 deep", ("a.json", b"[" * 100_000), "'a.json' is not valid JSON", "too deep"),
    row("a number of 6,000 digits", ("a.jsonl", b'{"a": ' + b"1" * 6000 + b"}"), "Line 1 of 'a.jsonl'", "too many digits"),
    row("a lone surrogate in the prompt", ("a.jsonl", line("\ud800")), "Line 1 of 'a.jsonl'", "lone surrogate", "Remove it"),
    row("a list in place of a row", ("a.jsonl", OK + b"\n[1]\n"), "Line 3 of 'a.jsonl' must be a JSON object, got a list"),
    row("an empty .jsonl", ("a.jsonl", b""), "'a.jsonl' has no rows"),
    row("blank lines alone", ("a.jsonl", b"\n\n  \n"), "'a.jsonl' has no rows"),
    row("an empty .json", ("a.json", b""), "'a.json' is not valid JSON"),
    row("one object in .json", ("a.json", OK), "'a.json' must be a JSON list of objects"),
    row("lines in .json", ("a.json", OK + OK), "'a.json' is not valid JSON", "name it .jsonl"),
    row("an empty .csv", ("a.csv", b""), "'a.csv' has no rows"),
    row("a row with more columns than the first line", ("a.csv", CSV + b"1,2\n1,2,3\n"), "Line 3 of 'a.csv' has 3 columns", "2", "Quote"),
    row("a row with fewer columns", ("a.csv", CSV + b"1\n"), "Line 2 of 'a.csv' has 1 column,", "2"),
    row("two columns of a name", ("a.csv", b"question,question\n1,2\n"), "'a.csv' has two columns named 'question'", "Rename"),
    row("a quote that stays open in .csv", ("a.csv", CSV + b'"1,2\n3,4\n'), "Line 2 of 'a.csv' is not valid CSV", "quotes"),
    row("a .parquet that is none", ("a.parquet", b"PAR1 no"), "a.parquet"),
    row("no such column", ("a.jsonl", b'{"prompt": "1", "answer": "2"}'), "Line 1 of 'a.jsonl' has no column 'question'", "prompt_column"),
    row("no answer", ("a.jsonl", OK + b'{"question": "1"}'), "Line 2 of 'a.jsonl' has no column 'answer'", "answer_column"),
    row("an answer that is null", ("a.jsonl", line(answer=None)), "Line 1 of 'a.jsonl' has an empty column 'answer'"),
    row("an answer that is NaN", ("a.jsonl", line(answer=float("nan"))), "Line 1 of 'a.jsonl' has an empty column 'answer'"),
    row("a prompt that is NaN", ("a.jsonl", line(float("nan"))), "Line 1 of 'a.jsonl' has an empty column 'question'"),
    row("a blank prompt", ("a.jsonl", line("  ")), "Line 1 of 'a.jsonl' has an empty column 'question'"),
    row("no messages", ("a.jsonl", line([])), "Line 1 of 'a.jsonl' has an empty column 'question'"),
    row("an object as the prompt", ("a.jsonl", line({"a": 1})), "Line 1 of 'a.jsonl'", "text or a list of chat messages"),
    row("a message with `rol`", ("a.jsonl", message(rol="user", content="1")), "Line 1 of 'a.jsonl': message 1 must have a role", "'rol'"),
    row("a role with a typing error", ("a.jsonl", message(role="usr", content="1")), "message 1", "Did you mean user"),
    row("a role that is a list", ("a.jsonl", message(role=[], content="1")), "message 1 must have a role like user"),
    row("a message without content", ("a.jsonl", message(role="user")), "message 1 must have text content"),
    row("parts without a type", ("a.jsonl", message(role="user", content=["1"])), "message 1 must have text or parts"),
    row("messages that are texts", ("a.jsonl", line(["1"])), "message 1 must be {'role': ..., 'content': ...}, got '1'"),
]  # fmt: skip

# Settings of the data module.
SETTINGS = [
    row("a template with an open brace", {"prompt_template": "{question} {"}, "prompt_template", "Double any braces"),
    row("a template with a field without a name", {"prompt_template": "{question} {}"}, "prompt_template", "without a name"),
    row("a template that uses no column", {"prompt_template": "Solve it."}, "prompt_template", "all prompts would be the same"),
    row("a template with an unknown column", {"prompt_template": "{quest}"}, "prompt_template uses 'quest'", "Line 1 of 'a.jsonl'"),
    row("a template with a position", {"prompt_template": "{0}"}, "prompt_template='{0}'", "without a name"),
    row("a template with a conversion", {"prompt_template": "{question!x}"}, "prompt_template", "unknown conversion 'x'"),
    row("a template with JSON", {"prompt_template": '{prompt} {"answer": 1}'}, "prompt_template", "Double any braces"),
    row("a template with a wrong format", {"prompt_template": "{question:d}"}, "prompt_template", "Line 1 of 'a.jsonl'", "'d'"),
    row("columns that are not there", {"file": DataSource("a.jsonl", columns={"question": "q"})}, "Line 1 of 'a.jsonl' has no column 'q'", "its columns: 'question', 'answer'"),
    row("a filter that is not there", {"row_filter": "json.nothing"}, "row_filter='json.nothing'", "has no 'nothing'"),
    row("a filter that raises", {"row_filter": lambda row: row["x"]}, "row_filter raised KeyError('x') on Line 1 of 'a.jsonl'"),
    row("a chat template that does not parse", {"chat_template": "{% for m in messages %}"}, "Line 1 of 'a.jsonl'", "chat template", "endfor"),
    row("a chat template that raises", {"chat_template": "{{ raise_exception('no') }}"}, "Line 1 of 'a.jsonl'", "chat template", "no"),
    row("a chat template that is not there", {"chat_template": "chat.jinja"}, "chat_template='chat.jinja'", "neither a file nor"),
    row("a chat template that prints nothing", {"chat_template": "{# #}"}, "Line 1 of 'a.jsonl' renders to no prompt tokens"),
    row("a prompt that is too long", {"max_prompt_tokens": 1, "prompt_template": "{prompt} {prompt}"}, "Line 1 of 'a.jsonl'", "at most 1 fit"),
    row("a batch of 0", {"batch_size": 0}, "batch_size must be >= 1, got 0"),
    row("a limit of 0 tokens", {"max_prompt_tokens": 0}, "max_prompt_tokens must be >= 1, got 0"),
    row("an unknown overflow", {"prompt_overflow": "cut"}, "prompt_overflow must be error or drop, got 'cut'"),
    row("a validation file that is not there", {"validation": "b.jsonl"}, "'b.jsonl' does not exist", ": a.jsonl."),
    row("a file of another kind", {"validation": "a.txt"}, "a.txt"),
]  # fmt: skip

# Lines of recorded trajectories.
RECORDED = [
    row("recorded: not JSON", b"{", "Line 1 of 'a.jsonl' is neither a TrajectoryLog trajectory"),
    row("recorded: without fields", b"{}", "Line 1 of 'a.jsonl' is neither a TrajectoryLog trajectory"),
    row(
        "recorded: latin-1",
        '{"é": 1}'.encode("latin-1"),
        "Line 1 of 'a.jsonl' is neither a TrajectoryLog trajectory",
        "utf-8",
    ),
    row(
        "recorded: 100,000 deep",
        b"[" * 100_000,
        "Line 1 of 'a.jsonl' is neither a TrajectoryLog trajectory",
        "recursion",
    ),
    row("recorded: an empty file", b"", "a.jsonl", "batch_size"),
]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def set_up(file="a.jsonl", **changed):
    data = PromptDataModule(file, **{"batch_size": 1, **changed})
    data.attach(tiny.char_tokenizer())
    data.setup("fit")
    return data


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
@each(FILES)
def test_a_file_is_refused_with_its_name_and_line(case, streaming):
    name, content = case.given
    Path(name).write_bytes(content)
    with pytest.raises(ValueError, match=name) as caught:
        set_up(DataSource(name, streaming=streaming))
    case.check(str(caught.value))


@each(SETTINGS)
def test_a_setting_of_the_data_is_refused(case):
    Path("a.jsonl").write_bytes(OK)
    Path("a.txt").write_bytes(OK)
    with pytest.raises(ValueError, match=r".") as caught:
        set_up(**case.given)
    case.check(str(caught.value))


@each(RECORDED)
def test_recorded_trajectories_are_refused_with_file_and_line(case):
    Path("a.jsonl").write_bytes(case.given)
    with pytest.raises(ValueError, match=r"a\.jsonl") as caught:
        TrajectoryDataModule("a.jsonl").setup("fit")
    case.check(str(caught.value))


@pytest.mark.parametrize("streaming", [False, True], ids=["read", "streamed"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", gzip.compress(OK)),
        ("a.jsonl.gz", gzip.compress(OK)),
        ("a.jsonl", b"\xef\xbb\xbf" + OK),
        ("a.json", b"\xef\xbb\xbf[" + OK + b"]"),
        ("a.csv", b"\xef\xbb\xbf" + CSV + b"1,2\n"),
        ("a.csv", CSV + b"1," + b"2" * 200_000 + b"\n"),
        ("a.csv", CSV + b'1,"2\n3"\n'),
    ],
    ids=["gzip", "gzip by name", "BOM", "BOM in JSON", "BOM in CSV", "a long field", "a line break in quotes"],
)
def test_what_can_be_read_is_read(name, content, streaming):
    Path(name).write_bytes(content)
    assert set_up(DataSource(name, streaming=streaming)).prompt_stream[0].fields["question"] == "1"


def test_repeated_prompts_and_a_validation_on_train_prompts_are_logged(caplog):
    Path("a.jsonl").write_bytes(OK * 30)
    with caplog.at_level(logging.WARNING):
        set_up(validation="a.jsonl")
    assert "29 of 30 train prompts are duplicates." in caplog.messages
    assert any(text.startswith("30 of 30 validation prompts are also train prompts") for text in caplog.messages)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(st.one_of(st.binary(max_size=60), st.text('{}[]",:\\ud8001é\n', max_size=40).map(str.encode)))
def test_readers_of_files_return_rows_or_one_message_with_the_file(tmp_path_factory, content):
    file = tmp_path_factory.getbasetemp() / "fuzzed"
    file.write_bytes(content)
    for read in (read_lines, read_json, read_csv):
        problem = ""
        try:
            assert all(str(file) in name and isinstance(row, dict | ValueError) for name, row in read(file))
        except ValueError as error:
            problem = str(error)
        assert not problem or str(file) in problem


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "type", "x"]), inner)
    ),
    max_leaves=6,
)


@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(JSON)
def test_a_rows_messages_have_roles_and_contents_or_one_message_names_the_row(value):
    made, problem = [], ""
    try:
        prompt = require_column({"q": value}, "q", "prompt_column", where="Row 7")
        made = row_messages(
            {"q": value}, prompt, prompt_column="q", prompt_template="{prompt}", system_prompt=None, where="Row 7"
        )
    except ValueError as error:
        problem = str(error)
    assert all(isinstance(item["role"], str) for item in made)
    assert made or "Row 7" in problem
