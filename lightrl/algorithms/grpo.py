"""GRPO: group relative policy optimization, with the settings that its relatives differ in."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.setting_names import setting_names
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import (
    clipped_ratio_loss,
    group_advantages,
    importance_weights,
    interpolated_proximal_logprobs,
    is_clipped,
    kl,
    overlong_penalty,
    policy_ratio,
    sequence_ratio,
)
from lightrl.models import ModelSpec, Outputs
from lightrl.module import RLModule

# Arguments of `importance_weights`; the settings are called importance_cap and so on.
_IMPORTANCE_BOUNDS = ("cap", "floor", "mode", "level", "metric", "aggregation")


class GRPO(RLModule):
    """A clipped policy gradient whose baseline is the mean reward of the other answers to the same prompt.

    The clip is centered on the behavior policy, as PPO writes it; with `decoupled` on the proximal policy, the one at
    the start of the update, and the loss is weighted by proximal ÷ behavior, so that stale trajectories and numerical
    differences between engine and trainer are corrected instead of clipped away. Bounded, these weights are truncated
    (TIS) or masked (MIS, IcePop) importance sampling: see docs/algorithms.md.

    Source: GRPO, https://arxiv.org/abs/2402.03300; decoupled loss, https://arxiv.org/abs/2505.24298.

    Args:
        policy: the model to train.
        clip_low, clip_high: the ratio stops earning below `1 - clip_low` and above `1 + clip_high`.
        dual_clip: bounds the loss of a token with a negative advantage by `dual_clip · |advantage|`.
        ratio_level: `token`, or `sequence` for GSPO's geometric mean over the trajectory.
        advantage_mean, advantage_std: subtracted from and divided into the rewards: of the `group`, of the `batch`, or
            None for neither.
        leave_one_out: the mean leaves the trajectory itself out.
        decoupled: see above.
        approximate_proximal: the decoupled loss guesses the proximal logprobs, on a line over weight versions between
            behavior and current policy, and saves their forward.
        importance_cap, importance_floor: bounds on the importance weights of the decoupled loss; None for no bound.
        importance_mode: beyond a bound a weight becomes 0 (`mask`) or the bound (`clamp`).
        importance_level: `token`; `sequence` for the geometric mean over the trajectory, `product` for the product.
        importance_metric: what the bounds are held against: the weight (`ratio`), or the estimate `k1`, `k2` or `k3` of
            KL(behavior ‖ proximal), in nats.
        importance_aggregation: a trajectory is judged whole, by the `mean`, `sum` or `max` of that over its tokens.
            None judges as importance_level says: each token, the mean, or the sum.
        kl_coef: weight of the KL divergence from the reference policy in the loss, per token.
        kl_estimator: k2, whose gradient is that of the KL on-policy, or k3, the usual one; k1 only where the KL comes
            off the reward, since as a loss its gradient is 0 in expectation.
        reference: the fixed policy of that KL; usually the checkpoint that training starts from. None with LoRA: the
            policy without its adapters, at no cost of memory.
        entropy_coef: weight of an entropy bonus; below 0 of a penalty on entropy.
        overlong_buffer_tokens: so many tokens before the length limit a penalty on the reward begins; 0 for none.
        overlong_penalty_factor: that penalty at the limit.
        kwargs: those of RLModule.
    """

    # Whether an algorithm takes the KL divergence off the rewards instead of adding it to the loss.
    kl_in_reward: bool = False

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        dual_clip: float | None = None,
        ratio_level: Literal["token", "sequence"] = "token",
        advantage_mean: Literal["group", "batch"] | None = "group",
        advantage_std: Literal["group", "batch"] | None = "group",
        leave_one_out: bool = False,
        decoupled: bool = False,
        approximate_proximal: bool = False,
        importance_cap: float | None = None,
        importance_floor: float | None = None,
        importance_mode: Literal["mask", "clamp"] = "mask",
        importance_level: Literal["token", "sequence", "product"] = "token",
        importance_metric: Literal["ratio", "k1", "k2", "k3"] = "ratio",
        importance_aggregation: Literal["mean", "sum", "max"] | None = None,
        kl_coef: float = 0.0,
        kl_estimator: Literal["k1", "k2", "k3"] = "k3",
        reference: str | ModelSpec | None = None,
        entropy_coef: float = 0.0,
        overlong_buffer_tokens: int = 0,
        overlong_penalty_factor: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.compares_groups = advantage_mean == "group" or advantage_std == "group"
        super().__init__(policy, **kwargs)
        if kl_coef < 0:
            raise ValueError(f"kl_coef={kl_coef}, expected 0 (no KL term) or more. Raise it.")
        if kl_coef > 0 and reference is None and self.policy_spec.lora is None:
            raise ValueError(
                f"kl_coef={kl_coef} needs a reference policy, expected reference=. Give the checkpoint that training "
                "starts from, or set kl_coef to 0."
            )
        if kl_coef > 0 and kl_estimator == "k1" and not self.kl_in_reward:
            raise ValueError(
                "kl_estimator='k1' in the loss does nothing, its gradient is 0 in expectation, expected k2 (whose "
                "gradient is that of the KL) or k3 (the usual one). Set one of them; k1 is for a KL in the reward."
            )
        if approximate_proximal and not decoupled:
            raise ValueError(
                "approximate_proximal=True is for the decoupled loss, expected decoupled=True with it. Set both, or "
                "neither."
            )
        is_bounded = decoupled and (importance_cap is not None or importance_floor is not None)
        if not is_bounded and (importance_metric != "ratio" or importance_aggregation is not None):
            raise ValueError(
                f"importance_metric={importance_metric!r} and importance_aggregation={importance_aggregation!r} say "
                "what is held against a bound, expected decoupled=True and importance_cap or importance_floor with "
                "them. Set these, or leave those out."
            )
        weighs = (importance_cap, importance_floor, importance_mode, importance_level) != (None, None, "mask", "token")
        if weighs and not decoupled:
            raise ValueError(
                f"importance_cap={importance_cap}, importance_floor={importance_floor}, importance_mode="
                f"{importance_mode!r} and importance_level={importance_level!r} are of the decoupled loss, expected "
                "decoupled=True with them. Set it, or leave them out."
            )
        if ratio_level not in ("token", "sequence"):
            raise ValueError(f"ratio_level={ratio_level!r}, expected token or sequence. Choose one of them.")
        if overlong_buffer_tokens and self.workflow is not None:
            raise ValueError(
                f"overlong_buffer_tokens={overlong_buffer_tokens} compares a trajectory with the limit of one "
                "completion, expected 0 with workflow=. Set it to 0, or put the penalty into the reward."
            )
        if self.compares_groups and self.group_size == 1:
            raise ValueError(
                "group_size=1 leaves nothing to compare a trajectory with, expected at least 2 for group statistics. "
                "Raise group_size, or set advantage_mean and advantage_std to batch or null."
            )
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip
        self.ratio_level = ratio_level
        self.advantage_mean = advantage_mean
        self.advantage_std = advantage_std
        self.leave_one_out = leave_one_out
        self.decoupled = decoupled
        self.approximate_proximal = approximate_proximal
        self.importance_cap = importance_cap
        self.importance_floor = importance_floor
        self.importance_mode = importance_mode
        self.importance_level = importance_level
        self.importance_metric = importance_metric
        self.importance_aggregation = importance_aggregation
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.reference_spec = None if reference is None else ModelSpec.of(reference)
        self.entropy_coef = entropy_coef
        self.overlong_buffer_tokens = overlong_buffer_tokens
        self.overlong_penalty_factor = overlong_penalty_factor
        self.needs_proximal_logprobs = decoupled and not approximate_proximal
        self.needs_entropy_gradient = entropy_coef != 0
        self._check_with_one_token()

    def models(self) -> dict[str, ModelSpec]:
        models = super().models()
        if self.kl_coef > 0 and self.reference_spec is not None:
            models["reference"] = self.reference_spec
        return models

    def score_calls(self) -> list[ModelCall]:
        calls = super().score_calls()
        if self.kl_coef > 0:
            role = "policy" if self.reference_spec is None else "reference"
            calls.append(
                ModelCall(
                    "reference_logprobs",
                    role,
                    "infer",
                    ("token_ids",),
                    ("reference_logprobs",),
                    adapters_off=role == "policy",
                )
            )
        return calls

    def shaped_rewards(self, experience: Experience) -> Tensor:
        """The rewards less the penalty on overlong completions, [B]."""
        if not self.overlong_buffer_tokens:
            return experience.rewards
        return experience.rewards + self._overlong_penalty(experience.loss_mask.sum(1))

    def advantages(self, experience: Experience) -> Tensor:
        return self._group_advantages(self.shaped_rewards(experience), experience.group_ids)

    def _group_advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return group_advantages(
            rewards,
            group_ids,
            mean=self.advantage_mean,
            std=self.advantage_std,
            leave_one_out=self.leave_one_out,
        )

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Any]:
        assert experience.advantages is not None
        center = self.center(experience, outputs)
        ratio = self.ratio(outputs.logprobs, center, experience.loss_mask)
        loss = self.policy_loss(ratio, experience, outputs)
        metrics = {
            "ratio": ratio.detach(),
            "clipped_fraction": self.is_clipped(ratio, experience.advantages),
        }
        if self.decoupled:
            weights = self._importance_weights(center, experience.behavior_logprobs, experience.loss_mask)
            loss = loss * weights
            metrics["importance_weights"] = weights
            metrics["importance_dropped_fraction"] = (weights == 0).float()
            metrics["kl_update_nats"] = kl(center, outputs.logprobs.detach())  # KL(proximal ‖ policy), by k3
            for estimator in ("k1", "k2", "k3"):  # KL(behavior ‖ proximal): the behavior policy sampled the tokens
                difference = kl(experience.behavior_logprobs, center, estimator=estimator)
                metrics[f"kl_proximal_{estimator}_nats"] = difference
        if self.kl_coef > 0 and not self.kl_in_reward:
            assert experience.reference_logprobs is not None
            divergence = kl(outputs.logprobs, experience.reference_logprobs, estimator=self.kl_estimator)
            loss = loss + self.kl_coef * divergence
            metrics["kl_reference_nats"] = divergence.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * outputs.entropy
        return {"loss": loss, **metrics}

    def _check_with_one_token(self) -> None:
        """Asks the equations, which refuse settings that they cannot use, before anything is loaded or rolled out."""
        one = torch.ones(1, 1)
        clipped_ratio_loss(one, one, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip)
        with setting_names(estimator="kl_estimator"):
            kl(one, one, estimator=self.kl_estimator)
        with setting_names(**{name: f"importance_{name}" for name in _IMPORTANCE_BOUNDS}):
            self._importance_weights(one, one, one.bool())
        with setting_names(mean="advantage_mean", std="advantage_std"):
            self._group_advantages(one[0], one[0])
        with setting_names(
            max_tokens="sampling.max_new_tokens",
            buffer_tokens="overlong_buffer_tokens",
            factor="overlong_penalty_factor",
        ):
            if self.overlong_buffer_tokens:
                self._overlong_penalty(one[0])

    def center(self, experience: Experience, outputs: Outputs) -> Tensor:
        """The logprobs that the clip is centered on, [B, T], without gradient."""
        if not self.decoupled:
            return experience.behavior_logprobs
        if self.approximate_proximal:
            return interpolated_proximal_logprobs(
                outputs.logprobs, experience.behavior_logprobs, experience.weight_versions, self.weight_version
            )
        assert experience.proximal_logprobs is not None
        return experience.proximal_logprobs

    @property
    def weight_version(self) -> int:
        """Of the weights at the start of the update; 0 outside a run."""
        trainer: Any = self._trainer
        return 0 if trainer is None else int(trainer.weight_version)

    def ratio(self, logprobs: Tensor, center: Tensor, loss_mask: Tensor) -> Tensor:
        """Policy ÷ center of the clip, [B, T], of each token or of the whole trajectory."""
        if self.ratio_level == "sequence":
            return sequence_ratio(logprobs, center, loss_mask)
        return policy_ratio(logprobs, center)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """1 where the clip of `policy_loss` acts, 0 elsewhere, [B, T]."""
        return is_clipped(ratio, advantages, clip_low=self.clip_low, clip_high=self.clip_high)

    def policy_loss(self, ratio: Tensor, experience: Experience, outputs: Outputs) -> Tensor:
        """The policy's part of the loss, [B, T]."""
        assert experience.advantages is not None
        return clipped_ratio_loss(
            ratio, experience.advantages, clip_low=self.clip_low, clip_high=self.clip_high, dual_clip=self.dual_clip
        )

    def _importance_weights(self, proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
        return importance_weights(
            proximal_logprobs,
            behavior_logprobs,
            loss_mask,
            cap=self.importance_cap,
            mode=self.importance_mode,
            level=self.importance_level,
            floor=self.importance_floor,
            metric=self.importance_metric,
            aggregation=self.importance_aggregation,
        )

    def _overlong_penalty(self, lengths: Tensor) -> Tensor:
        return overlong_penalty(
            lengths, self.sampling.max_new_tokens, self.overlong_buffer_tokens, self.overlong_penalty_factor
        )
