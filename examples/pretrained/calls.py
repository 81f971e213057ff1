"""Writes function calls of the Berkeley leaderboard BFCL (Apache-2.0) as rows, and rewards the right call.

    python -m examples.pretrained.calls --to runs/pretrained/calls

The rows come from the package `bfcl-eval`, which pip downloads (2 MB). A row's question consists of the signatures of
one or more functions and a request. `answer` is a right call, and `possible_answer` lists, as JSON, the values that
each argument may have; "" among them means that the argument may be left out.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import tempfile
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

from examples.pretrained.download import download
from lightrl.trajectory import Trajectory

PACKAGE = "bfcl-eval==2026.3.23"
SHA256 = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
DATA = "bfcl_eval/data"
NUM_HELD_OUT = 100
PARTIAL = 0.3  # for the right name, times the fraction of right arguments, unless all are right
_TYPES = {"integer": "int", "string": "str", "boolean": "bool", "any": "str", "array": "list", "tuple": "list"}

Values = dict[str, list[Any]]  # argument → values that it may have


def right_call(trajectory: Trajectory) -> dict[str, float]:
    """Returns 1 for the right call and nothing else; less for the right name with some right arguments.

    Compares as BFCL does: a string's case, spaces and punctuation do not count, and an int may stand for a float.
    Unlike BFCL, refuses whatever surrounds the call, positional arguments, repeated keys and empty optional strings.
    """
    ((name, possible),) = json.loads(trajectory.prompt.fields["possible_answer"]).items()
    call = call_of(trajectory.completion.strip()) if trajectory.finish_reason == "stop" else None
    fraction = right_fraction(call[1], possible) if call is not None and call[0] == name else 0.0
    is_correct = fraction == 1
    reward = 1.0 if is_correct else PARTIAL * fraction
    return {"reward": reward, "accuracy": float(is_correct), "format": float(call is not None)}


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the function's name and the arguments if the text is one call with literal keyword arguments."""
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns about invalid escapes
            node = ast.parse(text, mode="eval").body
        if not isinstance(node, ast.Call) or node.args or ast.get_source_segment(text, node) != text:
            return None  # another expression, positional arguments, or text around the call
        name = ast.unparse(node.func)
        arguments = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        dicts = [inner for inner in ast.walk(node) if isinstance(inner, ast.Dict)]
        has_repeats = any(len(ast.literal_eval(inner)) < len(inner.keys) for inner in dicts)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    has_repeats = has_repeats or len(arguments) < len(node.keywords)
    has_names = all(keyword.arg for keyword in node.keywords)  # not f(**{"a": 1})
    is_one_line = len(text.splitlines()) == 1  # further lines may have comments
    is_plain = re.fullmatch(r"[\w.]+", name) is not None and text.startswith(f"{name}(") and is_one_line
    return (name, arguments) if is_plain and has_names and not has_repeats else None


def right_fraction(given: dict[str, Any], possible: Values) -> float:
    """Returns the fraction of the given and the required arguments that are right."""
    names = given.keys() | {name for name, values in possible.items() if "" not in values}
    num_right = sum(name in given and is_right(given[name], possible.get(name, [])) for name in names)
    return num_right / len(names) if names else 1.0


def is_right(value: Any, possible: list[Any]) -> bool:
    """Returns whether the value of an argument is one of the possible ones; 5 may stand for 5.0."""
    may_be_float = type(value) is int
    return any(
        _equal(value, one) or (may_be_float and type(one) is float and value == one) for one in possible if one != ""
    )


def _equal(value: Any, wanted: Any) -> bool:
    if type(value) is not type(wanted):  # True is not 1
        return False
    if isinstance(value, str):
        return _standard(value) == _standard(wanted)
    if isinstance(value, list):
        return len(value) == len(wanted) and all(map(_equal, value, wanted))
    return right_fraction(value, wanted) == 1 if isinstance(value, dict) else bool(value == wanted)


def _standard(text: str) -> str:
    return re.sub(r"[ ,./\-_*^]", "", text).lower().replace("'", '"')


def signature_of(function: dict[str, Any]) -> str:
    """Returns the signature in Python's notation; optional parameters end in ` = ...`."""
    parameters = function["parameters"]
    texts = [
        f"{name}: {_type_of(schema)}{'' if name in parameters.get('required', []) else ' = ...'}"
        for name, schema in parameters["properties"].items()
    ]
    return f"{function['name']}({', '.join(texts)})"


def _type_of(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return f"Literal[{', '.join(map(repr, schema['enum']))}]"
    name = _TYPES.get(schema["type"], schema["type"])
    return f"list[{_type_of(schema['items'])}]" if name == "list" else name


def reference_call(name: str, possible: Values) -> str:
    """Returns a right call: the first value of each argument that may not be left out."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in _first_values(possible).items())})"


def _first_values(possible: Values) -> dict[str, Any]:
    def first(value: Any) -> Any:
        if isinstance(value, list):
            return [first(item) for item in value]
        return _first_values(value) if isinstance(value, dict) else value

    return {name: first(values[0]) for name, values in possible.items() if "" not in values}


def rows_of(questions: str, answers: str) -> list[dict[str, str]]:
    """Returns a row for each question with a possible answer and without a system message."""
    answer_by_id = {answer["id"]: answer["ground_truth"] for answer in map(json.loads, answers.splitlines())}
    rows = []
    for question in map(json.loads, questions.splitlines()):
        (chat,), functions, (truth,) = question["question"], question["function"], answer_by_id[question["id"]]
        ((name, possible),) = truth.items()
        (required,) = [one["parameters"].get("required", []) for one in functions if one["name"] == name]
        possible = {
            key: [one for one in values if key not in required or one != ""] for key, values in possible.items()
        }
        if len(chat) == 1 and all(possible.values()):
            texts = [f"Function: {signature_of(function)}\n{function['description']}" for function in functions]
            rows.append(
                {
                    "question": "\n".join([*texts, f"Request: {chat[0]['content']}"]),
                    "answer": reference_call(name, possible),
                    "possible_answer": json.dumps({name: possible}, ensure_ascii=False),
                    "request": chat[0]["content"],
                    "function": name,
                }
            )
    return rows


def write_rows(wheel: Path, folder: Path, *, num_held_out: int = NUM_HELD_OUT) -> None:
    """Writes train.jsonl and held-out rows: test.jsonl, multiple.jsonl (several functions), live_simple.jsonl (users').

    No held-out row has a request of a train row, or a right call of its function; `multiple` may show the function.
    """
    with zipfile.ZipFile(wheel) as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist() if name.startswith(DATA)}
    simple, multiple, live_simple = (
        rows_of(texts[f"{DATA}/BFCL_v4_{name}.json"], texts[f"{DATA}/possible_answer/BFCL_v4_{name}.json"])
        for name in ("simple_python", "multiple", "live_simple")
    )
    num_by_function = Counter(row["function"] for row in simple)
    alone = [row for row in simple if num_by_function[row["function"]] == 1]
    held_out = random.Random(0).sample(alone, num_held_out)
    train = [row for row in simple if row not in held_out]
    seen = {row[column] for row in train for column in ("function", "request")}
    folder.mkdir(parents=True, exist_ok=True)
    for name, split in {"test": held_out, "multiple": multiple, "live_simple": live_simple}.items():
        _write(folder / f"{name}.jsonl", [row for row in split if not {row["function"], row["request"]} & seen])
    _write(folder / "train.jsonl", train)


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    print(f"{path}: {len(rows)} requests")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--to", type=Path, required=True, help="the folder to write")
    folder = parser.parse_args().to
    with tempfile.TemporaryDirectory() as scratch:
        write_rows(download(f"{PACKAGE} --hash=sha256:{SHA256}", Path(scratch)), folder)
