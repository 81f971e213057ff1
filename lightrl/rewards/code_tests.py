"""code_tests: whether the Python program in a completion passes its prompt's tests, each run in a Sandbox.

The prompt's field `tests` is a list with three kinds of entries:

    {"stdin": "1 2\\n", "stdout": "3\\n"}                              the program reads and prints
    {"function": "add", "arguments": [1, 2], "expected": 3}          a call; the value is compared outside the sandbox
    "assert add(1, 2) == 3"                                          statements after the program, as in MBPP

Each test runs in a process of its own, so none sees what another left. A program never sees an expected output or
value. Statements run in the program's process, where a program written for that can fake their success; the tricks that
policies discover (`sys.exit(0)`, printing what a success prints) do not work.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import re
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, get_args

from lightrl.checks.user_code import function_of
from lightrl.rewards.sandbox import Limits, Run, Sandbox
from lightrl.trajectory import Trajectory

TestResult = Literal[
    "accepted", "wrong_answer", "runtime_error", "time_limit", "memory_limit", "output_limit", "no_program"
]

_FAILURES: tuple[TestResult, ...] = get_args(TestResult)[1:]  # without accepted
Test = Mapping[str, Any] | str  # a dict with stdin and stdout or function, arguments and expected; or code
_FENCE = re.compile(r"[ \t]*```[ \t]*([\w+-]*)")
_MAX_FENCES_INSIDE = 4  # fences in the docstrings of one program
_DEFINITION = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# The program's own output is discarded; its return value is printed after a word that it has not seen.
_CALL = """

import json as _json, os as _os, sys as _sys
_out = _os.dup(1)
_os.dup2(_os.open(_os.devnull, _os.O_WRONLY), 1)
_word, _name, _arguments = _json.loads(_sys.stdin.read())
def _plain(value):
    if isinstance(value, dict):
        return {{_plain(key): _plain(item) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value  # of numpy
_value = _plain({function})
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
    """Whether the program in the completion passes the tests of its prompt.

    The program is the last fenced block of the completion that is Python and no mere example of the use of an earlier
    one; without any, the last that names no language and is no mere output; without a fence, the whole completion.

    Args:
        trajectory: its prompt has the field `tests`, see above.
        partial_credit: the reward is the fraction of tests passed; else 1 for all of them and 0 for fewer.
        cpu_s, wall_s, memory_mib: limits of one test, see `Limits`.
        total_s: tests that would start later than that count as `time_limit`; keep it below the reward's timeout,
            which drops the trajectory.
        tolerance: absolute and relative, for numbers.
        sandbox: dotted path of a Sandbox class.

    Returns:
        `reward`; `accuracy`: 1 if all tests pass; `passed_fraction`; 1 for the result of the first test that failed
        and 0 for the others, among `wrong_answer`, `runtime_error`, `time_limit`, `memory_limit`, `output_limit` and
        `no_program`; `extracted`, the program.

    Raises:
        ValueError: if the prompt has no tests, or one of another kind.
        RewardError: if the sandbox does not work here.
    """
    tests = _tests_of(trajectory)
    program = extracted_program(trajectory.completion)
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


def extracted_program(completion: str) -> str:
    """The program that `code_tests` tests; "" if all blocks are of other languages."""
    lines = completion.splitlines(keepends=True)
    fences = {number: match[1].lower() for number, line in enumerate(lines) if (match := _FENCE.match(line))}
    if not fences:
        return completion
    first = min(fences)
    if len(fences) % 2 and not fences[first] and _has_effect(_tree("".join(lines[:first]))):
        return extracted_program(f"```python\n{completion}")  # the prompt ended with it
    blocks: list[tuple[str, str]] = []
    last = -1
    for start in sorted(fences):
        ends = [number for number in fences if number > start][: 1 + _MAX_FENCES_INSIDE]
        if start <= last or not ends:
            continue
        last = next((end for end in ends if _tree("".join(lines[start + 1 : end]))), ends[0])  # others are in strings
        blocks.append((fences[start], "".join(lines[start + 1 : last])))
    python = [text for language, text in blocks if language in ("python", "py", "python3")]
    program, defined, is_real = "", set[str](), False
    for text in python or [text for language, text in blocks if not language]:
        tree = _tree(text)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} if tree else set()
        own = {node.name for node in tree.body if isinstance(node, _DEFINITION)} if tree else set()
        is_example = bool(names & defined - own) and not own and not names & {"input", "sys"}
        is_output = not _has_effect(tree) if tree else not python
        if is_real and (is_example or is_output):
            continue
        program = f"{program}\n{text}" if names & defined - own else text
        defined, is_real = own | defined, _has_effect(tree)
    return program


def _tree(text: str) -> ast.Module | None:
    """The syntax tree of Python code; None for anything else."""
    with warnings.catch_warnings():  # about its strings
        warnings.simplefilter("ignore")
        try:
            return ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _has_effect(tree: ast.Module | None) -> bool:
    """Whether code is more than a value, as an output may be, or a word of a sentence."""
    return any(
        isinstance(node, ast.Call) or (isinstance(node, ast.stmt) and not isinstance(node, ast.Expr | ast.AnnAssign))
        for node in (ast.walk(tree) if tree else ())
    )


def _from_json(text: str) -> object:
    """Reads JSON as `json.loads` does, with integers of any length."""
    return json.loads(text, parse_int=lambda digits: int(Decimal(digits)))


def run_test(program: str, test: Test, sandbox: Sandbox, limits: Limits, tolerance: float = 0.0) -> TestResult:
    if isinstance(test, Mapping) and "stdin" in test:
        run = sandbox.run(program, str(test["stdin"]), limits)
        is_right = run.exit_code == 0 and same_output(run.stdout, str(test["stdout"]), tolerance)
        return _of_run(run) or ("accepted" if is_right else "wrong_answer")
    word = secrets.token_hex(8)
    if isinstance(test, str):
        source, request = f"{program}\n\n{test}\n{_CALL.format(function='True')}", [word, "", []]
    else:
        source = program + _CALL.format(function=f"{test['function']}(*_arguments)")
        request = [word, test["function"], test["arguments"]]
    run = sandbox.run(source, json.dumps(request), limits)
    failure = _of_run(run)
    if failure == "runtime_error" and isinstance(test, str) and "\nAssertionError" in run.stderr:
        return "wrong_answer"
    if failure is not None:
        return failure
    before, _, text = run.stdout.rpartition(word)
    if before == text == "":  # it exited early
        return "wrong_answer"
    expected = True if isinstance(test, str) else test["expected"]
    try:
        is_same = _same_value(_from_json(text), expected, tolerance)
    except (ValueError, RecursionError, OverflowError):  # what a program prints is data: no JSON, too deep, too large
        is_same = False
    return "accepted" if is_same else "wrong_answer"


def same_output(output: str, expected: str, tolerance: float = 0.0) -> bool:
    """Equal line by line, except for trailing spaces and empty lines; numbers within `tolerance`."""
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
    """Equal as JSON values: a tuple is a list, True is not 1."""
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


def _of_run(run: Run) -> TestResult | None:
    if run.stopped_by is not None:
        results: dict[str, TestResult] = {"time": "time_limit", "memory": "memory_limit", "output": "output_limit"}
        return results.get(run.stopped_by, "runtime_error")
    return None if run.exit_code == 0 else "runtime_error"


def _tests_of(trajectory: Trajectory) -> Sequence[Test]:
    tests = trajectory.prompt.fields.get("tests")
    if isinstance(tests, str):  # a column of JSON text
        tests = _from_json(tests)
    if not isinstance(tests, list | tuple) or not tests:
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} needs a list of tests in its field 'tests', got {tests!r:.99}. Its "
            f"fields are {sorted(trajectory.prompt.fields)}."
        )
    for test in tests:
        kinds = ({"stdin", "stdout"}, {"function", "arguments", "expected"})
        if isinstance(test, str) or (isinstance(test, Mapping) and any(kind <= test.keys() for kind in kinds)):
            continue
        raise ValueError(
            f"Prompt {trajectory.prompt.id!r} has a test of an unknown kind: {test!r:.200}. A test is text with "
            "statements, a dict with stdin and stdout, or one with function, arguments and expected."
        )
    return tests


@functools.lru_cache(maxsize=8)
def _sandbox(path: str) -> Sandbox:
    sandbox: Sandbox = function_of(path, "sandbox")()
    return sandbox
