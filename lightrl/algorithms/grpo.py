"""GRPO: group relative policy optimization, with a setting for everything that its relatives change."""

from __future__ import annotations

import functools
from typing import Literal, TypedDict

import torch
from torch import Tensor

from lightrl.algorithms.reference import ReferenceKL
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_choice, check_kind
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import (
    ImportanceWeights,
    RewardShaping,
    check_centering,
    clipped_ratio_loss,
    clipped_weights,
    defines_together,
    group_advantages,
    interpolated_proximal_logprobs,
    is_clipped,
    kl,
    policy_ratio,
    rest_of,
    score_correction,
    sequence_ratio,
)
from lightrl.functional.reduction import LossReduction
from lightrl.models import ModelSpec, Outputs, Role
from lightrl.module import ESS_WEIGHTS, RLModule, RLModuleSettings, SharedSettings
from lightrl.rewards.length_penalty import OverlongPenalty


class FamilySettings(SharedSettings, total=False):
    """GRPO's arguments that all algorithms accept, for type checkers; the classes below list those that some fix."""

    entropy_coef: float
    overlong_penalty: OverlongPenalty | None
    reward_shaping: RewardShaping | None
    score_centering: bool


class RelativeSettings(FamilySettings, total=False):
    reference: ReferenceKL | None


class GroupSettings(TypedDict, total=False):
    group_size: int


class ReductionSettings(TypedDict, total=False):
    loss_reduction: LossReduction


class ClipSettings(TypedDict, total=False):
    clip_low: float
    clip_high: float
    dual_clip: float | None


class RatioSettings(TypedDict, total=False):
    ratio_level: Literal["token", "sequence"]


class StatisticsSettings(TypedDict, total=False):
    advantage_mean: Literal["group", "batch"] | None
    advantage_std: Literal["group", "batch"] | None
    leave_one_out: bool


class WeightsSettings(TypedDict, total=False):
    decoupled: bool | ImportanceWeights


class AllButBaseline(RelativeSettings, ReductionSettings, ClipSettings, RatioSettings, WeightsSettings, total=False):
    """Arguments for algorithms that set the baseline and `group_size` themselves."""


class GRPO(RLModule):
    """A clipped policy gradient whose baseline is the mean reward of the prompt's completions.

    The clip is centered on the behavior policy, as in PPO. With `decoupled` it is centered on the proximal policy, the
    policy at the start of the update, and the loss is weighted by proximal ÷ behavior. These weights correct for stale
    trajectories and for numerical differences between engine and trainer, which the plain clip would cut off. With
    bounded weights, this is truncated (TIS) or masked (MIS, IcePop) importance sampling; see docs/algorithms.md.

    Source: GRPO, https://arxiv.org/abs/2402.03300; decoupled loss, https://arxiv.org/abs/2505.24298.

    Args:
        policy: the model to train.
        clip_low, clip_high: the loss stops falling once the ratio is below `1 - clip_low` or above `1 + clip_high`.
        dual_clip: bounds the loss of a token with a negative advantage by `dual_clip · |advantage|`.
        ratio_level: `token`, or `sequence` for GSPO's geometric mean over the trajectory.
        advantage_mean: subtract the mean reward of the `group` or the `batch`; None subtracts nothing.
        advantage_std: divide by the rewards' standard deviation over the `group` or the `batch`; None does not divide.
        leave_one_out: exclude the trajectory itself from its mean.
        decoupled: True for the decoupled loss described above, or ImportanceWeights to bound the weights.
        reference: a KL term in the loss.
        entropy_coef: weight of an entropy bonus; a negative weight penalizes entropy.
        overlong_penalty: a penalty added to the reward of completions near the length limit.
        reward_shaping: bias, scaling and clip for the rewards; None leaves them unchanged.
        score_centering: correct the mean of the score for differences between the engine's and the trainer's
            probabilities, on the `sampling.topk_logprobs` most likely tokens (functional/centering.py). In later
            updates in an iteration, bounded importance weights of these tokens use the policy, not the proximal policy.
        kwargs: other arguments to RLModule.
    """

    fixed_settings = RLModule.fixed_settings | {"reference_kl"}
    # Whether the KL term is subtracted from the rewards instead of added to the loss.
    kl_in_reward: bool = False

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        ratio_level: Literal["token", "sequence"] = "token",
        advantage_mean: Literal["group", "batch"] | None = "group",
        advantage_std: Literal["group", "batch"] | None = "group",
        leave_one_out: bool = False,
        decoupled: bool | ImportanceWeights = False,
        reference: ReferenceKL | None = None,
        entropy_coef: float = 0.0,
        overlong_penalty: OverlongPenalty | None = None,
        reward_shaping: RewardShaping | None = None,
        score_centering: bool = False,
        **kwargs: Unpack[RLModuleSettings],
    ) -> None:
        check_choice(("token", "sequence"), ratio_level=ratio_level)
        check_choice(("group", "batch", None), advantage_mean=advantage_mean, advantage_std=advantage_std)
        self.compares_groups = "group" in (advantage_mean, advantage_std)
        super().__init__(policy, **kwargs)
        if self.compares_groups and self.group_size == 1:
            raise ValueError(
                "group_size must be at least 2 for group statistics, got 1. Increase it, or set advantage_mean and "
                "advantage_std to batch or null."
            )
        check_kind(ReferenceKL, reference=reference)
        if reference is not None:
            reference.check(self.policy_role, in_reward=self.kl_in_reward)
        if overlong_penalty is not None and self.workflow is not None:
            raise ValueError(
                "overlong_penalty compares a trajectory with the length limit of one completion, so it does not work "
                "with a workflow. Add the penalty in the reward function."
            )
        self.clip_low, self.clip_high, self.dual_clip = clip_low, clip_high, dual_clip
        self.ratio_level = ratio_level
        self.advantage_mean, self.advantage_std, self.leave_one_out = advantage_mean, advantage_std, leave_one_out
        weights = self.importance_weights = ImportanceWeights() if decoupled is True else decoupled or None
        self.reference_kl = reference
        self.kl_coef = 0.0 if reference is None else reference.coef  # PPO may adapt it
        self.entropy_coef = entropy_coef
        self.overlong_penalty = overlong_penalty
        self.reward_shaping = reward_shaping
        self.score_centering = score_centering
        weighs_tokens = ratio_level == "token" and defines_together(type(self), "token_weights", "policy_loss")
        check_centering(score_centering, self.sampling.topk_logprobs, weights, weighs_tokens, type(self).__name__)
        self.needs_proximal_logprobs = weights is not None and not weights.approximate_proximal
        self.needs_entropy_gradient = entropy_coef != 0
        # Evaluate the equations on one token to reject invalid settings before anything is loaded.
        one = torch.ones(1, 1)
        clipped_ratio_loss(one, one, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        self.group_advantages_of(one[0], one[0])
        if overlong_penalty is not None:
            overlong_penalty(0, self.sampling.max_new_tokens)

    def models(self) -> dict[str, Role]:
        role = None if self.reference_kl is None else self.reference_kl.role(self.policy_role)
        return super().models() | ({} if role is None else {"reference": role})

    def model_calls(self) -> list[ModelCall]:
        kl_term, policy = self.reference_kl, self.policy_role
        return [*super().model_calls(), *([] if kl_term is None else [kl_term.score_call(policy)])]

    def shaped_rewards(self, experience: Experience) -> Tensor:
        """Returns the rewards, [B], after the overlong penalty and then `reward_shaping`."""
        rewards = self.penalized_rewards(experience)[:, None]
        shaping = self.reward_shaping
        return (rewards if shaping is None else shaping(rewards, torch.ones_like(rewards, dtype=torch.bool)))[:, 0]

    def penalized_rewards(self, experience: Experience) -> Tensor:
        """Returns the rewards, [B], after the overlong penalty."""
        if self.overlong_penalty is None:
            return experience.rewards
        return experience.rewards + self.overlong_penalty(experience.loss_token_counts, self.sampling.max_new_tokens)

    def advantages(self, experience: Experience) -> Tensor:
        return self.group_advantages_of(self.shaped_rewards(experience), experience.group_ids)

    def group_advantages_of(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """Returns the advantages of rewards in groups, [N] each, with the module's baseline."""
        mean, std = self.advantage_mean, self.advantage_std
        return group_advantages(rewards, group_ids, mean=mean, std=std, leave_one_out=self.leave_one_out)

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        center = self.center(experience, outputs)
        ratio = self.ratio(outputs.logprobs, center, experience.loss_mask)
        loss = self.policy_loss(ratio, experience, outputs)
        gradient_weights = self.gradient_weights(ratio, experience, outputs)
        metrics = {"ratio": ratio.detach(), "clipped_fraction": self.is_clipped(ratio, experience, outputs)}
        if self.importance_weights is not None:
            weights = self.importance_weights(center, experience.behavior_logprobs, experience.loss_mask)
            loss, gradient_weights = loss * weights, gradient_weights * weights
            metrics["importance_weights"] = weights
            metrics["importance_dropped_fraction"] = (weights == 0).float()
            metrics["kl_update_nats"] = kl(center, outputs.logprobs.detach())  # KL(proximal ‖ policy), by k3
            for estimator in ("k1", "k2", "k3"):  # KL(behavior ‖ proximal): the behavior policy sampled the tokens
                metrics[f"kl_proximal_{estimator}_nats"] = kl(experience.behavior_logprobs, center, estimator)
        if self.score_centering:
            advantages, behavior = experience["advantages"], experience["behavior_topk_logprobs"]
            assert outputs.teacher_topk is not None
            weigh = functools.partial(self.token_weights, advantages=advantages)
            loss = loss + advantages * score_correction(outputs.teacher_topk, behavior, weigh)
            metrics["behavior_rest_fraction"] = rest_of(behavior)
        if self.reference_kl is not None and not self.kl_in_reward:
            divergence = self.reference_kl.per_token(outputs.logprobs, experience.reference_logprobs)
            loss = loss + self.kl_coef * divergence
            metrics["kl_reference_nats"] = divergence.detach()
        if self.entropy_coef:
            if not self.needs_entropy_gradient:
                raise ValueError("Set entropy_coef in the constructor: if it was 0 there, the entropy has no gradient.")
            loss = loss - self.entropy_coef * outputs.entropy
        return {"loss": loss, ESS_WEIGHTS: gradient_weights, **metrics}

    def center(self, experience: Experience, outputs: Outputs) -> Tensor:
        """Returns the logprobs that the clip is centered on, [B, T], without gradient."""
        if self.importance_weights is None:
            return experience.behavior_logprobs
        if self.importance_weights.approximate_proximal:
            return interpolated_proximal_logprobs(
                outputs.logprobs, experience.behavior_logprobs, experience.weight_versions, self.weight_version
            )
        return experience["proximal_logprobs"]

    def ratio(self, logprobs: Tensor, center: Tensor, loss_mask: Tensor) -> Tensor:
        """Returns the ratio of the policy to the clip's center, [B, T], per token or for the whole trajectory."""
        if self.ratio_level == "sequence":
            return sequence_ratio(logprobs, center, loss_mask)
        return policy_ratio(logprobs, center)

    def gradient_weights(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        """Returns the factor that `policy_loss` puts on each token's policy gradient, [B, T], detached."""
        return ratio.detach() * (1 - self.is_clipped(ratio, experience, outputs))

    def token_weights(self, log_ratio: Tensor, advantages: Tensor) -> Tensor:
        """Returns the factor on the policy gradient of tokens with these log-ratios to the behavior policy, [B, T, K].

        `score_centering` needs it; a class that overrides `policy_loss` must also override it.
        """
        if self.importance_weights is not None:
            every_token = torch.ones_like(log_ratio, dtype=torch.bool)
            return self.importance_weights(log_ratio, torch.zeros_like(log_ratio), every_token)
        return clipped_weights(log_ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def is_clipped(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        """Returns 1 where the clip of `policy_loss` takes effect, 0 elsewhere, [B, T]."""
        low, high, dual = self.clip_low, self.clip_high, self.dual_clip
        return is_clipped(ratio, experience["advantages"], clip_low=low, clip_high=high, dual_clip=dual)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        """Returns the policy-gradient part of the loss, [B, T]."""
        return clipped_ratio_loss(
            ratio, experience["advantages"], clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )
