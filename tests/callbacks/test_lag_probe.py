"""LagProbe: its state, and how it measures a step; tests/trainer/test_async.py has it in a run."""

import math

import pytest
import torch

from lightrl.callbacks.lag_probe import choose_rows, step_k3


@pytest.mark.parametrize(
    ("num_trajectories", "num_tokens", "expected"),
    [
        pytest.param(512, 512_000, range(0, 512, 128), id="four long completions are enough"),
        pytest.param(512, 5120, range(0, 512, 39)[:13], id="128 tokens, of 10 each"),
        pytest.param(256, 512, range(0, 256, 4), id="128 tokens, of 2 each"),
        pytest.param(64, 64, range(0, 64, 4), id="at most one of four"),
        pytest.param(8, 80, range(0, 8, 4), id="two of few"),
        pytest.param(1, 0, range(1), id="one that wrote nothing"),
        pytest.param(0, 0, range(0), id="none"),
    ],
)
def test_a_few_trajectories_are_kept_and_more_of_short_ones(num_trajectories, num_tokens, expected):
    assert list(choose_rows(num_trajectories, num_tokens)) == list(expected)


def test_a_step_is_k3_weighted_by_how_likely_the_policy_still_writes_the_token() -> None:
    behavior = torch.tensor([0.5, 0.2, 0.5]).log()
    before = torch.tensor([0.25, 0.4, 0.5]).log()  # weights 1/2, 1 (not 2), 1
    after = torch.tensor([0.5, 0.2, 0.5]).log()
    k3 = [2 - 1 - math.log(2), 0.5 - 1 - math.log(0.5), 0.0]
    assert step_k3(behavior, before, after) == pytest.approx((k3[0] / 2 + k3[1]) / 2.5)
    assert step_k3(behavior, before, before) == 0.0


def test_tokens_that_the_policy_gave_up_hardly_count() -> None:
    """Where it never goes, its logprobs move by much and mean nothing."""
    behavior, before, after = torch.tensor([[-1.0, -1.0], [-1.0, -30.0], [-1.0, -20.0]])
    assert step_k3(behavior, before, after) < 1e-4
