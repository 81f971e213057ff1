"""code_tests: checks whether the Python program in a completion passes its prompt's tests, each run in a Sandbox.

The prompt's `tests` field, a list or its JSON text, has three kinds of entries:

    {"stdin": "1 2\\n", "stdout": "3\\n"}                              input and output, as text or as lists of lines
    {"function": "add", "arguments": [1, 2], "expected": 3}          a call, with arguments in order or by name; the
                                                                     value is compared outside the sandbox
    "assert add(1, 2) == 3"                                          statements to run after the program, as in MBPP

The tests in APPS and TACO (`input_output`) and in LiveCodeBench (`public_test_cases` and the compressed
`private_test_cases`; the function's name is in the `metadata` column) need no conversion. Tests call a function in the
program or a method of its class `Solution`; code under `if __name__ == "__main__":` runs only for tests with `stdin`.

Each test runs in a separate process, so no test sees what another left behind. A program never sees an expected output
or value. Statements run in the program's process, where a program could deliberately fake their success, but the tricks
that policies discover (`sys.exit(0)`, printing what a success prints) do not work.
"""

from __future__ import annotations

import ast
import base64
import functools
import io
import json
import math
import pickle
import re
import secrets
import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, get_args

from lightrl.checks.user_code import function_of
from lightrl.rewards.sandbox import Limits, Run, Sandbox
from lightrl.rewards.text_rewards import fenced_blocks
from lightrl.trajectory import JsonMapping, Trajectory

TestResult = Literal[
    "accepted", "wrong_answer", "runtime_error", "time_limit", "memory_limit", "output_limit", "no_program"
]
_FAILURES: tuple[TestResult, ...] = get_args(TestResult)[1:]  # all except accepted
Test = JsonMapping | str  # statements; or a dict of stdin and stdout, or of function, arguments and accepted
_FENCE = re.compile(r"^([ \t>]*(?:```|~~~).*)$", re.MULTILINE)
_MAX_TEST_BYTES = 1 << 30  # after decompression
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Runs the program as a module named "solution", so that its main part does not run but its classes can be pickled.
_IMPORTED = """
__import__("sys").modules["solution"] = __import__("sys").modules[__name__]
__name__ = "solution"
exec(compile({program!a}, "solution.py", "exec"))
__name__ = "__main__"
"""
# Discards the program's output and prints the function's return value after a word that the program has not seen.
_CALL = """

import json as _json, os as _os, sys as _sys
_out = _os.dup(1)
_os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 1)
_word, _name, _arguments = _json.loads(_sys.stdin.read())
def _plain(value):
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # NumPy arrays and numbers
def _called(name):
    owner, _, last = name.rpartition(".")
    if owner or last in globals():
        return eval(name)
    return getattr(Solution(), last)
_value = not _name or _plain(_called(_name)(*_arguments[0], **_arguments[1]))
_os.write(_out, (_word + _json.dumps(_value)).encode())
"""


def code_tests(
    trajectory: Trajectory,
    *,
    partial_credit: bool = False,
    cpu_s: float = 5.0,
    wall_s: float = 10.0,
    total_s: float = 25.0,
    memory_mib: int = 512,
    tolerance: float = 0.0,
    sandbox: str = "lightrl.rewards.sandbox.LocalSandbox",
) -> dict[str, float | str]:
    """Checks whether the program in the completion passes its prompt's tests.

    The program is the last fenced Python block that does more than show how to use an earlier one. If no block is
    marked as Python, it is the last unmarked block that is not just output; without a fence, the whole completion.

    Args:
        trajectory: its prompt must have a `tests` field, described at the top of this file.
        partial_credit: whether the reward is the fraction of tests passed, instead of 1 if all pass and 0 otherwise.
        cpu_s, wall_s, memory_mib: limits for one test, see `Limits`.
        total_s: tests that would start later than this count as `time_limit`; keep it below the reward's timeout,
            which drops the trajectory.
        tolerance: absolute and relative tolerance for numbers.
        sandbox: dotted path to a Sandbox class.

    Returns:
        `reward`; `accuracy`: 1 if all tests pass; `passed_fraction`; `wrong_answer`, `runtime_error`, `time_limit`,
        `memory_limit`, `output_limit` and `no_program`: 1 for the result of the first test that failed and 0 for the
        others; `extracted`, the program.

    Raises:
        ValueError: if the prompt has no tests, or an unknown kind of test.
        RewardError: if the sandbox does not work on this system.
    """
    tests = _tests_of(trajectory)
    program = extracted_program(trajectory.answer)
    deadline = time.monotonic() + total_s
    limits = Limits(cpu_s=cpu_s, wall_s=wall_s, memory_mib=memory_mib)
    results: list[TestResult] = []
    for test in tests if program.strip() else ():
        if results and not partial_credit and results[-1] != "accepted":
            break
        is_late = time.monotonic() > deadline
        results.append("time_limit" if is_late else run_test(program, test, _sandbox(sandbox), limits, tolerance))
    failed: TestResult | None = next((item for item in results if item != "accepted"), None)
    if not program.strip():
        failed = "no_program"
    passed_fraction = results.count("accepted") / len(tests)
    is_accurate = float(failed is None)
    return {
        "reward": passed_fraction if partial_credit else is_accurate,
        "accuracy": is_accurate,
        "passed_fraction": passed_fraction,
        **{name: float(name == failed) for name in _FAILURES},
        "extracted": program,
    }


def extracted_program(answer: str) -> str:
    """Returns the program that `code_tests` tests, or "" if all blocks are in other languages."""
    before, fence, _ = _FENCE.split(answer, maxsplit=1) if _FENCE.search(answer) else (answer, "", "")
    if fence.strip() in ("```", "~~~") and _has_effect(_tree(before)):
        return extracted_program(f"{fence.strip()}python\n{answer}")  # the prompt ended with the opening fence
    blocks = fenced_blocks(answer, lambda text: _tree(text) is not None)
    if not blocks:
        return "" if fence else answer
    python = [text for language, text in blocks if language in ("python", "py", "python3", "py3")]
    program, defined, has_program = "", set[str](), False
    for text in python or [text for language, text in blocks if not language]:
        tree = _tree(text)
        used_names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree else set()
        new_names = {node.name for node in tree.body if isinstance(node, _DEFINITION)} if tree else set()
        uses_earlier = bool(used_names & defined - new_names)
        is_example = uses_earlier and not new_names and not used_names & {"input", "sys"}
        is_output = not _has_effect(tree) if tree else not python
        if has_program and (is_example or is_output):
            continue
        program = f"{program}\n{text}" if uses_earlier else text
        defined, has_program = new_names | defined, _has_effect(tree)
    return program


def _tree(text: str) -> ast.Module | None:
    """Returns the syntax tree, or None if the text is not Python."""
    with warnings.catch_warnings():  # Python warns about invalid escapes
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _has_effect(tree: ast.Module | None) -> bool:
    """Returns whether code does something. A program's output, or a word of prose, parses as code that does nothing."""
    return any(
        isinstance(node, ast.Call) or (isinstance(node, ast.stmt) and not isinstance(node, ast.Expr | ast.AnnAssign))
        for node in (ast.walk(tree) if tree else ())
    )


def _from_json(text: str) -> object:
    """Reads JSON like `json.loads`, but with integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def run_test(program: str, test: Test, sandbox: Sandbox, limits: Limits, tolerance: float = 0.0) -> TestResult:
    """Runs one test in the sandbox. A test with `stdin` runs the program; any other test imports it."""
    if isinstance(test, Mapping) and "stdin" in test:
        run = sandbox.run(program, test["stdin"], limits)
        is_right = run.exit_code == 0 and same_output(run.stdout, test["stdout"], tolerance)
        return _failure_of(run) or ("accepted" if is_right else "wrong_answer")
    word, source = secrets.token_hex(8), _IMPORTED.format(program=program)
    if isinstance(test, str):
        source, request = f"{source}\n{test}\n", [word, "", []]
    else:
        request = [word, test["function"], test["arguments"]]
    run = sandbox.run(source + _CALL, json.dumps(request), limits)
    failure = _failure_of(run)
    if failure == "runtime_error" and isinstance(test, str) and "\nAssertionError" in run.stderr:
        return "wrong_answer"
    if failure is not None:
        return failure
    before, _, text = run.stdout.rpartition(word)
    if before == text == "":  # the program exited early
        return "wrong_answer"
    accepted = [True] if isinstance(test, str) else test["accepted"]
    try:
        value = _from_json(text)
        is_same = any(_same_value(value, expected, tolerance) for expected in accepted)
    except (ValueError, RecursionError, OverflowError):  # the output is not JSON, or too deep or large
        is_same = False
    return "accepted" if is_same else "wrong_answer"


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Compares line by line, ignoring trailing spaces and trailing empty lines; numbers may differ by `tolerance`."""
    lines, expected_lines = output.rstrip().splitlines(), expected.rstrip().splitlines()
    if [line.rstrip() for line in lines] == [line.rstrip() for line in expected_lines]:
        return True
    words, expected_words = output.split(), expected.split()
    if tolerance <= 0 or len(words) != len(expected_words) or len(lines) != len(expected_lines):
        return False
    return all(_same_word(*pair, tolerance) for pair in zip(words, expected_words, strict=True))


def _same_word(word: str, expected: str, tolerance: float) -> bool:
    if word == expected:
        return True
    try:
        return math.isclose(float(word), float(expected), rel_tol=tolerance, abs_tol=tolerance)
    except ValueError:
        return False


def _same_value(value: object, expected: object, tolerance: float) -> bool:
    """Compares JSON values: a tuple equals a list, but True does not equal 1."""
    if isinstance(expected, list | tuple):
        if not isinstance(value, list) or len(value) != len(expected):
            return False
        return all(_same_value(*pair, tolerance) for pair in zip(value, expected, strict=True))
    if isinstance(expected, dict):
        if not isinstance(value, dict) or value.keys() != {str(key) for key in expected}:
            return False
        return all(_same_value(value[str(key)], item, tolerance) for key, item in expected.items())
    if isinstance(expected, bool) or isinstance(value, bool) or not isinstance(expected, int | float):
        return value is expected if isinstance(expected, bool) else bool(value == expected)
    if not isinstance(value, int | float):
        return False
    return value == expected or (tolerance > 0 and math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance))


def _failure_of(run: Run) -> TestResult | None:
    if run.stopped_by is not None:
        results: dict[str, TestResult] = {"time": "time_limit", "memory": "memory_limit", "output": "output_limit"}
        return results.get(run.stopped_by, "runtime_error")
    return None if run.exit_code == 0 else "runtime_error"


def _tests_of(trajectory: Trajectory) -> Sequence[Test]:
    fields = trajectory.prompt.fields
    tests = fields.get("tests")
    try:
        return _read_tests(tests, fields)
    except (ValueError, TypeError, LookupError, AttributeError, EOFError, pickle.PickleError, zlib.error) as error:
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs tests in its 'tests' field, got {tests!r:.99}: {error}. Its fields "
            f"are {sorted(fields)}. lightrl/rewards/code_tests.py lists the accepted formats."
        ) from error


def _read_tests(tests: Any, fields: JsonMapping) -> list[Test]:
    if isinstance(tests, str):
        text = tests
        if not text.lstrip().startswith(("[", "{")):  # LiveCodeBench's private tests
            try:
                data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_TEST_BYTES)
            except (ValueError, zlib.error) as error:
                raise ValueError("text must be a JSON list, or LiveCodeBench's compressed tests") from error
            text = str(_TextOnly(io.BytesIO(data)).load())
        tests = _from_json(text)
    if isinstance(tests, Mapping):
        inputs, outputs = (tests.get(f"{name}s", tests.get(name)) for name in ("input", "output"))
        pairs = zip(inputs, outputs, strict=True)
        if name := tests.get("fn_name"):  # the value may be wrapped in a list
            return [_call(name, given, [out, *(out[:1] if isinstance(out, list) else ())]) for given, out in pairs]
        tests = [{"input": given, "output": out} for given, out in pairs]
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError("the field must be a non-empty list")
    return [_read_test(test, fields) for test in tests]


def _read_test(test: Any, fields: JsonMapping) -> Test:
    if isinstance(test, str):
        return test
    given = {key: value for key, value in test.items() if value is not None} if isinstance(test, Mapping) else {}
    name, output = given.get("function", given.get("fn_name")), given.get("output")
    if output is not None and (name or given.get("testtype") == "functional"):
        metadata = fields.get("metadata")
        name = name or (json.loads(metadata) if isinstance(metadata, str) else metadata or {}).get("func_name")
        if name is None:
            raise ValueError("a functional test needs its function's name as func_name in the 'metadata' column")
        return _call(name, [_from_json(line) for line in given.get("input", "").splitlines()], [_from_json(output)])
    # `given` omits null values, but null is allowed as `expected`
    if name is not None and "expected" in test and given.keys() <= {"function", "fn_name", "arguments", "expected"}:
        return _call(name, given.get("arguments", []), [test["expected"]])
    stdout = given.get("stdout", output)
    if name is not None or stdout is None:
        raise ValueError(
            f"unknown kind of test: {test!r:.200}. A test must be a string of Python statements, a dict with stdin and "
            "stdout, or a dict with function, arguments and expected"
        )
    return {"stdin": _lines(given.get("stdin", given.get("input", ""))), "stdout": _lines(stdout)}


def _call(function: str, arguments: Any, accepted: Sequence[object]) -> Test:
    if not isinstance(arguments, list | tuple | Mapping):
        raise ValueError(f"the arguments of {function} must be a list or an object, got {arguments!r:.99}")
    pair = [[], arguments] if isinstance(arguments, Mapping) else [arguments, {}]
    return {"function": function, "arguments": pair, "accepted": accepted}


def _lines(value: object) -> str:
    """Converts text or a number to text, and a list of these to lines."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str | int | float) for item in items):
        raise ValueError(f"input and output must be text or a list of lines, got {value!r:.99}")
    return "\n".join(str(item).removesuffix("\n") for item in items) if isinstance(value, list) else str(value)


class _TextOnly(pickle.Unpickler):
    """Reads a pickled text; refuses pickles that refer to a function or class, since pickles are not trusted."""

    def find_class(self, module: str, name: str) -> Any:
        raise ValueError(f"its pickle calls {module}.{name}")


@functools.lru_cache(maxsize=8)
def _sandbox(path: str) -> Sandbox:
    sandbox: Sandbox = function_of(path, "sandbox")()
    return sandbox
