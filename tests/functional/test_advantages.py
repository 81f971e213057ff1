"""Advantages worked by hand, against a loop over groups, and their invariances."""

import itertools
import math
import statistics

import pytest
import torch

from lightrl.functional import group_advantages, optimal_advantages


def slow_advantages(rewards, group_ids, mean, std, leave_one_out, unbiased, eps):
    """Plain Python, one trajectory at a time."""
    advantages = []
    for i, (reward, group_id) in enumerate(zip(rewards, group_ids, strict=True)):
        group = [j for j, other in enumerate(group_ids) if other == group_id]
        of = {"group": group, "batch": list(range(len(rewards)))}
        value = reward
        for statistic in (mean, std):
            if statistic and len({rewards[j] for j in of[statistic]}) == 1:
                value = None
        if value is None:
            advantages.append(0.0)
            continue
        if mean:
            others = [rewards[j] for j in of[mean] if not (leave_one_out and j == i)]
            value -= statistics.fmean(others)
        if std:
            deviation = statistics.stdev if unbiased else statistics.pstdev
            value /= deviation([rewards[j] for j in of[std]]) + eps
        advantages.append(value)
    return advantages


def test_one_success_in_four_worked_by_hand() -> None:
    # mean 1/4; squared deviations 9/16 + 3 · 1/16 = 3/4; unbiased variance 1/4, std 1/2.
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64), eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([1.5, -0.5, -0.5, -0.5]))


@pytest.mark.parametrize(
    ("mean", "std", "leave_one_out", "unbiased"),
    [
        (mean, std, leave_one_out, unbiased)
        for mean, std, leave_one_out, unbiased in itertools.product(
            ("group", "batch", None), ("group", "batch", None), (False, True), (True, False)
        )
        if mean or not leave_one_out
    ],
)
def test_advantages_equal_a_loop_over_groups_of_any_sizes_in_any_order(mean, std, leave_one_out, unbiased):
    group_ids = [7, -3, 7, 7, 100, -3, 5, 5, 7, 100, 2**40]
    rewards = [0.5, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0, -1.0, 0.25, 1.0, 3.0]
    settings = (mean, std, leave_one_out, unbiased, 1e-5)
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(group_ids), *settings)
    torch.testing.assert_close(advantages, torch.tensor(slow_advantages(rewards, group_ids, *settings)))


@pytest.mark.parametrize("mean", ["group", "batch"])
@pytest.mark.parametrize("std", ["group", "batch", None])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_a_batch_of_one_gives_zero(mean: str, std: str | None, leave_one_out: bool) -> None:
    advantages = group_advantages(torch.tensor([5.0]), torch.tensor([1]), mean, std, leave_one_out)
    assert advantages.tolist() == [0.0]


def test_equal_rewards_give_exactly_zero_also_where_their_mean_rounds() -> None:
    rewards = torch.tensor([0.1] * 3 + [0.7] * 7 + [1e8] * 11)
    group_ids = torch.tensor([0] * 3 + [1] * 7 + [2] * 11)
    for std in ("group", None):
        for leave_one_out in (False, True):
            advantages = group_advantages(rewards, group_ids, std=std, leave_one_out=leave_one_out, eps=0.0)
            assert advantages.eq(0).all()


def test_no_trajectories_give_no_advantages() -> None:
    assert group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)


def test_advantages_keep_the_rewards_dtype_and_integers_become_float32() -> None:
    group_ids = torch.zeros(2, dtype=torch.int64)
    assert group_advantages(torch.tensor([1.0, 0.0], dtype=torch.float64), group_ids).dtype == torch.float64
    assert group_advantages(torch.tensor([1, 0]), group_ids).dtype == torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mean": "groups"}, "mean must be group, batch or None, got 'groups'"),
        ({"std": "all"}, "std must be group, batch or None, got 'all'"),
        ({"mean": None, "leave_one_out": True}, "leave_one_out needs a mean"),
    ],
    ids=["unknown mean", "unknown std", "leave one out without a mean"],
)
def test_settings_without_a_meaning_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), **settings)


def test_the_optimal_value_worked_by_hand() -> None:
    """Rewards (1, 0, 0, 0) and β = 1/2: V = log((e² + 3)/4)/2. The groups are mixed."""
    value = math.log((math.exp(2) + 3) / 4) / 2
    actual = optimal_advantages(torch.tensor([0.0, 5.0, 1.0, 0.0, 5.0, 0.0]), torch.tensor([3, 9, 3, 3, 9, 3]), 0.5)
    torch.testing.assert_close(actual, torch.tensor([-value, 0.0, 1 - value, -value, 0.0, -value]))


def test_the_optimal_value_is_between_the_mean_and_the_best() -> None:
    rewards, group_ids = torch.tensor([0.2, -1.0, 3.0, 0.5]), torch.zeros(4, dtype=torch.int64)
    means = rewards - rewards.mean()
    torch.testing.assert_close(optimal_advantages(rewards, group_ids, 1e5), means, atol=1e-4, rtol=0)
    torch.testing.assert_close(optimal_advantages(rewards, group_ids, 1e-5), rewards - 3.0, atol=1e-4, rtol=0)
    shifted = optimal_advantages(rewards - 1000.0, group_ids, 0.3)  # no exponential of a reward alone
    torch.testing.assert_close(shifted, optimal_advantages(rewards, group_ids, 0.3), atol=1e-4, rtol=0)


def test_no_temperature_and_no_trajectory() -> None:
    with pytest.raises(ValueError, match="beta must be above 0, got 0"):
        optimal_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), 0)
    assert optimal_advantages(torch.ones(0), torch.zeros(0, dtype=torch.int64), 1.0).shape == (0,)
