"""math_answer: accuracy, the format, and all of GSM8K."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from math_answer_cases import BOXED, CASES
from reward_functions import trajectory_that

from lightrl.rewards import math_answer
from lightrl.rewards.math_answer.answer import Answer, equals, final_answer, number

GSM8K = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k"


def result_of(completion: str, answer: object, finish_reason: str = "stop", **settings: bool) -> dict[str, float]:
    result = math_answer(trajectory_that(completion, finish_reason, answer=answer), **settings)
    return {name: value for name, value in result.items() if name != "extracted"}


RIGHT = {"reward": 1.0, "accuracy": 1.0, "lenient_accuracy": 1.0, "format": 1.0}
UNMARKED = {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 1.0, "format": 0.0}


@pytest.mark.parametrize(
    ("completion", "answer", "accuracy", "format_", "reason"), CASES, ids=[f"{case[4]}: {case[0]}" for case in CASES]
)
def test_the_last_marked_answer_counts_and_the_format_is_a_number_of_its_own(
    completion, answer, accuracy, format_, reason
):
    result = result_of(completion, answer)
    assert (result["accuracy"], result["format"]) == (accuracy, format_), reason
    assert result["reward"] == (1.0 if accuracy else 0.1 if format_ else 0.0), reason
    assert result["lenient_accuracy"] >= accuracy
    required = result_of(completion, answer, require_format=True)
    assert required["accuracy"] == accuracy * format_, reason
    assert required["reward"] == (1.0 if accuracy and format_ else 0.1 if format_ else 0.0), reason


@pytest.mark.parametrize(
    ("answer", "reference", "is_equal"),
    [pytest.param(*row, id=f"{kind}: {row[0]} for {row[1]}") for kind, rows in BOXED.items() for row in rows],
)
def test_answers_are_equal_where_a_teacher_says_so(answer, reference, is_equal):
    assert result_of(f"\\boxed{{{answer}}}", reference)["accuracy"] == is_equal


NUMBERS = st.integers(-999, 999)
FRACTIONS = st.fractions(min_value=-99, max_value=99, max_denominator=99)


def forms_of(value: Fraction) -> list[str]:
    """The literal forms of a rational number."""
    above, below = abs(value.numerator), value.denominator
    sign = "-" if value < 0 else ""
    whole, rest = divmod(above, below)
    forms = [f"{sign}{above}/{below}", rf"{sign}\frac{{{above}}}{{{below}}}", rf"\dfrac{{{sign}{above}}}{{{below}}}"]
    forms += [
        f"{sign}{3 * above} / {3 * below}",
        rf"${sign}\tfrac{{{above}}}{{{below}}}$",
        f"x = {sign}{above}/{below}",
        f"{sign}{above}/{below} = x",
        rf"{sign}{{{above}\over {below}}}",
        rf"\underline{{{sign}{above}/{below}}}",
        rf"\begin{{cases}} x = {sign}{above}/{below} \end{{cases}}",
    ]
    if whole and rest:
        forms += [f"{sign}{whole} {rest}/{below}", rf"{sign}{whole}\frac{{{rest}}}{{{below}}}"]
    if below == 1:
        forms += [
            f"{sign}{above}",
            f"{sign}{above}.0",
            f"{sign}{above} apples",
            f"{sign}{above},000/1,000" if above else "0",
            f"₹{sign}{above}",
            f"{sign}{above}''",
        ]
        forms += [f"–{above}" if sign else f"{above}。", rf"{sign}{above} \times 10^{{0}}", f"{sign}{above}00%"]
    return forms


@settings(max_examples=100, deadline=None)
@given(value=FRACTIONS, data=st.data())
def test_every_literal_form_of_a_number_is_equal_to_every_other(value, data):
    answer, reference = data.draw(st.sampled_from(forms_of(value))), data.draw(st.sampled_from(forms_of(value)))
    assert equals(answer, reference)


@settings(max_examples=100, deadline=None)
@given(value=FRACTIONS, other=FRACTIONS, data=st.data())
def test_no_form_of_another_number_is_equal(value, other, data):
    if value not in (other, 100 * other, other / 100):
        answer, reference = data.draw(st.sampled_from(forms_of(value))), data.draw(st.sampled_from(forms_of(other)))
        assert not equals(answer, reference)


@settings(max_examples=200, deadline=None)
@given(
    first=NUMBERS, second=NUMBERS, operator=st.sampled_from(["+", "-", " + ", "*", r"\cdot ", r" \times ", " × ", "·"])
)
def test_what_has_to_be_calculated_is_never_equal_to_its_value(first, second, operator):
    value = {"+": first + second, "-": first - second}.get(operator.strip(), first * second)
    for expression in (
        f"{first}{operator}{second}",
        f"x = {first}{operator}({second})",
        f"({first}{operator}{second})",
    ):
        for marker in (r"\boxed", "####", "answer is"):
            assert not equals(expression, str(value), is_marked_by=marker)


SYMBOLS = st.sampled_from(["x", "y", "n", r"\pi", r"\alpha", "2", "7", "0.5"])
OPERATORS = [
    *["{}+{}", "{}-({})", r"\frac{{{}}}{{{}}}", "({})({})", r"\sqrt{{{}+{}^2}}", r"\sin({}) + {}"],
    r"\left|{}\right|-{}",
]
EXPRESSIONS = st.recursive(
    SYMBOLS, lambda inner: st.builds(str.format, st.sampled_from(OPERATORS), inner, inner), max_leaves=4
)
EQUAL_WRITING = [
    lambda text: text.replace(r"\frac", r"\dfrac"),
    lambda text: text.replace("(", r"\left(").replace(")", r"\right)"),
    lambda text: rf"\!{text}\,",
    lambda text: text.replace("+", " + ").replace("{", " { "),
    lambda text: rf"\displaystyle {text}",
    lambda text: rf"{{{text}}}",
    lambda text: rf"{text}\text{{ cm}}",
    lambda text: f"q = {text}",
    lambda text: text.replace(r"\pi", "π").replace(r"\alpha", "α"),
    lambda text: rf"\large {text}",
    lambda text: rf"{{\bf {text}}}",
    lambda text: rf"\textcolor{{red}}{{{text}}}\hspace{{1em}}",
    lambda text: rf"\underline{{{text}}}",
    lambda text: rf"\begin{{aligned}} q &= {text} \end{{aligned}}",
    lambda text: rf"{{{text} \over 1}}",
    lambda text: text.replace(r"\left|", "abs(").replace(r"\right|", ")"),
]
LOST = [
    *[r"\vec{{{}}}", "({})'", r"\nabla {}", r"\heartsuit {}", r"\neg {}", "{}^*", "({})^T", r"{} \text{{ is wrong}}"],
    *[r"\pm({})", "q', {}"],
]
LOST += [
    *[r"{} \text{{ or }} {}+1", "{}, {}+1", "{}+1 = {}", r"\frac{{d}}{{dx}} ({})", r"\int {}", r"\overline{{{}}}"],
    *["-2 < {}", r"\lfloor {}"],
]


@settings(max_examples=60, deadline=None)
@given(expression=EXPRESSIONS, writing=st.sampled_from(EQUAL_WRITING), other=st.sampled_from(EQUAL_WRITING))
def test_an_expression_is_equal_to_itself_in_other_writing(expression, writing, other):
    assert equals(writing(expression), other(f"{expression}"), is_marked_by="answer is")


@settings(max_examples=60, deadline=None)
@given(expression=EXPRESSIONS, around=st.sampled_from(LOST))
@example(expression="(2)(0.5)", around="({})^T")
def test_an_expression_is_never_equal_to_one_with_a_symbol_more(expression, around):
    is_one = equals(f"q+{expression}", "q+1") or equals(f"({expression})^2", expression)
    assume(not is_one or around != "({})^T")  # any power of 1 is 1
    assert not equals(around.format(expression, expression), expression)
    assert not equals(expression, around.format(expression, expression)) or "= " in around


@settings(max_examples=60, deadline=None)
@given(expression=EXPRESSIONS, other=EXPRESSIONS, factor=st.integers(2, 9))
def test_another_value_is_not_equal(expression, other, factor):
    assert not equals(f"{expression}+{factor}", expression)
    assert equals(f"({expression})+({other})", f"({other})+({expression})")


@pytest.mark.parametrize(
    "text", [r"so \fbox{42}", r"so \boxed 42.", r"so $\boxed 42$", r"\boxed{\fbox{42}}", r"\boxed\frac{84}{2}"]
)
def test_a_box_may_be_written_in_other_ways(text):
    assert result_of(text, "42")["accuracy"] == 1.0
    assert result_of("#### 42", text)["accuracy"] == 1.0


@pytest.mark.parametrize("completion", ["1 or 42", "That is 50-42", "#### 6 * 7 = 42", "It is 42"])
def test_the_last_number_of_a_completion_that_marks_no_number_is_only_lenient(completion):
    assert result_of(completion, "42") == UNMARKED


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
def test_a_completion_that_did_not_end_by_itself_is_right_but_not_in_format(finish_reason):
    assert result_of("#### 42", "42", finish_reason) == {**RIGHT, "format": 0.0}
    assert result_of("#### 42", "42", finish_reason, require_format=True) == UNMARKED


@pytest.mark.parametrize("completion", ["", "####", "#### ", r"\boxed{", r"\boxed{}", "no number", "#### 5 or 6"])
def test_nothing_earns_nothing(completion):
    assert result_of(completion, "5") == {"reward": 0.0, "accuracy": 0.0, "lenient_accuracy": 0.0, "format": 0.0}


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
    "powers of powers": r"\boxed{9^{9^{9^{9}}}+x}",
    "a power of a number that is one": "#### (1e999**999)**999",
    "a tower": r"\boxed{" + "x^{" * 25 + "x" + "}" * 26,
    "factorials": r"\boxed{100000!!! + (10^9)!}",
    "a sum": r"\boxed{\sum_{n=1}^{10^{10}} \frac{1}{n}}",
    "a binomial": r"\boxed{\binom{10^9}{5\cdot 10^8}}",
    "parentheses": r"\boxed{" + "(" * 300 + "x" + ")" * 300 + "}",
    "roots": r"\boxed{" + r"\sqrt{" * 29 + "x" + "}" * 30,
    "digits in a box": r"\boxed{" + "9" * 900 + "x}",
    "spaces": "the answer is" + " " * 100_000,
    "texts": r"\boxed{" + r"\text{" * 20_000 + "}" * 20_001,
}


@pytest.mark.parametrize("completion", ADVERSARIAL.values(), ids=ADVERSARIAL)
def test_adversarial_texts_return(completion):
    assert result_of(completion, "42")["accuracy"] == 0.0
    assert result_of(completion, "x^2+1")["accuracy"] == 0.0


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("42", {42}),
        ("-1,234.5", {Fraction(-2469, 2)}),
        (".5", {Fraction(1, 2)}),
        ("25%", {25, Fraction(1, 4)}),
        *[("12 3", None), ("1,23", None), ("7/0", None), ("", None), ("dollars", None)],
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
    with pytest.raises(ValueError, match="needs a reference in its 'answer' field"):
        math_answer(trajectory_that("#### 4", **fields))


@pytest.mark.parametrize("form", [{"role": "assistant", "content": "#### 4"}, [{"type": "text", "text": "#### 4"}]])
def test_a_reference_may_be_a_message_or_parts(form):
    assert math_answer(trajectory_that("#### 4", answer=form))["reward"] == 1.0
    assert math_answer(trajectory_that("#### 5", answer=form))["reward"] < 1.0


@pytest.mark.parametrize("split", [pytest.param("train", marks=pytest.mark.extra), "test"])
def test_each_gsm8k_solution_earns_1_for_its_own_problem_and_no_accuracy_for_another(split):
    if not GSM8K.is_dir():
        pytest.skip(f"{GSM8K} is not here")
    with (GSM8K / f"{split}.jsonl").open() as file:
        solutions = [json.loads(line)["answer"] for line in file]
    assert all(result_of(solution, solution) == RIGHT for solution in solutions)
    others = solutions[1:] + solutions[:1]
    different = [
        (one, other)
        for one, other in zip(solutions, others, strict=True)
        if one.split("#### ")[1].replace(",", "") != other.split("#### ")[1].replace(",", "")
    ]
    assert len(different) > 0.9 * len(solutions)
    assert all(result_of(one, other)["accuracy"] == 0.0 for one, other in different)
