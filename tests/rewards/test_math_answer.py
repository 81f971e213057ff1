"""math_answer: accuracy, the format, and all of GSM8K."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from math_answer_cases import CASES
from reward_functions import trajectory_that

from lightrl.rewards import math_answer
from lightrl.rewards.math_answer import Answer, final_answer, number

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


def judged(completion: str, answer: object, finish_reason: str = "stop", **settings: bool) -> dict[str, float]:
    result = math_answer(trajectory_that(completion, finish_reason, answer=answer), **settings)
    return {name: value for name, value in result.items() if name != "extracted"}


RIGHT = {"reward": 1.0, "accuracy": 1.0, "lenient_accuracy": 1.0, "format": 1.0}
UNMARKED = {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 1.0, "format": 0.0}


def test_there_are_a_hundred_cases_each_with_another_completion_or_reference():
    assert len({(completion, str(answer)) for completion, answer, *_ in CASES}) == len(CASES) >= 100


@pytest.mark.parametrize(
    ("completion", "answer", "accuracy", "format_", "reason"), CASES, ids=[f"{case[4]}: {case[0]}" for case in CASES]
)
def test_the_last_marked_answer_counts_and_the_format_is_a_number_of_its_own(
    completion, answer, accuracy, format_, reason
):
    result = judged(completion, answer)
    assert (result["accuracy"], result["format"]) == (accuracy, format_), reason
    assert result["reward"] == (1.0 if accuracy else 0.1 if format_ else 0.0), reason
    assert result["lenient_accuracy"] >= accuracy
    required = judged(completion, answer, require_format=True)
    assert required["accuracy"] == accuracy * format_, reason
    assert required["reward"] == (1.0 if accuracy and format_ else 0.1 if format_ else 0.0), reason


@pytest.mark.parametrize("completion", ["1 or 42", "That is 50-42", "#### 6 * 7 = 42", "It is 42"])
def test_the_last_number_of_a_completion_that_marks_no_number_is_only_lenient(completion):
    assert judged(completion, "42") == UNMARKED


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_completion_that_did_not_end_by_itself_is_right_but_not_in_format(finish_reason):
    assert judged("#### 42", "42", finish_reason) == {**RIGHT, "format": 0.0}
    assert judged("#### 42", "42", finish_reason, require_format=True) == UNMARKED


@pytest.mark.parametrize("completion", ["", "####", "#### ", r"\boxed{", r"\boxed{}", "no number", "#### 5 or 6"])
def test_nothing_earns_nothing(completion):
    assert judged(completion, "5") == {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 0.0, "format": 0.0}


ADVERSARIAL = {
    "digits": "#### " + "9" * 100_000,
    "open boxes": r"\boxed{" * 20_000,
    "nested braces": r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
    "commas": "9," * 50_000,
    "other digits": "١٢٣" * 9,
    "long sum": r"\boxed{" + "+1" * 50_000 + "}",
    "unicode": r"\boxed{𝟜𝟚 \u202e ４１ \ud800}",
    "exponent": "#### 1e99",
    "phrases": "the answer is " * 20_000,
    "spaces": "the answer is" + " " * 100_000,
    "texts": r"\boxed{" + r"\text{" * 20_000 + "}" * 20_001,
}


@pytest.mark.parametrize("completion", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_texts_return(completion):
    assert judged(completion, "42")["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("42", {42}),
        ("-1,234.5", {Fraction(-2469, 2)}),
        (".5", {Fraction(1, 2)}),
        ("25%", {25, Fraction(1, 4)}),
        ("12 3", None),
        ("1,23", None),
        ("7/0", None),
        ("", None),
        ("dollars", None),
    ],
)
def test_a_plain_number_is_read_exactly(text, values):
    assert number(text) == (None if values is None else frozenset(map(Fraction, values)))


def test_the_last_marked_answer_is_the_final_one():
    assert final_answer(r"#### 1 and \boxed{\frac{a}{b}}") == Answer(r"\frac{a}{b}", r"\boxed", is_final=False)
    assert final_answer("x\n#### 7 apples\n") == Answer("7 apples", "####", is_final=True)
    assert final_answer("no mark") is None


@pytest.mark.parametrize("fields", [{}, {"answer": None}, {"answer": "  "}, {"solution": "#### 4"}])
def test_a_prompt_without_a_reference_is_refused(fields):
    with pytest.raises(ValueError, match="needs a reference in its field 'answer'"):
        math_answer(trajectory_that("#### 4", **fields))


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.extra), "test"])
def test_each_gsm8k_solution_earns_1_for_its_own_problem_and_no_accuracy_for_another(split):
    if not GSM8K.is_dir():
        pytest.skip(f"{GSM8K} is not here")
    with (GSM8K / f"{split}.jsonl").open() as file:
        solutions = [json.loads(line)["answer"] for line in file]
    assert all(judged(solution, solution) == RIGHT for solution in solutions)
    others = solutions[1:] + solutions[:1]
    different = [
        (one, other)
        for one, other in zip(solutions, others, strict=True)
        if one.split("#### ")[1].replace(",", "") != other.split("#### ")[1].replace(",", "")
    ]
    assert len(different) > 0.9 * len(solutions)
    assert all(judged(one, other)["accuracy"] == 0.0 for one, other in different)
