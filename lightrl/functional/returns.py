"""Returns and advantages per token, from rewards per token and a critic's values.

Shapes: B trajectories, T tokens. The steps of a trajectory are its loss tokens: what an environment or a tool writes
between them is skipped, not discounted. `values[b, t]` is the value of the state before `token_ids[b, t]` was drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_same_shape
from lightrl.functional.reduction import neutralize


def gae(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 0.95,
    bootstrap: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation over the loss tokens t of each trajectory, t' the loss token after t:

    delta_t = reward_t + gamma·value_t' - value_t;  advantage_t = delta_t + gamma·lam·advantage_t'. After the last loss
    token the value is `bootstrap`, the advantage 0. Return_t is advantage_t + value_t.

    Source: https://arxiv.org/abs/1506.02438.

    Args:
        rewards: [B, T]; only those at loss tokens count, see `on_loss_tokens`.
        values: [B, T].
        loss_mask: bool [B, T]; rewards and values elsewhere have no effect.
        gamma: discount of one loss token, 0 to 1.
        lam: 0 trusts the critic for everything that follows, 1 the rewards.
        bootstrap: [B], the value of the state after a truncated trajectory, 0 for one that ended; None for 0.

    Returns:
        Advantages and returns, [B, T], without gradient, 0 where the mask is False.
    """
    check_same_shape(rewards=rewards, values=values, loss_mask=loss_mask)
    check_bounds(0, 1, gamma=gamma, lam=lam)
    rewards, values = neutralize(loss_mask, rewards.detach(), values.detach())
    advantages = torch.zeros_like(values)
    advantage = torch.zeros_like(values[:, 0])
    value = advantage if bootstrap is None else bootstrap.to(values.dtype)
    check_same_shape(**{"bootstrap": value, "values[:, 0]": advantage})
    for t in range(values.shape[1] - 1, -1, -1):
        is_step = loss_mask[:, t]
        advantage_here = rewards[:, t] + gamma * value - values[:, t] + gamma * lam * advantage
        advantages[:, t] = torch.where(is_step, advantage_here, 0.0)
        advantage = torch.where(is_step, advantage_here, advantage)
        value = torch.where(is_step, values[:, t], value)
    return advantages, torch.where(loss_mask, advantages + values, 0.0)


def on_last_loss_token(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """An outcome reward per trajectory as rewards per token: on the last loss token.

    Args:
        rewards: [B].
        loss_mask: bool [B, T]; a trajectory without loss tokens loses its reward.

    Returns:
        [B, T].
    """
    check_same_shape(rewards=rewards, loss_mask=loss_mask.any(1))
    left = loss_mask.flip(1).cumsum(1).flip(1)  # loss tokens from here on
    return torch.where(loss_mask & (left == 1), rewards[:, None], 0.0)


def on_loss_tokens(rewards: Tensor, loss_mask: Tensor) -> Tensor:
    """Rewards per token, with those between loss tokens moved to the loss token before them, which earned them.

    Rewards before the first loss token are dropped: no action earned them.

    Args:
        rewards: [B, T], such as an environment's, which may come on the tokens of its answer.
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
    """Rewards per token become (reward + bias) · scaling, then clipped; the bias is added on the last loss token.

    Args:
        bias: added to the reward of each trajectory.
        scaling: multiplies every reward.
        clip: bounds the absolute value of a token's reward; None for no bound.
    """

    bias: float = 0.0
    scaling: float = 1.0
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.scaling == 0:
            raise ValueError(
                "scaling of reward_shaping must not be 0, which makes every reward 0. 1 leaves them alone."
            )
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip of reward_shaping must be above 0 or None, got {self.clip}.")

    def __call__(self, rewards: Tensor, loss_mask: Tensor) -> Tensor:
        """The shaped rewards, [B, T].

        Args:
            rewards: [B, T].
            loss_mask: bool [B, T].
        """
        bias = torch.full_like(rewards[:, 0], self.bias)
        shaped = (rewards + on_last_loss_token(bias, loss_mask)) * self.scaling
        return shaped if self.clip is None else shaped.clamp(-self.clip, self.clip)
