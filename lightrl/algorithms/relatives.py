"""GRPO's relatives: each fixes a few of GRPO's settings or replaces its loss, and is named as in its paper.

The last three are for stale trajectories: none of them uses importance weights above 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import (
    GRPO,
    AllButBaseline,
    ClipSettings,
    GroupSettings,
    RatioSettings,
    ReductionSettings,
    RelativeSettings,
    StatisticsSettings,
    WeightsSettings,
)
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_effect
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import (
    batch_normalized,
    cispo_loss,
    group_advantages,
    leaves_trust_region,
    optimal_advantages,
    regression_loss,
    sapo_loss,
    second_moment_mask,
    tapered_weights,
)
from lightrl.functional.reduction import LossReduction
from lightrl.models import ModelSpec, Outputs, Role
from lightrl.rollout import GroupFilter, RolloutSettings
from lightrl.trajectory import Group, Trajectory

# For type checkers: the arguments that constructors pass on to GRPO, except those that they fix or give a new default.


class AllButStatistics(RelativeSettings, GroupSettings, ClipSettings, RatioSettings, WeightsSettings, total=False): ...


class AllButClip(RelativeSettings, GroupSettings, RatioSettings, StatisticsSettings, WeightsSettings, total=False): ...


class AllButRatio(RelativeSettings, GroupSettings, StatisticsSettings, WeightsSettings, total=False): ...


class AllButClipAndRatio(AllButRatio, ReductionSettings, total=False): ...


class AllButMask(AllButClip, ReductionSettings, total=False): ...


class AllButRewards(AllButStatistics, ReductionSettings, total=False): ...


class AllButRegression(RelativeSettings, GroupSettings, RatioSettings, total=False): ...


class AllButImportance(RelativeSettings, GroupSettings, ReductionSettings, StatisticsSettings, total=False): ...


class DrGRPO(GRPO):
    """GRPO without its two biases: it divides neither by the group's standard deviation nor by a trajectory's length.

    Source: https://arxiv.org/abs/2503.20783.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        advantage_mean: Literal["group", "batch"] | None = "group",
        leave_one_out: bool = False,
        loss_reduction: LossReduction = "fixed",
        **kwargs: Unpack[AllButStatistics],
    ) -> None:
        super().__init__(
            policy,
            advantage_mean=advantage_mean,
            advantage_std=None,
            leave_one_out=leave_one_out,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class DAPO(GRPO):
    """GRPO with clip-higher and a loss averaged over tokens. `overlong_penalty` is the paper's soft punishment.

    The `DynamicSampling()` callback adds the paper's dynamic sampling, which drops groups whose rewards are all equal.

    Source: https://arxiv.org/abs/2503.14476.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.28,
        dual_clip: float | None = None,
        loss_reduction: LossReduction = "token",
        **kwargs: Unpack[AllButClip],
    ) -> None:
        super().__init__(
            policy,
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class RLOO(GRPO):
    """REINFORCE with the mean reward of the group's other trajectories as its baseline.

    The loss of a trajectory is the sum over its tokens, since the whole completion is one action; `fixed` divides it by
    a constant. The ratio of each token is clipped, which makes no difference on-policy.

    Source: https://arxiv.org/abs/2402.14740.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        loss_reduction: LossReduction = "fixed",
        **kwargs: Unpack[AllButStatistics],
    ) -> None:
        super().__init__(
            policy,
            leave_one_out=True,
            advantage_mean="group",
            advantage_std=None,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class ReinforceBaseline(GRPO):
    """REINFORCE with the batch's mean reward as its baseline; one trajectory per prompt is enough.

    Source: Williams, 1992, https://doi.org/10.1007/BF00992696.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        leave_one_out: bool = False,
        group_size: int = 1,
        **kwargs: Unpack[AllButBaseline],
    ) -> None:
        super().__init__(
            policy,
            advantage_mean="batch",
            advantage_std=None,
            leave_one_out=leave_one_out,
            group_size=group_size,
            **kwargs,
        )


class GSPO(GRPO):
    """GRPO with one ratio and one clip per trajectory instead of per token.

    Source: https://arxiv.org/abs/2507.18071, including the clip bounds.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        clip_low: float = 3e-4,
        clip_high: float = 4e-4,
        dual_clip: float | None = None,
        loss_reduction: LossReduction = "sequence",
        **kwargs: Unpack[AllButRatio],
    ) -> None:
        super().__init__(
            policy,
            ratio_level="sequence",
            clip_low=clip_low,
            clip_high=clip_high,
            dual_clip=dual_clip,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class CISPO(GRPO):
    """Weights the policy gradient by the clipped ratio, so that clipped tokens still have a gradient.

    Source: https://arxiv.org/abs/2506.13585. The paper tunes `clip_high` and reports no value.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        clip_low: float = 1.0,
        clip_high: float = 4.0,
        **kwargs: Unpack[AllButClipAndRatio],
    ) -> None:
        super().__init__(policy, clip_low=clip_low, clip_high=clip_high, dual_clip=None, ratio_level="token", **kwargs)

    def is_clipped(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        """Returns 1 where the weight is clipped, whatever the advantage's sign; the token still has a gradient."""
        return ((ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)).to(ratio.dtype)

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return ratio.detach().clamp(1 - self.clip_low, 1 + self.clip_high)

    def token_weights(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        if self.importance_weights is not None:
            return super().token_weights(log_ratio, advantages)
        return log_ratio.exp().clamp(1 - self.clip_low, 1 + self.clip_high)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        center, advantages = self.center(experience, outputs), experience["advantages"]
        return cispo_loss(outputs.logprobs, center, advantages, clip_low=self.clip_low, clip_high=self.clip_high)


class SAPO(GRPO):
    """GRPO with a smooth gate instead of the clip: off-policy gradients decay, faster if the advantage is negative.

    Source: https://arxiv.org/abs/2511.20347, including the temperatures.

    Args:
        temperature_positive, temperature_negative: the gate's temperatures for advantages above 0 and for all others.
        kwargs: arguments to GRPO, except its clip.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        temperature_positive: float = 1.0,
        temperature_negative: float = 1.05,
        loss_reduction: LossReduction = "sequence",
        **kwargs: Unpack[AllButClip],
    ) -> None:
        super().__init__(
            policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, loss_reduction=loss_reduction, **kwargs
        )
        self.temperatures = {"temperature_positive": temperature_positive, "temperature_negative": temperature_negative}
        sapo_loss(torch.ones(1), torch.ones(1), **self.temperatures)  # rejects invalid settings before a model loads

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return sapo_loss(ratio, experience["advantages"], **self.temperatures)

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        ratio, (positive, negative) = ratio.detach(), self.temperatures.values()
        temperature = torch.where(experience["advantages"] > 0, positive, negative)
        gate = torch.sigmoid(temperature * (ratio - 1))
        return 4 * ratio * gate * (1 - gate)  # ratio · the slope of the loss


class LitePPO(GRPO):
    """GRPO with the standard deviation of the batch instead of the group, and a loss averaged over tokens.

    The standard deviation is measured from the mean of all rewards in the batch; AReaL uses the group means.

    Source: https://arxiv.org/abs/2508.08221.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        leave_one_out: bool = False,
        loss_reduction: LossReduction = "token",
        **kwargs: Unpack[AllButStatistics],
    ) -> None:
        super().__init__(
            policy,
            advantage_mean="group",
            advantage_std="batch",
            leave_one_out=leave_one_out,
            loss_reduction=loss_reduction,
            **kwargs,
        )


class ReinforcePlusPlus(GRPO):
    """REINFORCE++: a token's advantage is its return, normalized over the batch. Needs neither groups nor a critic.

    With `reference`, the KL of each token (behavior ‖ reference) is subtracted from its reward, as in PPO.

    Source: https://arxiv.org/abs/2501.03262.

    Args:
        advantage_mean: `group` first subtracts the group's mean reward; this is the paper's variant with a baseline.
        group_size: completions per prompt; 1 is enough without that baseline.
        kwargs: arguments to GRPO, except `advantage_std` and `leave_one_out`.
    """

    kl_in_reward = True

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        advantage_mean: Literal["group", "batch"] = "batch",
        group_size: int = 1,
        **kwargs: Unpack[AllButBaseline],
    ) -> None:
        super().__init__(
            policy,
            advantage_mean=advantage_mean,
            advantage_std="batch",
            leave_one_out=False,
            group_size=group_size,
            **kwargs,
        )

    def advantages(self, experience: Experience) -> Tensor:
        local = experience.local
        mask = local.loss_mask
        mean: Literal["group"] | None = "group" if self.advantage_mean == "group" else None
        rewards = group_advantages(self.shaped_rewards(experience), experience.group_ids, mean=mean, std=None)
        returns = rewards[experience.local_rows, None].expand(mask.shape)
        if self.reference_kl is not None:
            penalty = self.reference_kl.per_token(local.behavior_logprobs, local.reference_logprobs, in_reward=True)
            future_penalty = torch.where(mask, penalty, 0.0).flip(1).cumsum(1).flip(1)
            returns = returns - self.kl_coef * future_penalty
        return batch_normalized(returns, mask, total=experience.total)


class GDPO(GRPO):
    """GRPO with several rewards, each normalized separately, so that one with a large deviation does not dominate.

    Each reward is normalized within its group. The weighted sums are then normalized over the batch. Two trajectories
    in a group get equal advantages only if all their rewards are equal; equal sums of rewards are not enough.

    Source: https://arxiv.org/abs/2601.05242, equations 4 to 7.

    Args:
        reward_weights: name → weight of each reward to train on: a RewardPart, or a number that the reward function
            returns. A trajectory without one of them counts as failed, and is dropped. The reward is only logged.
        kwargs: arguments to GRPO, except its statistics and settings that change the reward.
    """

    def __init__(
        self, policy: str | ModelSpec | Role, *, reward_weights: dict[str, float], **kwargs: Unpack[AllButRewards]
    ) -> None:
        if not reward_weights or not all(0 < abs(weight) < math.inf for weight in reward_weights.values()):
            raise ValueError(
                f"reward_weights must give at least one reward a finite weight other than 0, got {reward_weights}."
            )
        for name in ("overlong_penalty", "reward_shaping", "reward_model"):
            check_effect("with GDPO, which trains on the rewards in reward_weights", **{name: (kwargs.get(name), None)})
        super().__init__(policy, advantage_mean="group", advantage_std="group", leave_one_out=False, **kwargs)
        self.reward_weights = reward_weights
        self._keys = tuple(f"reward_part_{name}" for name in reward_weights)

    def configure_rollout(self, settings: RolloutSettings) -> RolloutSettings:
        """Requires all rewards of each trajectory, and makes DynamicSampling compare them instead of their sum."""
        names, group_filter = tuple(self.reward_weights), settings.group_filter
        if isinstance(group_filter, GroupFilter) and group_filter.drop_zero_variance:
            rule = group_filter.rule

            def drops(group: Group) -> object:
                rewards = {tuple(item.metrics[name] for name in names) for item in group.trajectories}
                return "zero_variance" if len(rewards) == 1 else rule is not None and rule(group)

            group_filter = replace(group_filter, drop_zero_variance=False, rule=drops)
        return replace(settings, reward_metrics=names, group_filter=group_filter)

    def model_calls(self) -> list[ModelCall]:
        parts = ModelCall("reward_parts", inputs=("rewards",), outputs=self._keys, run=self._reward_parts)
        return [*super().model_calls(), parts]

    def _reward_parts(self, experience: Experience, trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
        for name in self.reward_weights:
            lacking = next((item for item in trajectories if name not in item.metrics), None)
            if lacking is not None:
                raise ValueError(
                    f"A trajectory's reward for prompt {lacking.prompt.id!r} has no {name!r}, which reward_weights "
                    f"names; it has {sorted(lacking.metrics)}. Return it for every trajectory, or rename the weight."
                )
        return {
            key: torch.tensor([item.metrics[name] for item in trajectories], dtype=torch.float32)
            for key, name in zip(self._keys, self.reward_weights, strict=True)
        }

    def advantages(self, experience: Experience) -> Tensor:
        ids = experience.group_ids
        parts = (weight * group_advantages(experience[key], ids)
                 for key, weight in zip(self._keys, self.reward_weights.values(), strict=True))  # fmt: skip
        return group_advantages(torch.stack(list(parts)).sum(0), ids, mean="batch", std="batch")


class M2PO(GRPO):
    """Masks the tokens with the largest squared log-ratios, instead of clipping, to bound the mean of the others.

    M2PO is for very stale trajectories, where a clip removes the gradient of many informative tokens. The mask compares
    the proximal policy with the behavior policy, once per iteration, which costs a forward pass. Masked tokens still
    count in the denominator of the loss.

    Source: https://arxiv.org/abs/2510.01161, including the threshold.

    Args:
        second_moment_threshold: bound on the mean of log_ratio², in nats².
        kwargs: arguments to GRPO, except its clip.
    """

    advantage_inputs = ("proximal_logprobs", "behavior_logprobs", "loss_mask")  # the mask sorts all tokens

    def __init__(
        self, policy: str | ModelSpec | Role, *, second_moment_threshold: float = 0.04, **kwargs: Unpack[AllButMask]
    ) -> None:
        super().__init__(policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, **kwargs)
        if self.importance_weights is not None and self.importance_weights.approximate_proximal:
            raise ValueError("M2PO's mask needs exact proximal logprobs. Remove decoupled.approximate_proximal.")
        check_effect("with M2PO's mask, which compares tokens", score_centering=(self.score_centering, False))
        if not second_moment_threshold > 0:
            raise ValueError(
                f"second_moment_threshold must be above 0 (0.04 in the paper), got {second_moment_threshold}."
            )
        self.second_moment_threshold = second_moment_threshold
        self.needs_proximal_logprobs = True

    def model_calls(self) -> list[ModelCall]:
        calls = super().model_calls()
        if not any("proximal_logprobs" in call.outputs for call in calls):  # needed even with a single update
            calls.insert(0, ModelCall("proximal_logprobs", "policy", "infer", ("token_ids",), ("proximal_logprobs",)))
        return calls

    def advantages(self, experience: Experience) -> Tensor:
        logprobs = experience["proximal_logprobs"], experience.behavior_logprobs
        is_inside = second_moment_mask(*logprobs, experience.loss_mask, threshold=self.second_moment_threshold)
        return torch.where(is_inside, super().advantages(experience)[:, None], 0.0)

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return super().gradient_weights(ratio, experience, outputs) * (experience["advantages"] != 0)


class OAPL(GRPO):
    """Regresses the log-ratio (policy ÷ behavior policy) on an optimal advantage, so stale data needs no correction.

    A trajectory's loss is the sum over its tokens, divided by a constant (`fixed`). The sum also accumulates the
    engine's rounding errors: before using long completions, check `policy/kl_behavior_nats` on-policy.

    Source: https://arxiv.org/abs/2602.19362, with one temperature instead of two.

    Args:
        beta: β, in units of the reward: a trajectory may move the policy to a log-ratio of (reward - V) / β nats. The
            default is for rewards of 0 and 1.
        kwargs: arguments to GRPO, except its clip, advantages and importance weights.
    """

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        beta: float = 0.25,
        loss_reduction: LossReduction = "fixed",
        **kwargs: Unpack[AllButRegression],
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
        self.beta = beta
        optimal_advantages(torch.ones(1), torch.ones(1), beta)  # rejects an invalid setting before anything is loaded

    def advantages(self, experience: Experience) -> Tensor:
        return optimal_advantages(self.shaped_rewards(experience), experience.group_ids, self.beta)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return regression_loss(
            outputs.logprobs,
            experience.behavior_logprobs,
            experience["advantages"],
            experience.loss_mask,
            beta=self.beta,
        )

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return torch.ones_like(ratio)  # the regression does not multiply by a ratio


class TOPR(GRPO):
    """Imitates trajectories that were better than expected; the weight of a worse one falls with its likelihood.

    Source: https://arxiv.org/abs/2503.14286, with each token's ratio instead of the trajectory's, and GRPO's baseline.
    """

    def __init__(self, policy: str | ModelSpec | Role, **kwargs: Unpack[AllButImportance]) -> None:
        super().__init__(
            policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, ratio_level="token", decoupled=False, **kwargs
        )

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return -self.gradient_weights(ratio, experience, outputs) * experience["advantages"] * outputs.logprobs

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return tapered_weights(outputs.logprobs, experience.behavior_logprobs, experience["advantages"])

    def token_weights(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        return tapered_weights(log_ratio, torch.zeros_like(log_ratio), advantages[..., None].expand_as(log_ratio))


class DPPO(GRPO):
    """Removes a token's gradient once its divergence from the behavior policy (not its ratio) exceeds a bound.

    Source: https://arxiv.org/abs/2602.04879, with its binary KL.

    Args:
        max_nats: bound on the divergence over two outcomes, the sampled token or any other.
        kwargs: arguments to GRPO, except its clip.
    """

    def __init__(
        self, policy: str | ModelSpec | Role, *, max_nats: float = 0.05, **kwargs: Unpack[AllButImportance]
    ) -> None:
        super().__init__(
            policy, clip_low=1.0, clip_high=math.inf, dual_clip=None, ratio_level="token", decoupled=False, **kwargs
        )
        self.max_nats = max_nats
        one = torch.ones(1)
        leaves_trust_region(one, one, one, max_nats=max_nats)  # rejects an invalid setting before anything is loaded

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        loss = super().policy_loss(ratio, experience, outputs)
        return loss.where(self.is_clipped(ratio, experience, outputs) == 0, 0.0)

    def is_clipped(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        return leaves_trust_region(
            outputs.logprobs, experience.behavior_logprobs, experience["advantages"], max_nats=self.max_nats
        ).to(ratio.dtype)
