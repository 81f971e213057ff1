"""math_answer: strict and lenient accuracy, the format, and all of GSM8K."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from reward_functions import trajectory_that

from lightrl.rewards import math_answer
from lightrl.rewards.math_answer import Answer, final_answer, number

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


def judged(completion: str, answer: object, finish_reason: str = "stop") -> dict[str, float]:
    result = math_answer(trajectory_that(completion, finish_reason, answer=answer))
    return {name: value for name, value in result.items() if name != "extracted"}


RIGHT = {"reward": 1.0, "accuracy": 1.0, "lenient_accuracy": 1.0, "format": 1.0}


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 42", "6 * 7 = <<6*7=42>>42\n#### 42"),
        ("#### 42", 42),
        ("#### 42.0", "42"),
        ("#### 42.\n", "42"),
        ("#### $1,234,567.50", "1234567.5"),
        ("#### -$5", "-5"),
        ("#### $-5", "-5"),
        ("#### 50%", "50"),
        ("#### 0.5", "50%"),
        ("#### 42 fluid ounces.", "42"),
        ("#### 10 km/h", "10"),
        ("#### 3/4", "0.75"),
        ("#### 1,800", "1800"),
        (r"so \boxed{42}.", "42"),
        (r"so $\boxed{42}$", "42"),
        (r"so \(\boxed{42}\).", "42"),
        (r"\boxed{1{,}234\text{ cm}}", "1234"),
        (r"\boxed{50\%}", "0.5"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        (r"\boxed{\frac{1}{2}}", r"thus \boxed{\frac{2}{4}}"),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}"),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}"),
        (r"\boxed{[0, 1)}", "[0,1)"),
        (r"\boxed{x^2 + 1}", "1 + x^2"),
        (r"\boxed{\text{Monday}}", "Monday"),
        ("#### 5e3", "5000"),
        (r"\boxed{\frac12}", "0.5"),
        (r"\boxed{1\frac{1}{2}}", "1.5"),
        (r"\boxed{-\dfrac{3}{4}}", "-0.75"),
        (r"\boxed{\frac{1}{2}}", r"50\%"),
        (r"\boxed{5 \times 10^3}", "5000"),
        (r"\boxed{\{1, 2, 3\}}", r"\{3, 2, 1\}"),
        (r"\boxed{\pm 3}", "3, -3"),
        (r"\boxed{(-\infty,1]\cup[2,3)}", r"(-\infty, 1] \cup [2, 3)"),
        (r"\boxed{x \in [0,1]}", "[0,1]"),
        (r"\boxed{x = 5}", "5"),
        (r"\boxed{5 \mathrm{~cm}}", "5"),
        (r"\boxed{5\,\text{cm}^2}", "5"),
        (r"\boxed{30^\circ}", "30"),
        (r"\boxed{\$18.90}", "18.9"),
        (r"\boxed{\textbf{(B)}}", "B"),
        (r"\boxed{\text{5 apples}}", "5"),
        (r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ],
)
def test_the_right_answer_in_the_demanded_format_earns_everything(completion, answer):
    assert judged(completion, answer) == RIGHT


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("#### 41", "42"),
        ("#### 4.2", "42"),
        ("#### -42", "42"),
        ("#### 5000", "50"),
        ("#### 42000", "42"),
        (r"\boxed{(0, 1)}", "[0,1)"),
        (r"\boxed{\frac{1}{3}}", "0.5"),
        (r"\boxed{forty-two}", "42"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2, 3\}"),
        (r"\boxed{(1, 2)}", "(2, 1)"),
        (r"\boxed{(-\infty,1]\cup[2,3]}", r"(-\infty, 1] \cup [2, 3)"),
        (r"\boxed{0.333}", r"\frac{1}{3}"),
        (r"\boxed{3\pi}", "9.42"),
        (r"\boxed{\text{Tuesday}}", "Monday"),
    ],
)
def test_a_wrong_answer_in_the_demanded_format_earns_the_format_reward(completion, answer):
    assert judged(completion, answer) == {"reward": 0.1, "accuracy": 0.0, "lenient_accuracy": 0.0, "format": 1.0}


@pytest.mark.parametrize(
    "completion",
    [
        "The answer is 42.",
        "#### 42\nor so",
        "#### 41\n#### 42",
        r"\boxed{41} #### 42",
        r"\boxed{42} I think",
        "1 or 42",
        "That is 50-42",
        "#### 6 * 7 = 42",
    ],
)
def test_the_right_answer_outside_the_format_is_only_lenient(completion):
    assert judged(completion, "42") == {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 1.0, "format": 0.0}


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_completion_that_did_not_end_by_itself_is_not_in_format(finish_reason):
    expected = {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 1.0, "format": 0.0}
    assert judged("#### 42", "42", finish_reason) == expected


@pytest.mark.parametrize("completion", ["", "####", "#### ", r"\boxed{", r"\boxed{}", "no number", "#### 5 or 6"])
def test_nothing_earns_nothing(completion):
    assert judged(completion, "5") == {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    "completion",
    [
        "#### " + "9" * 100_000,
        r"\boxed{" * 20_000,
        r"\boxed{" + "{" * 50_000 + "}" * 50_000 + "}",
        "9," * 50_000,
        "١٢٣" * 9,
        r"\boxed{" + "+1" * 50_000 + "}",
        r"\boxed{𝟜𝟚 \u202e ４１ \ud800}",
        "#### 1e99",
    ],
    ids=["digits", "open boxes", "nested braces", "commas", "other digits", "long sum", "unicode", "exponent"],
)
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


@pytest.mark.parametrize("split", ["train", "test"])
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
