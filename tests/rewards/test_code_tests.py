"""code_tests: results of the three kinds of tests, what is extracted, and programs that only look right."""

import base64
import json
import pickle
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_functions import trajectory_that

from lightrl.errors import RewardError
from lightrl.rewards.code_tests import code_tests, extracted_program, same_output
from lightrl.rewards.sandbox import Limits, LocalSandbox, Run
from lightrl.rewards.text_rewards import fenced_blocks

SUM = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "5 5", "stdout": "10"}]
ADD = [
    {"function": "add", "arguments": [1, 2], "expected": 3},
    {"function": "add", "arguments": [[1], [2]], "expected": [1, 2]},
]
ASSERT = ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]
RIGHT_SUM = "print(sum(map(int, input().split())))"
RIGHT_ADD = "def add(a, b):\n    return a + b\n"


@pytest.fixture(scope="module", autouse=True)
def _needs_a_sandbox() -> None:
    try:
        LocalSandbox().run("", "", Limits())
    except RewardError as error:
        pytest.skip(str(error))


def numbers_of(program: str, tests: object, **settings: object) -> dict[str, object]:
    return code_tests(trajectory_that(f"So:\n```python\n{program}\n```\nDone.", tests=tests), **settings)


def result_of(metrics: dict[str, object]) -> str:
    numbers = {"reward", "accuracy", "passed_fraction", "extracted"}
    return next((name for name, value in metrics.items() if name not in numbers and value == 1.0), "accepted")


@pytest.mark.parametrize(("program", "tests"), [(RIGHT_SUM, SUM), (RIGHT_ADD, ADD), (RIGHT_ADD, ASSERT)])
def test_a_right_program_is_accepted(program, tests):
    numbers = numbers_of(program, tests)
    assert (numbers["reward"], numbers["accuracy"], numbers["passed_fraction"]) == (1.0, 1.0, 1.0)
    assert result_of(numbers) == "accepted"
    assert numbers["extracted"] == program + "\n"


@pytest.mark.parametrize(
    ("program", "tests", "result"),
    [
        *[("print(4)", SUM, "wrong_answer"), ("raise ValueError", SUM, "runtime_error")],
        *[("import os; os.abort()", SUM, "runtime_error"), ("import time; time.sleep(600)", SUM, "time_limit")],
        ("x = [bytearray(1 << 24) for _ in range(100)]", SUM, "memory_limit"),
        *[("while True: print('no')", SUM, "output_limit"), ("def add(a, b): return a * b", ASSERT, "wrong_answer")],
        *[("def add(a, b): return 4", ADD, "wrong_answer"), ("def plus(a, b): return a + b", ADD, "runtime_error")],
        *[("def add(a, b): return object()", ADD, "runtime_error"), (" ", SUM, "no_program")],
    ],
)
def test_a_wrong_program_has_its_result(program, tests, result):
    limits = {"wall_s": 1.0} if result == "time_limit" else {"cpu_s": 600.0, "wall_s": 600.0, "total_s": 600.0}
    numbers = numbers_of(program, tests, memory_mib=256, **limits)
    assert numbers["reward"] == numbers["accuracy"] == 0.0
    assert result_of(numbers) == result


@pytest.mark.parametrize("tests", [SUM, ADD, ASSERT], ids=["output", "calls", "statements"])
@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "print('3'); print('true'); import os; os._exit(0)",
        "class Same:\n    def __eq__(self, other): return True\nadd = lambda a, b: 4\nimport sys; sys.exit()",
    ],
    ids=["exits", "exits at once", "prints a success", "equals everything"],
)
def test_a_program_that_only_looks_right_earns_nothing(program, tests):
    assert numbers_of(program, tests)["reward"] == 0.0


# Read the word from stdin and print it before these: what a program prints is data, and never a failure of the reward.
ECHO = "import sys, json, os; text = sys.stdin.read(); word = json.loads(text)[0] if text[:1] == '[' else ''; "


@pytest.mark.parametrize("tests", [SUM, ADD, ASSERT], ids=["output", "calls", "statements"])
@pytest.mark.parametrize(
    "printed",
    ["'[' * 100_000", "'1' * 5_000", "'1' * 400", "''", "'{'", "'NaN'", "word * 3", "'\\ud800'"],
    ids=["brackets", "long integer", "large integer", "nothing", "half", "NaN", "words", "surrogate"],
)
def test_what_a_program_prints_scores_0_and_drops_nothing(printed, tests):
    program = ECHO + f"os.write(1, (word + {printed}).encode('utf8', 'surrogatepass')); os._exit(0)"
    numbers = numbers_of(program, tests, tolerance=1e-6)
    assert numbers["reward"] == 0.0
    assert result_of(numbers) == "wrong_answer"


def test_a_program_that_is_no_text_scores_0():
    assert result_of(numbers_of("print('\ud800')", SUM)) == "runtime_error"


def test_partial_credit_is_the_fraction_of_tests_passed():
    program = "def add(a, b):\n    return 3\n"
    assert numbers_of(program, ADD, partial_credit=True)["reward"] == 0.5
    assert numbers_of(program, ADD)["reward"] == 0.0
    assert numbers_of(program, ADD, partial_credit=True)["wrong_answer"] == 1.0


def test_tests_that_would_begin_too_late_count_as_time_limit():
    numbers = numbers_of("import time; time.sleep(600)", SUM * 10, partial_credit=True, wall_s=0.3, total_s=0.5)
    assert (numbers["reward"], numbers["time_limit"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        *[("```\na\n```", "a\n"), ("```python\na\n```\n```py\nb\n```", "b\n")],
        *[("```python\na\n```\n```text\noutput\n```", "a\n"), ("print(1)", "print(1)")],
        *[("```python\nnever closed", ""), ("```cpp\nint x;\n```", "")],
        ("```python\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```\nprint(1)\n```\nIt prints:\n```\n1\n```", "print(1)\n"),
        ("```\nprint('a b')\n```\nIt prints:\n```\na b\n```", "print('a b')\n"),
        ("```py\ndef f():\n    return 1\n```\nUse:\n```py\nprint(f())\n```", "def f():\n    return 1\n"),
        ("```py\ndef f():\n    return 1\n```\nBetter:\n```py\ndef f():\n    return 2\n```", "def f():\n    return 2\n"),
        (
            "```py\ndef f(x):\n    return x\n```\nand\n```py\nprint(f(input()))\n```",
            "def f(x):\n    return x\n\nprint(f(input()))\n",
        ),
        ("```py\nprint(1)\n```\nNo:\n```py\nprint(2\n```", "print(2\n"),
        ("print(1)\n```", "print(1)\n"),
        ("print(1)\n```\nUse:\n```bash\npython a.py\n```\n", "print(1)\n"),
        ("Here it is.\n```python\nprint(1)\n```\n```", "print(1)\n"),
        ('```python\n"""\n```\n1 2\n```\n"""\nprint(1)\n```\n', '"""\n```\n1 2\n```\n"""\nprint(1)\n'),
        (r"```python" "\nre.compile('\\d')\n```", "re.compile('\\d')\n"),
        ("```python\nfor i in range(\nNo:\n```python\nprint(1)\n```", "print(1)\n"),
        *[("```\nno code\n```python\nprint(1)\n```", "print(1)\n"), ("So:\n```python\nprint(1)\n", "print(1)\n")],
        *[("~~~python\nprint('```')\n~~~", "print('```')\n"), ("````py3\nprint(1)\n````", "print(1)\n")],
        ("1. So:\n\n   ```py\n   if 1:\n     f()\n   ```\n", "if 1:\n  f()\n"),
        *[("- So: ```py\n\tf()\n\t```\n", "f()\n"), ("> ```py\n> f()\n>  g()\n> ```\n> So.", "f()\n g()\n")],
    ],
)
def test_the_program_is_the_last_block_that_is_no_output_and_no_example_of_its_use(completion, program):
    assert extracted_program(completion) == program


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("print(10**6000)", [{"stdin": "", "stdout": "1" + "0" * 6000}]),
        ("def f(n):\n    return 10**n", [{"function": "f", "arguments": [6000], "expected": 10**6000}]),
        ("def f(n):\n    return 10**n", '[{"function": "f", "arguments": [6000], "expected": 1%s}]' % ("0" * 6000)),
        (
            "import numpy as np\ndef f(a):\n    return np.sum(a)",
            [{"function": "f", "arguments": [[1, 2]], "expected": 3}],
        ),
        (
            "import numpy as np\ndef f(a):\n    return {np.int64(1): (np.array(a), np.bool_(True), np.float32(0.5))}",
            [{"function": "f", "arguments": [[1, 2]], "expected": {1: [[1, 2], True, 0.5]}}],
        ),
    ],
    ids=["printed", "returned", "from a column", "numpy's integer", "numpy within a dict"],
)
def test_integers_of_any_length_and_numpys_numbers_are_values(program, tests):
    assert numbers_of(program, tests)["reward"] == 1.0


def test_a_call_that_raises_is_not_the_expected_null():
    program = "def f():\n    raise ValueError"
    assert result_of(numbers_of(program, [{"function": "f", "arguments": [], "expected": None}])) == "runtime_error"


@pytest.mark.parametrize(
    ("found", "expected", "tolerance", "is_same"),
    [
        ("1 \n2\n\n", "1\n2", 0.0, True),
        ("1 2", "1\n2", 0.0, False),
        ("0.3333", "0.33333", 1e-3, True),
        ("0.3333", "0.33333", 0.0, False),
        ("a 1", "b 1", 1e-3, False),
    ],
)
def test_outputs_are_compared_line_by_line(found, expected, tolerance, is_same):
    assert same_output(found, expected, tolerance) is is_same


MAIN = "\nif __name__ == '__main__':\n    print(add(*map(int, input().split())))\n    raise SystemExit(3)\n"
METHOD = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
FUNCTIONAL = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
NULLS = dict.fromkeys(["stdin", "stdout", "function", "arguments", "expected"])


def packed(value: object) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        pytest.param(RIGHT_ADD + MAIN, ADD, id="a main part that reads, and a call"),
        pytest.param(RIGHT_ADD + MAIN, ASSERT, id="a main part that reads, and statements"),
        pytest.param(RIGHT_ADD + MAIN.replace("raise", "#"), SUM, id="a main part and standard input"),
        pytest.param(RIGHT_SUM, [{"stdin": ["1 2\n", "3"], "stdout": ["3"]}], id="lines"),
        pytest.param("import sys; print(len(sys.stdin.read()))", [{**NULLS, "stdout": 0}], id="no input"),
        pytest.param(RIGHT_ADD, [{**NULLS, **ADD[0]}], id="keys that Parquet adds"),
        pytest.param(RIGHT_ADD, [{**ADD[0], "arguments": {"b": 2, "a": 1}}], id="names"),
        pytest.param(METHOD, ADD, id="a method of Solution"),
        pytest.param(RIGHT_SUM, '{"inputs": ["1 2", ["5 5"]], "outputs": ["3\\n", ["10"]]}', id="APPS"),
        pytest.param(METHOD, '{"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], 7]}', id="TACO"),
        pytest.param(RIGHT_SUM, {"input": ["1 2"], "output": ["3"]}, id="code_contests"),
        pytest.param(RIGHT_SUM, [{"input": "1 2", "output": "3", "testtype": "stdin"}], id="LiveCodeBench"),
        pytest.param(METHOD, json.dumps(FUNCTIONAL), id="LiveCodeBench, a function"),
        pytest.param(METHOD, packed(json.dumps(FUNCTIONAL)), id="LiveCodeBench, compressed"),
        pytest.param(
            "from __future__ import annotations\nimport dataclasses, pickle\n@dataclasses.dataclass\nclass A:\n"
            "    a: B\nclass B: pass\ndef add(a, b):\n    return pickle.loads(pickle.dumps(A(a))).a + b",
            *[ADD],
            id="classes that are looked up",
        ),
    ],
)
def test_a_right_program_is_accepted_by_every_form_of_tests(program, tests):
    trajectory = trajectory_that(f"```python\n{program}\n```", tests=tests, metadata='{"func_name": "add"}')
    assert code_tests(trajectory)["reward"] == 1.0
    wrong = trajectory_that("def add(a, b): return -1\nprint(-1)", tests=tests, metadata={"func_name": "add"})
    assert code_tests(wrong)["reward"] == 0.0


def test_a_program_that_is_only_thought_is_none():
    thought = f"<think>```python\n{RIGHT_SUM}\n```"
    assert result_of(code_tests(trajectory_that(thought, tests=SUM))) == "no_program"
    assert result_of(code_tests(trajectory_that(f"{thought}</think>I give up.", tests=SUM))) != "accepted"


@pytest.mark.parametrize(
    ("tests", "says"),
    [
        *[(tests, "in its 'tests' field") for tests in (None, [], "[]", [3], "assert True", {"inputs": [""]})],
        ([{"input": "1"}], "unknown kind of test"),
        ([{"stdin": "", "stdout": None}], "unknown kind of test"),
        ([{"function": "twice", "kwargs": {"text": "ab"}, "expected": "abab"}], "unknown kind of test"),
        ("def check(candidate): ...", "LiveCodeBench's compressed tests"),
        ([{"stdin": "", "stdout": {"a": 1}}], "must be text or a list of lines"),
        ([{"function": "twice", "arguments": "ab", "expected": "abab"}], "arguments of twice must be a list"),
        (FUNCTIONAL, "func_name in the 'metadata' column"),
        (packed(print), "its pickle calls builtins.print"),
    ],
)
def test_tests_of_another_form_are_refused(tests, says):
    with pytest.raises(ValueError, match=says):
        numbers_of(RIGHT_SUM, tests)


class Oracle:
    """A sandbox that runs nothing: every program prints 3."""

    def run(self, program: str, stdin: str, limits: Limits) -> Run:
        return Run(stdout="3\n", stderr="", exit_code=0, stopped_by=None, wall_s=0.0, cpu_s=0.0)


def test_another_sandbox_can_be_named():
    assert numbers_of("whatever", SUM, sandbox="test_code_tests.Oracle", partial_credit=True)["reward"] == 0.5


@settings(deadline=None)
@given(
    marks=st.sampled_from(["```", "~~~", "````"]),
    before=st.sampled_from(["", "    ", "> ", "- "]),
    lines=st.lists(st.sampled_from(["x = 1", "print('a')", "# ``", "y = [2]", ""]), min_size=1, max_size=5),
    is_closed=st.booleans(),
)
def test_a_block_is_read_whatever_fence_it_stands_in(marks: str, before: str, lines: list[str], is_closed: bool):
    inner, lines = before if before.strip() == ">" else " " * len(before), ["x = 1", *lines]
    text = "\n".join([f"{before}{marks}python", *(inner + line for line in lines), *[inner + marks] * is_closed])
    ((language, program),) = fenced_blocks(f"So:\n\n{text}", lambda content: content.startswith("x = 1\n"))
    assert (language, program.split()) == ("python", "\n".join(lines).split())
