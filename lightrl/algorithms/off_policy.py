"""Losses for stale trajectories: none needs an importance weight above 1, and each is GRPO's on-policy, or nearly."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lightrl.algorithms.grpo import GRPO
from lightrl.experience import Experience
from lightrl.functional import leaves_trust_region, optimal_advantages, regression_loss, tapered_weights
from lightrl.functional.reduction import LossReduction
from lightrl.models import ModelSpec, Outputs, Role


class OAPL(GRPO):
    """Regresses the log-ratio to the behavior policy on an optimal advantage, so staleness needs no correction.

    The loss is that of a trajectory, summed over its tokens; `fixed` divides it by a constant. The sum also holds the
    engine's rounding of every token: with long completions look at `policy/kl_behavior_nats` on-policy first.

    Source: https://arxiv.org/abs/2602.19362, with its two temperatures as one.

    Args:
        beta: how far a trajectory may move the policy: log-ratios of up to (reward - V) / β nats. In units of the
            reward; 0.25 for rewards of 0 and 1.
        kwargs: those of GRPO, less its clip, advantages and importance weights.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        beta: float = 0.25,
        loss_reduction: LossReduction = "fixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            policy,
            clip_low=1.0,
            clip_high=math.inf,
            dual_clip=None,
            advantage_mean="group",
            advantage_std=None,
            leave_one_out=False,
            decoupled=False,
            loss_reduction=loss_reduction,
            **kwargs,
        )
        if not 0 < beta < math.inf:
            raise ValueError(f"beta must be above 0 (0.25 for rewards of 0 and 1), got {beta}.")
        self.beta = beta

    def advantages(self, experience: Experience) -> Tensor:
        return optimal_advantages(self.shaped_rewards(experience), experience.group_ids, self.beta)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return regression_loss(
            outputs.logprobs, experience.behavior_logprobs, experience.advantages, experience.loss_mask, beta=self.beta
        )

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return torch.ones_like(ratio)  # it regresses the log-ratio, and multiplies by no ratio


class TOPR(GRPO):
    """Imitates what was better than expected; what was worse loses weight as the policy leaves it.

    Source: https://arxiv.org/abs/2503.14286, with each token's ratio instead of the trajectory's, and GRPO's baseline.
    """

    def __init__(self, policy: str | ModelSpec | Role, **kwargs: Any) -> None:
        super().__init__(
            policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, ratio_level="token", decoupled=False, **kwargs
        )

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return -self.gradient_weights(ratio, experience, outputs) * experience.advantages * outputs.logprobs

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return tapered_weights(outputs.logprobs, experience.behavior_logprobs, experience.advantages)


class DPPO(GRPO):
    """A token stops learning where the policy has left the behavior policy by a divergence, not by a ratio.

    Source: https://arxiv.org/abs/2602.04879, its binary KL.

    Args:
        max_nats: bound on the divergence of one token, over two outcomes: this token, or any other.
        kwargs: those of GRPO, less its clip.
    """

    def __init__(self, policy: str | ModelSpec | Role, *, max_nats: float = 0.05, **kwargs: Any) -> None:
        super().__init__(
            policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, ratio_level="token", decoupled=False, **kwargs
        )
        if not max_nats > 0:
            raise ValueError(f"max_nats must be above 0 (0.05 is usual), got {max_nats}.")
        self.max_nats = max_nats

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        loss = super().policy_loss(ratio, experience, outputs)
        return loss.where(self.is_clipped(ratio, experience, outputs) == 0, 0.0)

    def is_clipped(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        assert experience.advantages is not None
        return leaves_trust_region(
            outputs.logprobs, experience.behavior_logprobs, experience.advantages, max_nats=self.max_nats
        ).to(ratio.dtype)
