"""Confidence intervals for pass@k, beside a search for the bounds and a bootstrap over prompts."""

import math

import numpy as np
import pytest

from lightrl.commands.intervals import interval_lines, wilson_interval


@pytest.mark.parametrize(("num_solved", "num"), [(0, 5), (1, 5), (37, 96), (96, 96), (500, 1000)])
def test_the_bounds_are_the_fractions_that_a_two_sided_test_just_accepts(num_solved: int, num: int) -> None:
    """Wilson inverts the score test: at a bound p, |observed - p| is 1.96 standard deviations under p."""
    observed = num_solved / num
    grid = np.linspace(0, 1, 1_000_001)
    accepted = grid[np.abs(observed - grid) <= 1.959964 * np.sqrt(grid * (1 - grid) / num) + 1e-12]
    assert wilson_interval(observed, num) == pytest.approx((accepted.min(), accepted.max()), abs=2e-6)


def test_the_interval_is_that_of_a_bootstrap_over_prompts() -> None:
    solved = np.array([1] * 300 + [0] * 700)
    means = np.random.default_rng(0).choice(solved, (4000, len(solved))).mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    # A bootstrap's quantile of 4,000 draws has a standard error of 0.0004; Wilson's centre differs by z²·0.2 / n.
    assert wilson_interval(0.3, 1000) == pytest.approx((low, high), abs=0.003)


def test_validation_prints_a_line_for_each_passk_and_for_accuracy_only_without_one() -> None:
    one = {"val/accuracy_fraction": 0.5, "val/prompts": 4.0, "val/reward": 0.5}
    assert interval_lines(one) == "val pass@1 0.5000, 95% interval 0.1500 to 0.8500 (Wilson, 4 prompts)"
    several = one | {"val/pass_at_8_fraction": 0.75}
    assert interval_lines(several) == "val pass@8 0.7500, 95% interval 0.3006 to 0.9544 (Wilson, 4 prompts)"
    sets = {"test/accuracy_fraction/sums": 1.0, "test/prompts/sums": 2.0, "test/prompts": 5.0}
    assert interval_lines(sets) == "test/sums pass@1 1.0000, 95% interval 0.3424 to 1.0000 (Wilson, 2 prompts)"
    assert interval_lines({"val/reward": 1.0, "val/prompts": 3.0, "val/accuracy_fraction": math.nan}) == ""
