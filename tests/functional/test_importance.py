"""M2PO's mask and the interpolated proximal policy: worked by hand, and against loops over tokens."""

import math

import pytest
import torch

from lightrl.functional import interpolated_proximal_logprobs, second_moment_mask


def test_the_second_moment_mask_worked_by_hand() -> None:
    """Squares 0.01, 0.04, 0.09, 1: the means of the smallest are 0.01, 0.025, 0.0467, 0.285."""
    log_ratios = torch.tensor([[-0.2, 1.0, 0.1, 0.3]])
    everywhere = torch.ones(1, 4, dtype=torch.bool)
    kept = second_moment_mask(log_ratios, torch.zeros(1, 4), everywhere, threshold=0.04)
    assert kept.tolist() == [[True, False, True, False]]
    assert second_moment_mask(log_ratios, torch.zeros(1, 4), everywhere, threshold=0.3).all()
    assert not second_moment_mask(log_ratios, torch.zeros(1, 4), everywhere, threshold=0.005).any()


def test_the_second_moment_mask_equals_taking_out_the_largest_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    policy, behavior = (torch.randn(4, 9, generator=generator) for _ in range(2))
    loss_mask = torch.rand(4, 9, generator=generator) > 0.3
    left = {(row, t): float(policy[row, t] - behavior[row, t]) ** 2 for row, t in loss_mask.nonzero().tolist()}
    while sum(left.values()) / len(left) > 0.4:
        left.pop(max(left, key=lambda place: left[place]))
    found = second_moment_mask(policy, behavior, loss_mask, threshold=0.4)
    assert {(row, t) for row, t in found.nonzero().tolist()} == set(left)
    assert 0 < len(left) < int(loss_mask.sum())


@pytest.mark.parametrize("junk", [math.nan, math.inf])
def test_what_is_masked_has_no_effect_on_the_second_moment(junk: float) -> None:
    policy, loss_mask = torch.tensor([[junk, 0.1, 2.0]]), torch.tensor([[False, True, True]])
    assert second_moment_mask(policy, torch.zeros(1, 3), loss_mask).tolist() == [[False, True, False]]


def test_the_interpolated_proximal_policy_worked_by_hand() -> None:
    """At version 4, tokens of versions 4, 3 and 1: 0, 1/2 and 3/4 of the way from -2 to -1."""
    versions = torch.tensor([[4, 3, 1]])
    actual = interpolated_proximal_logprobs(torch.full((1, 3), -1.0), torch.full((1, 3), -2.0), versions, 4)
    torch.testing.assert_close(actual, torch.tensor([[-2.0, -1.5, -1.25]]))


def test_a_token_of_later_weights_counts_as_one_of_the_present() -> None:
    """As recorded trajectories of another run may have; a line would lead beyond both policies, or divide by 0."""
    behavior, versions = torch.full((1, 2), -2.0), torch.tensor([[5, 7]])
    assert torch.equal(interpolated_proximal_logprobs(torch.full((1, 2), -1.0), behavior, versions, 4), behavior)


def test_the_interpolated_proximal_policy_has_no_gradient() -> None:
    logprobs = torch.zeros(1, 2, requires_grad=True)
    versions = torch.zeros(1, 2, dtype=torch.int64)
    assert not interpolated_proximal_logprobs(logprobs, torch.ones(1, 2), versions, 3).requires_grad


def test_a_threshold_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"threshold must be above 0 .* got 0"):
        second_moment_mask(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), threshold=0)
