import pytest
from reward_functions import trajectory_that

from examples.countdown.reward import countdown, value_of


def result_of(completion: str, numbers: object = "3 5 2", target: object = 13, **settings) -> dict:
    return countdown(trajectory_that(completion, numbers=numbers, target=target), **settings)


@pytest.mark.parametrize(
    "completion",
    [
        *["5*2+3", "3 + 2 * 5", "Let me see: 5+3 = 8.\n(3 + 5 * 2)", "<answer>2*5+3</answer> I hope."],
        *[r"So \boxed{3 + 5 \times 2}", "#### 5*2+3", "5*2+3 = 13"],
    ],
)
def test_an_expression_that_reaches_the_target_is_right(completion):
    found = result_of(completion)
    assert (found["reward"], found["accuracy"], found["format"]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        *[("5+2+3", 0.1), ("13", 0.0), ("5*2+3+0", 0.0), ("5+3+5", 0.0), ("52/4", 0.0), ("3/(5-5)", 0.0)],
        *[("-3+5*2", 0.0), ("2**5-3", 0.0), ("__import__('os')", 0.0), ("", 0.0)],
    ],
)
def test_anything_else_is_not(completion, reward):
    found = result_of(completion)
    assert (found["reward"], found["accuracy"]) == (reward, 0.0)


def test_fractions_are_exact_and_numbers_may_be_a_list():
    assert result_of("8/(3-8/3)", numbers=[8, 3, 8, 3], target=24)["accuracy"] == 1.0


@pytest.mark.parametrize("text", ["(" * 190 + "1", "1+" * 99 + "1", "9" * 200, "1" + "+" * 190 + "1", "()" * 90])
def test_hostile_expressions_have_a_value_or_none_at_once(text):
    value_of(text)


def test_a_prompt_without_a_game_is_a_failure():
    with pytest.raises(ValueError, match="needs the fields 'numbers'"):
        countdown(trajectory_that("1+1", target=2))
