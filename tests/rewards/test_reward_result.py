"""What a reward function may return, and what becomes of the rest."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from reward_functions import trajectory_that

from lightrl.errors import RewardError
from lightrl.rewards import RewardResult, environment_reward

# numpy gives text, bytes and dates a `__float__`, and torch raises a RuntimeError for complex tensors
NOT_REAL = [np.complex64(1 + 2j), np.array(1j), torch.tensor(1j), np.str_("1"), np.bytes_(b"1"), np.timedelta64(1, "s")]


@pytest.mark.parametrize(
    "value",
    [1.0, 1, True, np.float32(1), np.int64(1), torch.tensor(1.0), Decimal(1), Fraction(1), {"reward": np.float64(1)}],
    ids=["float", "int", "bool", "numpy float", "numpy int", "tensor", "decimal", "fraction", "dict"],
)
def test_numbers_of_any_kind_are_rewards(value):
    result = RewardResult.of(value, trajectory_that())
    assert result == RewardResult(reward=1.0)
    assert type(result.reward) is float


def test_further_numbers_of_a_dict_are_metrics():
    result = RewardResult.of({"reward": 0.5, "accuracy": False, "format": 1}, trajectory_that())
    assert result == RewardResult(reward=0.5, metrics={"accuracy": 0.0, "format": 1.0})


@pytest.mark.parametrize("rewards", [[0, 0, 0.5, 1], np.array([0, 0, 0.5, 1])], ids=["list", "array"])
def test_rewards_per_token_sum_to_the_reward(rewards):
    result = RewardResult.of({"rewards": rewards, "turns": 1}, trajectory_that())
    assert result == RewardResult(reward=1.5, metrics={"turns": 1.0}, rewards=[0.0, 0.0, 0.5, 1.0])


@pytest.mark.bad_input
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, {"reward": -math.inf}, {"reward": 1, "format": math.nan}, 10**400, RewardResult(math.nan)],
)
def test_a_number_that_is_not_finite_is_refused(value):
    with pytest.raises(RewardError, match=r"It must be finite: .* division by zero") as caught:
        RewardResult.of(value, trajectory_that())
    assert caught.value.reason == "not_finite"


@pytest.mark.bad_input
@pytest.mark.parametrize("value", [1e300, {"reward": -1e16}, {"rewards": [0, 0, 1e20, 0]}, {"reward": 1, "size": 1e39}])
def test_a_number_that_training_would_overflow_on_is_refused(value):
    with pytest.raises(RewardError, match=r"It must be at most 1e\+(15|38), or training would overflow") as caught:
        RewardResult.of(value, trajectory_that())
    assert caught.value.reason == "not_finite"
    assert RewardResult.of({"reward": 1e15, "time_ns": 1.8e18}, trajectory_that()).metrics == {"time_ns": 1.8e18}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "its return value is None .NoneType.: it is not a real number\\."),
        ("1.0", "must return a number"),
        ([1.0], "must return a number"),
        *[(value, "it is not a real number") for value in NOT_REAL],
        (np.array([1.0, 2.0]), r"is array\(\[1., 2.\]\) \(ndarray\): can only convert"),
        (torch.ones(2), r"is tensor\(\[1., 1.\]\) \(Tensor\): a Tensor with 2 elements"),
        ({}, 'needs the key "reward"'),
        ({"score": 1.0}, r"a dict with \['score'\]"),
        ({"reward": 1.0, "accuracy": None}, "'accuracy' is None"),
        ({"reward": 1.0, "note": "good"}, r"'note' is 'good' \(str\)"),
        ({"reward": 1.0, 3: 1.0}, "the key 3 .* Keys must be strings"),
        ({"rewards": [1.0]}, r"must be a list of 4 numbers.* got 1 number\."),
        ({"rewards": [1.0] * 10**6}, r"must be a list of 4 numbers.* got 1000000 numbers\."),
        ({"rewards": 1.0}, "must be a list of 4 numbers.* got 1.0"),
        ({"rewards": [0, 0, "a", 0]}, r"rewards\[2\] is 'a'"),
        ({"reward": 3.0, "rewards": [0, 0, 1, 1]}, "but rewards that sum to 2.*Return one of the two"),
        ({"reward": 1.0} | {f"word {number}": 1.0 for number in range(10**5)}, "with 100,001 names.* at most 1,000"),
    ],
)
def test_what_is_no_reward_is_refused_with_a_reason(value, message):
    with pytest.raises(RewardError, match=message) as caught:
        RewardResult.of(value, trajectory_that())
    assert caught.value.reason == "invalid"
    assert "for prompt 'train-3', sample 0" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_result_is_written_into_its_trajectory():
    trajectory = trajectory_that()
    RewardResult(reward=1.5, metrics={"format": 1.0}, rewards=[0.0, 0.0, 0.5, 1.0]).apply_to(trajectory)
    assert trajectory.reward == 1.5
    assert trajectory.rewards == [0.0, 0.0, 0.5, 1.0]
    assert trajectory.metrics == {"format": 1.0}


def test_rewards_of_an_environment_sum_to_the_reward_and_a_trajectory_without_them_is_an_error():
    trajectory = trajectory_that()
    trajectory.rewards = [0.0, 0.0, 0.5, 0.25]
    RewardResult.of(environment_reward(trajectory), trajectory).apply_to(trajectory)
    assert (trajectory.reward, trajectory.rewards) == (0.75, [0.0, 0.0, 0.5, 0.25])
    with pytest.raises(ValueError, match="gave this trajectory no rewards"):
        environment_reward(trajectory_that())
