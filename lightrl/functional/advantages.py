"""Computes advantages from rewards: how much better each trajectory is than expected.

Shapes: B, all trajectories in the iteration, so that statistics do not depend on how ranks divide the work.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice, check_same_shape
from lightrl.functional.reduction import Total, of_one_rank

Statistic = Literal["group", "batch"]


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    mean: Statistic | None = "group",
    std: Statistic | None = "group",
    leave_one_out: bool = False,
    unbiased: bool = True,
    eps: float = 1e-5,
) -> Tensor:
    """Computes (r - mean) / (std + eps); mean and std are over a trajectory's group or the batch, or omitted.

    GRPO is the default, Dr. GRPO `std=None`, RLOO `leave_one_out=True, std=None`, REINFORCE with a baseline
    `mean="batch", std=None`, LitePPO `mean="group", std="batch"` (the standard deviation of all rewards in the batch).

    Source: GRPO, https://arxiv.org/abs/2402.03300; Dr. GRPO, https://arxiv.org/abs/2503.20783; RLOO,
    https://arxiv.org/abs/2402.14740; LitePPO, https://arxiv.org/abs/2508.08221.

    Args:
        rewards: [B].
        group_ids: int [B]; trajectories with the same id form a group, of any size, in any order.
        mean: use the mean of the group or the batch as the baseline; None for no baseline.
        std: divide by the standard deviation of the group or the batch; None for no division.
        leave_one_out: exclude each trajectory from its own mean.
        unbiased: divide the variance by n - 1 instead of n.
        eps: limits the advantages where the standard deviation is small.

    Returns:
        [B], in the rewards' dtype. Exactly 0 if the rewards that the mean or std is computed from are all equal.
    """
    check_same_shape(rewards=rewards, group_ids=group_ids)
    check_choice((*get_args(Statistic), None), mean=mean, std=std)
    if leave_one_out and mean is None:
        raise ValueError("leave_one_out needs a mean: set mean to 'group' or 'batch'.")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    # float64, so that equal differences give equal advantages in groups of different sizes or mean rewards.
    values = rewards.to(torch.float64)
    advantages = values
    if mean is not None:
        indices = _group_indices(group_ids, mean)
        count, average = _count_and_mean(values, indices)
        advantages = values - average
        if leave_one_out:  # r - (n·average - r)/(n - 1)
            advantages = advantages * count / (count - 1).clamp(min=1)
        advantages = torch.where(_are_equal(values, indices), 0.0, advantages)
    if std is not None:
        indices = _group_indices(group_ids, std)
        count, average = _count_and_mean(values, indices)
        squares = torch.zeros_like(values).index_add_(0, indices, (values - average).square())[indices]
        deviation = (squares / (count - int(unbiased)).clamp(min=1)).sqrt()
        advantages = torch.where(_are_equal(values, indices), 0.0, advantages / (deviation + eps))
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def optimal_advantages(rewards: Tensor, group_ids: Tensor, beta: float) -> Tensor:
    """Computes r - V, where V = β · log mean exp(r / β) over the group, OAPL's estimate of the optimal policy's value.

    The policy that maximizes reward - β · KL(policy ‖ sampling policy) has log-ratio (r - V) / β. V lies between the
    group's mean reward (β → ∞) and its largest reward (β → 0).

    Source: OAPL, https://arxiv.org/abs/2602.19362.

    Args:
        rewards: [B].
        group_ids: int [B]; trajectories with the same id form a group, of any size, in any order.
        beta: β, in units of the reward; above 0.

    Returns:
        [B], in the rewards' dtype; exactly 0 where all rewards in a group are equal.
    """
    check_same_shape(rewards=rewards, group_ids=group_ids)
    if not 0 < beta < torch.inf:
        raise ValueError(f"beta must be above 0, got {beta}. For rewards of 0 and 1, 0.25 is suitable.")
    if rewards.numel() == 0:
        return torch.zeros_like(rewards)
    values = rewards.to(torch.float64)
    indices = _group_indices(group_ids, "group")
    largest = torch.full_like(values, -torch.inf).scatter_reduce_(0, indices, values, "amax")[indices]
    _, mean = _count_and_mean(((values - largest) / beta).exp(), indices)
    advantages = torch.where(_are_equal(values, indices), 0.0, values - largest - beta * mean.log())
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)


def batch_normalized(values: Tensor, loss_mask: Tensor, *, eps: float = 1e-5, total: Total = of_one_rank) -> Tensor:
    """Computes (value - mean) / (std + eps), with mean and standard deviation over all loss tokens in the batch.

    This is REINFORCE++'s global normalization. Each token counts once, so long trajectories weigh more.

    Source: https://arxiv.org/abs/2501.03262.

    Args:
        values: [B, T]; masked values have no effect.
        loss_mask: bool [B, T].
        eps: limits the result where the standard deviation is small.
        total: reduces over all ranks.

    Returns:
        [B, T], 0 where masked; 0 everywhere if all values are equal.
    """
    check_same_shape(values=values, loss_mask=loss_mask)
    mean, variance, are_equal = moments(values[loss_mask].double(), total)
    if are_equal:
        return torch.zeros_like(values)
    normalized = (values.double() - mean) / (variance.sqrt() + eps)
    return torch.where(loss_mask, normalized, 0.0).to(values.dtype)


def moments(values: Tensor, total: Total = of_one_rank) -> tuple[Tensor, Tensor, bool]:
    """Returns mean and unbiased variance over all ranks, and whether all values are equal; `values` is float64 [n]."""
    count = total(torch.tensor(len(values)))
    bounds = torch.stack([values.amax(), -values.amin()]) if len(values) else torch.full((2,), -torch.inf).double()
    highest, lowest = total(bounds, "max").unbind()
    mean = total(values.sum()) / count.clamp(min=1)
    variance = total((values - mean).square().sum()) / (count - 1).clamp(min=1)
    return mean, variance, bool(count < 2) or bool(highest == -lowest)


def _group_indices(group_ids: Tensor, statistic: Statistic) -> Tensor:
    """Returns the index, from 0, of each trajectory's group, [B]; for "batch", all trajectories are in group 0."""
    if statistic == "batch":
        return torch.zeros_like(group_ids, dtype=torch.int64)
    indices: Tensor = torch.unique(group_ids, return_inverse=True)[1]
    return indices


def _count_and_mean(values: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    zeros = torch.zeros_like(values)
    count = zeros.index_add(0, indices, torch.ones_like(values))[indices]
    return count, zeros.index_add(0, indices, values)[indices] / count


def _are_equal(values: Tensor, indices: Tensor) -> Tensor:
    """Whether all values in a trajectory's group are equal, [B]; their computed deviation may be 1e-17 instead of 0."""
    lowest = torch.zeros_like(values).scatter_reduce(0, indices, values, "amin", include_self=False)
    highest = torch.zeros_like(values).scatter_reduce(0, indices, values, "amax", include_self=False)
    return lowest.eq(highest).index_select(0, indices)
