"""Masking and averaging worked by hand; parts sum to the whole; what is masked has no effect."""

import math

import pytest
import torch
from torch import Tensor

from lightrl.functional import clipped_policy_loss, kl, masked_mean, neutralize, reduce_loss

MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False, False, False, False]])
LOSSES = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 8.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])


@pytest.mark.parametrize(
    ("mode", "expected"), [("token", 14 / 4), ("sequence", (6 / 3 + 8 / 1) / 2), ("fixed", 14 / (2 * 10))]
)
def test_each_reduction_worked_by_hand(mode: str, expected: float) -> None:
    loss = reduce_loss(LOSSES, MASK, mode=mode, num_tokens=4, num_sequences=2, max_new_tokens=10)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
def test_a_loss_per_trajectory_counts_once_where_there_are_loss_tokens(mode: str) -> None:
    losses = torch.tensor([2.0, 5.0, math.nan])
    loss = reduce_loss(losses, MASK, mode=mode, num_tokens=4, num_sequences=2, max_new_tokens=10)
    assert loss.item() == pytest.approx(3.5)


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("sizes", [[1, 1, 1, 1, 1, 1], [4, 2], [1, 5]], ids=str)
def test_shares_of_microbatches_sum_to_the_whole(mode: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    losses, mask = torch.randn(6, 5), torch.rand(6, 5) < 0.5
    mask[3] = False
    num_tokens, num_sequences = int(mask.sum()), int(mask.any(1).sum())
    totals = {"mode": mode, "num_tokens": num_tokens, "num_sequences": num_sequences, "max_new_tokens": 4}
    whole = reduce_loss(losses, mask, **totals)
    parts = [reduce_loss(a, b, **totals) for a, b in zip(losses.split(sizes), mask.split(sizes), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
def test_without_loss_tokens_the_loss_and_its_gradient_are_zero(mode: str) -> None:
    losses = torch.full((2, 3), math.inf, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    loss = reduce_loss(losses, mask, mode=mode, num_tokens=0, num_sequences=0, max_new_tokens=10)
    loss.backward()
    assert loss.item() == 0
    assert losses.grad.eq(0).all()


def loss_gradient(logprobs: Tensor, proximal: Tensor, reference: Tensor, mode: str) -> Tensor:
    """The gradient of a whole GRPO loss, as the framework puts it together."""
    logprobs = logprobs.clone().requires_grad_()
    inputs = neutralize(MASK, logprobs, proximal, reference, torch.ones_like(proximal))
    losses = clipped_policy_loss(inputs[0], inputs[1], inputs[3]) + 0.1 * kl(inputs[0], inputs[2], "k3")
    reduce_loss(losses, MASK, mode=mode, num_tokens=4, num_sequences=2, max_new_tokens=10).backward()
    assert logprobs.grad is not None
    return logprobs.grad


@pytest.mark.parametrize("mode", ["token", "sequence", "fixed"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e38], ids=str)
def test_masked_tokens_give_no_gradient_even_when_not_finite(poison: float, mode: str) -> None:
    torch.manual_seed(0)
    tensors = [-torch.rand(3, 4) for _ in range(3)]
    clean = loss_gradient(*tensors, mode=mode)
    for poisoned in ([True, False, False], [False, True, False], [False, False, True], [True, True, True]):
        dirty = [
            torch.where(MASK, tensor, poison) if here else tensor
            for tensor, here in zip(tensors, poisoned, strict=True)
        ]
        assert loss_gradient(*dirty, mode=mode).equal(clean)
    assert clean.isfinite().all()
    assert clean[~MASK].eq(0).all()


def test_neutralize_keeps_dtypes_and_order() -> None:
    mask = torch.tensor([[True, False]])
    floats, integers, booleans = neutralize(
        mask, torch.tensor([[1.5, math.nan]]), torch.tensor([[3, 4]]), torch.tensor([[True, True]])
    )
    assert floats.tolist() == [[1.5, 0.0]]
    assert integers.tolist() == [[3, 0]]
    assert integers.dtype == torch.int64
    assert booleans.tolist() == [[True, False]]
    assert booleans.dtype == torch.bool


def test_neutralize_takes_whole_positions_of_tensors_with_further_axes() -> None:
    values = torch.tensor([[[1.5, 2.5], [math.nan, math.inf]]], requires_grad=True)
    (clean,) = neutralize(torch.tensor([[True, False]]), values)
    assert clean.tolist() == [[[1.5, 2.5], [0.0, 0.0]]]
    clean.square().sum().backward()
    assert values.grad.tolist() == [[[3.0, 5.0], [0.0, 0.0]]]
    with pytest.raises(ValueError, match=r"tensors\[0\] has shape \(1, 2\)"):
        neutralize(torch.tensor([[True]]), values)


def test_the_masked_mean_leaves_out_what_is_masked() -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, math.inf]], requires_grad=True)
    mean = masked_mean(values, torch.tensor([[True, False], [True, False]]))
    mean.backward()
    assert mean.item() == 2.0
    assert values.grad.tolist() == [[0.5, 0.0], [0.5, 0.0]]


def test_the_masked_mean_of_nothing_is_zero() -> None:
    assert masked_mean(torch.tensor([math.nan]), torch.tensor([False])).item() == 0


def test_settings_and_shapes_without_a_meaning_are_refused() -> None:
    totals = {"num_tokens": 4, "num_sequences": 2}
    with pytest.raises(ValueError, match="mode must be token, sequence or fixed, got 'mean'"):
        reduce_loss(LOSSES, MASK, mode="mean", **totals)
    with pytest.raises(ValueError, match=r"needs max_new_tokens, .* got None"):
        reduce_loss(LOSSES, MASK, mode="fixed", **totals)
    with pytest.raises(ValueError, match=r"\(3, 3\).*\(3, 4\)"):
        reduce_loss(LOSSES[:, 1:], MASK, mode="token", **totals)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        reduce_loss(LOSSES[:2, 0], MASK, mode="token", **totals)
