"""Equations for a critic: advantages and returns from its values, value loss, normalization; and reward shaping.

Shapes: B trajectories, T tokens. The steps of a trajectory are its loss tokens; text from environments or tools
between them is skipped, not discounted. `values[b, t]` is the value of the state before `token_ids[b, t]` was sampled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_choice, check_positive, check_same_shape
from lightrl.functional.advantages import moments
from lightrl.functional.reduction import Total, of_one_rank

ValueNormalization = Literal["exponential", "running"]


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Computes generalized advantage estimates over the loss tokens of each trajectory.

    With t' the loss token after t: delta_t = reward_t + gamma·value_t' - value_t, advantage_t = delta_t + gamma·lam·
    advantage_t', return_t = advantage_t + value_t. After the last loss token, value is `bootstrap` and advantage 0.

    Source: https://arxiv.org/abs/1506.02438.

    Args:
        rewards: [B, T]; only rewards at loss tokens count, see `on_loss_tokens`.
        values: [B, T].
        loss_mask: bool [B, T]; rewards and values elsewhere have no effect.
        gamma: discount per loss token, 0 to 1.
        lam: λ; beyond the next loss token, 0 relies only on the critic and 1 only on the rewards.
        bootstrap: [B], the value of the state after a truncated trajectory, 0 for others; None means 0 for all.

    Returns:
        Advantages and returns, [B, T], without gradient, 0 where the mask is False.
    """
    check_same_shape(rewards=rewards, values=values, loss_mask=loss_mask)
    check_bounds(0, 1, gamma=gamma, lam=lam)
    dtype = torch.promote_types(rewards.dtype, values.dtype)
    rewards, values = rewards.detach().to(dtype), values.detach().to(dtype)
    end = torch.zeros_like(values[:, 0]) if bootstrap is None else bootstrap.detach().to(dtype)
    check_same_shape(**{"bootstrap": end, "values[:, 0]": values[:, 0]})
    counts = loss_mask.sum(1)
    is_step = torch.arange(max(counts.tolist(), default=0), device=values.device) < counts[:, None]  # steps come first
    zeros = values.new_zeros(is_step.shape)
    earned, states = (zeros.masked_scatter(is_step, full[loss_mask]) for full in (rewards, values))
    states = torch.nn.functional.pad(states, (0, 1)).scatter(1, counts[:, None], end[:, None])
    sums = torch.where(is_step, earned + gamma * states[:, 1:] - states[:, :-1], 0.0)
    for num in (1 << bit for bit in range((sums.shape[1] - 1).bit_length())):  # doubles the summed deltas
        sums[:, :-num] += (gamma * lam) ** num * sums[:, num:]
    advantages = torch.zeros_like(values).masked_scatter(loss_mask, sums[is_step])
    return advantages, torch.where(loss_mask, advantages + values, 0.0)


def on_last_loss_token(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Turns rewards [B] into rewards per token [B, T] by putting each on its trajectory's last loss token.

    The mask is bool [B, T]; the reward of a trajectory without loss tokens is dropped.
    """
    check_same_shape(rewards=rewards, loss_mask=loss_mask.any(1))
    num_left = loss_mask.flip(1).cumsum(1).flip(1)  # number of loss tokens from here on
    return torch.where(loss_mask & (num_left == 1), rewards[:, None], 0.0)


def on_loss_tokens(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Moves each reward that is not on a loss token to the last loss token before it, which earned the reward.

    Drops rewards before the first loss token, which no action earned.

    Args:
        rewards: [B, T]; environments may put rewards on the tokens of their replies.
        loss_mask: bool [B, T].

    Returns:
        [B, T], 0 where the mask is False.
    """
    check_same_shape(rewards=rewards, loss_mask=loss_mask)
    columns = torch.arange(loss_mask.shape[1], device=loss_mask.device).expand_as(loss_mask)
    owner = torch.where(loss_mask, columns, -1).cummax(1).values
    earned = torch.where(owner >= 0, rewards, 0.0)
    return torch.zeros_like(earned).scatter_add(1, owner.clamp(min=0), earned)


@dataclass(frozen=True)
class RewardShaping:
    """Shapes rewards per token: clip((reward + bias) · scaling). Only the last loss token gets the bias.

    Args:
        bias: added to the reward of each trajectory.
        scaling: multiplies every reward.
        clip: upper bound on the absolute value of a token's reward; None for no bound.
    """

    bias: float = 0.0
    scaling: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.scaling == 0:
            raise ValueError("scaling in reward_shaping must not be 0, or all rewards would be 0. 1 means no scaling.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip in reward_shaping must be above 0 or None, got {self.clip}.")

    def __call__(self, rewards: Tensor, loss_mask: Tensor) -> Tensor:
        """Shapes rewards [B, T], given a bool mask [B, T]; returns [B, T]."""
        bias = torch.full_like(rewards[:, 0], self.bias)
        shaped = (rewards + on_last_loss_token(bias, loss_mask)) * self.scaling
        return shaped if self.clip is None else shaped.clamp(-self.clip, self.clip)


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    *,
    value_clip: float | None = None,
    huber_delta: float | None = None,
) -> Tensor:
    """Computes half the squared error of each value, [B, T]; with `huber_delta`, large errors count linearly.

    With `value_clip`, also computes the loss of the value clipped to within `value_clip` of the old value, and takes
    the larger loss, so that a value gains nothing by moving further.

    Source: PPO's implementations, https://arxiv.org/abs/2005.12729; Huber, https://doi.org/10.1214/aoms/1177703732.

    Args:
        values: [B, T]; carries the gradient.
        returns: [B, T].
        old_values: [B, T], from before the update; required with `value_clip`.
        value_clip: bound on the distance from the old value; None for no bound.
        huber_delta: the error above which the loss grows linearly; None squares every error.
    """
    check_same_shape(values=values, returns=returns)
    check_positive(value_clip=value_clip, huber_delta=huber_delta)
    loss = _distance_loss(values - returns.detach(), huber_delta)
    if value_clip is None:
        return loss
    if old_values is None:
        raise ValueError(f"value_clip={value_clip} needs old_values, the values from before the update.")
    check_same_shape(values=values, old_values=old_values)
    old = old_values.detach()
    bounded = old + (values - old).clamp(-value_clip, value_clip)
    return torch.maximum(loss, _distance_loss(bounded - returns.detach(), huber_delta))


def explained_variance(values: Tensor, returns: Tensor, loss_mask: Tensor, total: Total = of_one_rank) -> float:
    """Computes 1 - Var(returns - values) / Var(returns) over the loss tokens: 1 for a perfect critic, 0 for a constant.

    Returns 0 if the returns do not vary. `total` reduces over ranks, which hold different trajectories.
    """
    check_same_shape(values=values, returns=returns, loss_mask=loss_mask)
    predicted, actual = values[loss_mask].double(), returns[loss_mask].double()
    _, variance, are_equal = moments(actual, total)
    _, unexplained, _ = moments(actual - predicted, total)
    return 0.0 if are_equal or float(variance) == 0 else float(1 - unexplained / variance)


@dataclass
class ValueNormalizer:
    """Normalizes the returns that the critic predicts, by the mean and standard deviation of the returns so far.

    `running` weighs all returns equally, so its statistics converge. `exponential` discounts old returns, so it follows
    an improving policy. Before the first update, normalization changes nothing.

    Source: https://arxiv.org/abs/2006.05990, https://arxiv.org/abs/2103.01955.

    Args:
        kind: `running` or `exponential`.
        decay: factor on the weight of old returns in each iteration, for `exponential`.
    """

    kind: ValueNormalization = "exponential"
    decay: float = 0.99
    mean: float = 0.0
    mean_square: float = 0.0
    weight: float = 0.0  # running: number of returns; exponential: 1 - decay^iterations, the bias correction

    def __post_init__(self) -> None:
        check_choice(get_args(ValueNormalization), value_normalization=self.kind)
        if not 0 <= self.decay < 1:
            raise ValueError(f"value_decay must be at least 0 and below 1, got {self.decay}.")

    def update(self, returns: Tensor, over_ranks: Total = of_one_rank) -> None:
        """Adds one iteration's returns, of any shape, on all ranks; does nothing if there are no returns."""
        values = returns.double()
        num, sum_, square_sum = over_ranks(
            torch.stack([torch.tensor(values.numel()).double(), values.sum(), values.square().sum()])
        ).tolist()
        if num == 0:
            return
        new_weight = num if self.kind == "running" else 1 - self.decay
        old_weight = self.weight if self.kind == "running" else self.decay * self.weight
        self.weight = old_weight + new_weight
        self.mean = (old_weight * self.mean + new_weight * sum_ / num) / self.weight
        self.mean_square = (old_weight * self.mean_square + new_weight * square_sum / num) / self.weight

    @property
    def std(self) -> float:
        """The standard deviation, at least 1e-2 so that dividing by it is safe; 1 before the first update."""
        return 1.0 if self.weight == 0 else max(self.mean_square - self.mean**2, 1e-4) ** 0.5

    def normalize(self, returns: Tensor) -> Tensor:
        return (returns - self.mean) / self.std

    def denormalize(self, values: Tensor) -> Tensor:
        return values * self.std + self.mean

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.mean, "mean_square": self.mean_square, "weight": self.weight}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.mean, self.mean_square, self.weight = state["mean"], state["mean_square"], state["weight"]


def _distance_loss(distance: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return distance.square() / 2
    return torch.nn.functional.huber_loss(distance, torch.zeros_like(distance), reduction="none", delta=huber_delta)
