"""What rewards compare with: several accepted answers; rows that no completion can satisfy are refused."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from reward_functions import trajectory_that

from lightrl.rewards import RewardPart, math_answer
from lightrl.rewards.references import ReferenceCheck
from lightrl.trajectory import Prompt


def judge(rubric: str) -> RewardPart:
    return RewardPart(
        "lightrl.rewards.LLMJudge", arguments={"url": "http://127.0.0.1:9", "model": "m", "rubric": rubric}
    )


@pytest.mark.parametrize(
    "reference",
    [
        *[["soccer", "football"], ["x", 7, "football"], "football", ("soccer", "football"), {"soccer", "football"}],
        *[np.array(["soccer", "football"]), np.array("football"), frozenset(["football"]), [np.str_("football")]],
    ],
)
def test_any_of_the_accepted_answers_is_right(reference):
    assert math_answer(trajectory_that(r"\boxed{\text{football}}", answer=reference))["reward"] == 1.0
    assert math_answer(trajectory_that(r"\boxed{\text{tennis}}", answer=reference))["accuracy"] == 0.0


@pytest.mark.parametrize(
    "number", [7, 7.0, np.int64(7), np.float32(7), np.array([8, 7]), Decimal("7.0"), Fraction(7), " 7 "]
)
def test_a_number_of_any_type_is_a_reference(number):
    assert math_answer(trajectory_that(r"\boxed{7}", answer=number))["reward"] == 1.0


def test_an_answer_that_is_only_thought_is_none():
    texts = [r"<think>\boxed{7}</think>No.", r"<think>\boxed{7}", r"\boxed{7}</think>", r"[THINK]the answer is 7."]
    assert [math_answer(trajectory_that(text, answer="7"))["reward"] for text in texts] == [0.0] * 4
    assert math_answer(trajectory_that(r"<think>\boxed{3}</think>\boxed{7}", answer="7"))["reward"] == 1.0


@pytest.mark.parametrize(
    ("reward", "fields", "says"),
    [
        *[
            ("lightrl.rewards.math_answer", {"answer": answer}, "needs a reference|no completion can equal")
            for answer in (None, [], float("nan"), "nan", {"ground_truth": "1"}, ["1", None, [2]], ["1", float("nan")])
        ],
        *[
            ("lightrl.rewards.math_answer", {"answer": answer}, "needs a reference|no completion can equal")
            for answer in (
                *[(), set(), np.array([]), np.float64("nan"), Decimal("nan"), float("inf"), b"7", ["7", ""], [["7"]]],
                *[{}, {"a": "7", "b": "8"}, [{"text": "7"}], (item for item in "7"), r"\boxed{}", "#### "],
                r"x \boxed{ }",
            )
        ],
        (math_answer, {}, "needs a reference"),
        ("lightrl.rewards.code_tests", {"tests": [{"input": "1"}]}, "unknown kind of test"),
        ([RewardPart("lightrl.rewards.json_schema")], {}, "no JSON schema"),
        *[(judge(rubric), {"a": 1}, "rubric uses") for rubric in ("{answer}", "{prompt:d}")],
        ("lightrl.rewards.reasoning_gym.reward", {}, "no column 'reasoning_gym'"),
    ],
)
def test_a_prompt_that_a_reward_cannot_use_is_refused(reward, fields, says):
    with pytest.raises(ValueError, match=says):
        ReferenceCheck(reward)(Prompt("p", token_ids=[1], fields=fields))


def test_the_check_knows_what_was_read_and_calls_no_function_of_a_user():
    reward = [
        RewardPart("lightrl.rewards.math_answer"),
        judge("{completion} {style}"),
        RewardPart("lightrl.rewards.environment_reward"),
        RewardPart("reward_functions.hold_the_interpreter", name="mine"),
    ]
    check = ReferenceCheck(reward)
    check(Prompt("p", token_ids=[1], fields={"answer": "1", "style": "brief", "other": 3}))
    assert check.columns == {"answer", "style"}
    ReferenceCheck(lambda trajectory: 1 / 0)(Prompt("p", token_ids=[1]))
