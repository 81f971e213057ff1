"""Reduces per-token losses to one number: masks before and after the loss, and averages in one of three ways.

Shapes: B trajectories, T tokens. The loss mask is bool [B, T], True where a token trains.

If masked values were only excluded after the loss, an infinite log-ratio among them would give the gradient
0 · inf = NaN. They are therefore also set to 0 before the loss (`neutralize`, then `reduce_loss`).
"""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice, check_same_shape

LossReduction = Literal["token", "sequence", "fixed"]


class Total(Protocol):
    """Reduces over all ranks by sum or maximum; each rank holds different trajectories. See `Experience.total`."""

    def __call__(self, values: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor: ...


def of_one_rank(values: Tensor, operation: Literal["sum", "max"] = "sum") -> Tensor:
    """Returns the values unchanged: the Total of a single rank, which holds all trajectories."""
    return values


def neutralize(loss_mask: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors with 0 where the mask is False, even for NaN or ±inf. These positions get no gradient.

    Args:
        loss_mask: bool, [B, T] (or [B], with tensors [B]).
        tensors: each has the mask's shape, possibly with more dimensions after it.
    """
    dims = loss_mask.dim()
    neutral = []
    for index, tensor in enumerate(tensors):
        num_more = tensor.dim() - dims
        if tensor.shape[:dims] != loss_mask.shape:
            check_same_shape(**{"loss_mask": loss_mask, f"tensors[{index}]": tensor[(...,) + (0,) * num_more]})
        neutral.append(torch.where(loss_mask[(...,) + (None,) * num_more], tensor, tensor.new_zeros(())))
    return tuple(neutral)


def masked_mean(values: Tensor, mask: Tensor, total: Total = of_one_rank) -> Tensor:
    """Returns the mean over the positions where the mask is True, a scalar; 0 if the mask is False everywhere.

    Args:
        values: [B, T] or [B]; masked values affect neither the mean nor its gradient.
        mask: bool, of the same shape.
        total: reduces over all ranks.
    """
    (selected,) = neutralize(mask, values)
    return total(selected.sum()) / total(mask.sum()).clamp(min=1)


def reduce_loss(
    per_token: Tensor,
    loss_mask: Tensor,
    *,
    mode: LossReduction,
    num_tokens: int,
    num_sequences: int,
    max_new_tokens: int | None = None,
) -> Tensor:
    """Computes a microbatch's share of the minibatch loss; the shares of all microbatches and ranks sum to that loss.

    With N = num_tokens, B = num_sequences, and n_i the number of loss tokens of trajectory i:
    "token" Σ/N (DAPO), "sequence" Σ_i(Σ_t/n_i)/B (GRPO), "fixed" Σ/(B · max_new_tokens) (Dr. GRPO).
    A loss per trajectory, [B], counts once for each trajectory that has loss tokens and is divided by B in every mode.

    Source: GRPO, https://arxiv.org/abs/2402.03300; DAPO, https://arxiv.org/abs/2503.14476; Dr. GRPO,
    https://arxiv.org/abs/2503.20783.

    Args:
        per_token: [B, T] or [B]; NaN and ±inf at masked positions have no effect on value or gradient.
        loss_mask: bool [B, T].
        mode: "token", "sequence" or "fixed".
        num_tokens: number of loss tokens in the whole minibatch, over all microbatches and ranks.
        num_sequences: number of trajectories with loss tokens in the whole minibatch, over all microbatches and ranks.
        max_new_tokens: length limit for a completion; required by "fixed".

    Returns:
        A scalar; 0, with a gradient of zeros, if no token trains.
    """
    check_choice(get_args(LossReduction), mode=mode)
    if mode == "fixed" and (max_new_tokens is None or max_new_tokens < 1):
        raise ValueError(
            "loss_reduction='fixed' needs max_new_tokens, the length limit for a completion, to be at least 1, got "
            f"{max_new_tokens}."
        )
    num_sequences = max(num_sequences, 1)
    loss_tokens = loss_mask.sum(dim=1)
    if per_token.dim() == 1:
        (selected,) = neutralize(loss_tokens > 0, per_token)
        return selected.sum() / num_sequences
    (selected,) = neutralize(loss_mask, per_token)
    if mode == "token":
        return selected.sum() / max(num_tokens, 1)
    if mode == "sequence":
        return (selected.sum(dim=1) / loss_tokens.clamp(min=1)).sum() / num_sequences
    assert max_new_tokens is not None
    return selected.sum() / (num_sequences * max_new_tokens)
