"""PPO: proximal policy optimization with a critic. The loss is GRPO's clipped loss with per-token advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import (
    GRPO,
    ClipSettings,
    FamilySettings,
    RatioSettings,
    ReductionSettings,
    WeightsSettings,
)
from lightrl.algorithms.reference import AdaptiveKL
from lightrl.checks.annotations import Unpack
from lightrl.checks.bounds import check_bounds, check_effect
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import (
    ValueNormalizer,
    batch_normalized,
    explained_variance,
    gae,
    masked_mean,
    on_last_loss_token,
    on_loss_tokens,
    value_loss,
)
from lightrl.models import ModelSpec, Role
from lightrl.models.model_folder import ModelDescription
from lightrl.models.precision import keep_float32

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class EarlyStop:
    """Skips an iteration's remaining updates once the policy has moved too far.

    The distance is measured from the center of the clip. With `decoupled` the center is the policy at the start of the
    iteration, so stale tokens cannot trigger a stop; otherwise it is the behavior policy.

    Args:
        kl_nats: bound on the KL (k3) from the center; None for no bound.
        ratio: bound on the mean ratio to the center, and on its inverse; None for no bound.
    """

    kl_nats: float | None = None
    ratio: float | None = None

    def __post_init__(self) -> None:
        if self.kl_nats is not None and not self.kl_nats > 0:
            raise ValueError(f"kl_nats of early_stop must be above 0 or None, got {self.kl_nats}.")
        if self.ratio is not None and not self.ratio > 1:
            raise ValueError(f"ratio of early_stop must be above 1 or None, got {self.ratio}.")

    def __call__(self, metrics: Mapping[str, float]) -> bool:
        """Whether to stop, given the metrics of the last update."""
        kl_nats = metrics.get("kl_update_nats", metrics.get("kl_behavior_nats", 0.0))
        if self.kl_nats is not None and kl_nats > self.kl_nats:
            return True
        return self.ratio is not None and not 1 / self.ratio <= metrics.get("ratio", 1.0) <= self.ratio


torch.serialization.add_safe_globals([EarlyStop])  # a checkpoint's hyperparameters may contain it


class AllButCritic(FamilySettings, ReductionSettings, ClipSettings, RatioSettings, WeightsSettings, total=False): ...


class PPO(GRPO):
    """A clipped policy gradient with a critic as its baseline: a network that predicts the future reward at each token.

    One completion per prompt is enough. Policy and critic are updated in the same optimizer step, each in a separate
    parameter group. GRPO's `decoupled` and `dual_clip` settings select the variants with those names.

    Source: https://arxiv.org/abs/1707.06347; for language models, https://arxiv.org/abs/1909.08593.

    Args:
        policy: the model to train.
        critic: the checkpoint that the critic starts from, a language or reward model; None uses the policy's. `shared`
            makes the critic a head on the policy's body: one backward pass, no second model. The head's weights start
            at 0 and are saved only in checkpoints.
        gamma: discount per loss token.
        lam: λ of generalized advantage estimation; 0 relies on the critic's values, 1 on the rewards.
        bootstrap_truncated: use the critic's value as the estimate of rewards after a truncated end. Set False if the
            reward already accounts for truncation, for example by treating a completion at the length limit as wrong.
        value_clip: bound on how much a value changes in an iteration, in the critic's units; None for no bound.
        huber_delta: error above which the critic's loss grows linearly; None squares every error.
        value_normalization: the critic predicts (return - mean) / deviation, with `running` statistics of all returns
            so far or `exponential` statistics of recent returns; with None it predicts the returns.
        value_decay: decay of the `exponential` statistics per iteration.
        value_coef: weight of the critic's loss if it shares the policy's body.
        critic_warmup_iterations: how many iterations first train only the critic (if shared, only its head).
        whiten_advantages: normalize the advantages over all loss tokens of the iteration.
        reference: a KL term, in the reward or in the loss.
        early_stop: skip updates once the policy has moved too far.
        kwargs: arguments to GRPO, except its group statistics.
    """

    advantage_keys = ("advantages", "returns")

    policy: PreTrainedModel
    reference: PreTrainedModel

    def __init__(
        self,
        policy: str | ModelSpec | Role,
        *,
        critic: str | ModelSpec | Role | None = None,
        gamma: float = 1.0,
        lam: float = 0.95,
        bootstrap_truncated: bool = True,
        value_clip: float | None = 0.2,
        huber_delta: float | None = None,
        value_normalization: Literal["exponential", "running"] | None = None,
        value_decay: float = 0.99,
        value_coef: float = 0.1,
        critic_warmup_iterations: int = 0,
        whiten_advantages: bool = True,
        reference: AdaptiveKL | None = None,
        early_stop: EarlyStop | None = None,
        group_size: int = 1,
        **kwargs: Unpack[AllButCritic],
    ) -> None:
        self.kl_in_reward = reference is None or reference.in_reward
        super().__init__(
            policy,
            advantage_mean=None,
            advantage_std=None,
            leave_one_out=False,
            reference=reference,
            group_size=group_size,
            **kwargs,
        )
        check_bounds(0, value_coef=value_coef, critic_warmup_iterations=critic_warmup_iterations)
        if critic != "shared":
            check_effect("unless critic is 'shared'", value_coef=(value_coef, 0.1))
        if value_normalization != "exponential":
            check_effect("unless value_normalization is 'exponential'", value_decay=(value_decay, 0.99))
        self.reference_kl: AdaptiveKL | None = reference
        self.kl_controller = None if reference is None else reference.controller()
        self.shares_body = critic == "shared"
        initial = self.policy_role if critic is None or critic == "shared" else Role.of(critic)
        self.critic_role = initial.with_scalar_head()
        self.gamma = gamma
        self.lam = lam
        self.bootstrap_truncated = bootstrap_truncated
        self.value_clip = value_clip
        self.huber_delta = huber_delta
        self.normalizer = ValueNormalizer(value_normalization, value_decay) if value_normalization else None
        self.value_coef = value_coef
        self.critic_warmup_iterations = critic_warmup_iterations
        self.whiten_advantages = whiten_advantages
        self.early_stop = early_stop
        # Evaluate the equations on one token to reject invalid settings before anything is loaded.
        one = torch.ones(1, 1)
        gae(one, one, one.bool(), gamma, lam)
        value_loss(one, one, one, value_clip=value_clip, huber_delta=huber_delta)

    def models(self) -> dict[str, Role]:
        return super().models() | ({} if self.shares_body else {"critic": self.critic_role})

    def configure_model(self) -> None:
        super().configure_model()
        if self._moving_kl is not None:
            self._moving_kl.check_models(self.reference, self.policy)
            keep_float32(self.reference)
        if self.shares_body and self.value_head is None:
            weight = self.policy.get_output_embeddings().weight
            device = "cpu" if weight.is_meta else weight.device  # no checkpoint fills in a meta head
            # No bias, as in Hugging Face's scalar heads, so that head and body can be exported in that format.
            self.value_head = torch.nn.Linear(weight.shape[1], 1, bias=False, device=device)
            torch.nn.init.zeros_(self.value_head.weight)
            keep_float32(self.value_head)

    def model_calls(self) -> list[ModelCall]:
        role = "policy" if self.shares_body else "critic"
        outputs = ("values", "bootstrap_values") if self.bootstrap_truncated else ("values",)
        return [*super().model_calls(), ModelCall("values", role, "infer", ("token_ids",), outputs)]

    def train_calls(self) -> list[ModelCall]:
        calls = super().train_calls()
        if not self.shares_body:
            return calls[1:] if self.is_warming_up else calls
        inputs = (*calls[0].inputs, "values", *self.advantage_keys[1:])
        return [dataclasses.replace(calls[0], inputs=inputs)]

    def resting_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Returns the policy's parameters while only the critic's head trains; otherwise no parameters."""
        return self.policy.parameters() if self.is_warming_up and self.shares_body else ()

    def saved_roles(self) -> list[str]:
        return [*super().saved_roles(), *(["reference"] if self._moving_kl is not None else [])]

    @property
    def _moving_kl(self) -> AdaptiveKL | None:
        return None if self.reference_kl is None or self.reference_kl.decay is None else self.reference_kl

    def advantages(self, experience: Experience) -> dict[str, Tensor]:  # type: ignore[override]
        """Computes advantages and returns by GAE; also adapts the KL weight and updates the value normalizer."""
        local, total = experience.local, experience.total
        mask, values, bootstrap = local.loss_mask, local["values"], local.bootstrap_values
        if self.normalizer is not None:
            values = self.normalizer.denormalize(values)
            if bootstrap is not None:
                bootstrap = torch.where(local.is_truncated, self.normalizer.denormalize(bootstrap), 0.0)
        rewards = self.token_rewards(local)
        if self.reference_kl is not None:
            behavior, reference = local.behavior_logprobs, local.reference_logprobs
            divergence = self.reference_kl.per_token(behavior, reference, in_reward=self.kl_in_reward)
            if self.kl_in_reward:
                rewards = rewards - self.kl_coef * torch.where(mask, divergence, 0.0)
            self._adapt_kl_coef(float(masked_mean(divergence, mask, total)), len(experience))
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam, bootstrap)
        self._log_if_attached("critic/explained_variance", explained_variance(values, returns, mask, total))
        self._log_if_attached("critic/return", float(masked_mean(returns, mask, total)))
        if self.normalizer is not None:
            self.normalizer.update(returns[mask], total)
            returns = self.normalizer.normalize(returns)
        if self.whiten_advantages:
            advantages = batch_normalized(advantages, mask, total=total)
        return {"advantages": advantages, "returns": returns}

    def token_rewards(self, experience: Experience) -> Tensor:
        """Returns shaped rewards on the tokens that earned them, [B, T]; outcome rewards are on the last loss token."""
        mask = experience.loss_mask
        if experience.token_rewards is None:
            rewards = on_last_loss_token(self.penalized_rewards(experience), mask)
        else:
            rewards = on_loss_tokens(experience.token_rewards, mask)
            rewards = rewards + on_last_loss_token(self.penalized_rewards(experience) - experience.rewards, mask)
        return rewards if self.reward_shaping is None else self.reward_shaping(rewards, mask)

    def _adapt_kl_coef(self, kl_nats: float, num_trajectories: int) -> None:
        assert self.kl_controller is not None
        self._log_if_attached("policy/kl_coef", self.kl_coef)
        self._log_if_attached("policy/kl_behavior_reference_nats", kl_nats)
        self.kl_controller.coef = self.kl_coef  # a callback may have set it
        self.kl_controller.update(kl_nats, num_trajectories)
        self.kl_coef = self.kl_controller.coef

    def _log_if_attached(self, name: str, value: float) -> None:
        if self.is_attached:
            self.log(name, value)

    def value_loss(self, experience: Experience, values: Tensor) -> dict[str, Tensor]:
        old = experience["values"]
        loss = value_loss(values, experience["returns"], old, value_clip=self.value_clip, huber_delta=self.huber_delta)
        changes = (values - old).detach().abs()
        metrics = {"loss": loss, "value": values.detach(), "max_move": changes}
        if self.value_clip is not None:
            metrics["clipped_fraction"] = (changes > self.value_clip).float()
        return metrics

    @property
    def is_warming_up(self) -> bool:
        """Whether this iteration trains only the critic. False outside a run, so that a plan shows all calls."""
        return self.is_attached and self.weight_version < self.critic_warmup_iterations

    def is_update_the_last(self, metrics: dict[str, float]) -> bool:
        return not self.is_warming_up and self.early_stop is not None and self.early_stop(metrics)

    def on_policy_updated(self, weight_version: int) -> None:
        if self._moving_kl is not None:
            self._moving_kl.move(self.reference, self.policy)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.shares_body:
            critic = ModelDescription.of_critic(self.policy, self.policy_role)
            checkpoint["models"].update({} if critic is None else {"critic": dict(vars(critic))})
        normalizer = None if self.normalizer is None else self.normalizer.state_dict()
        checkpoint["ppo"] = {"kl_coef": self.kl_coef, "value_normalizer": normalizer}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("models", {}).get("critic")
        if saved is not None and (saved.get("body") is not None) != self.shares_body:
            raise ValueError(
                f"The checkpoint's critic is {'a separate model' if self.shares_body else 'a head on the policy'}, "
                "but this run's critic is not. Set critic as in the earlier run, or start a new run from exports of "
                "the checkpoint's policy and critic."
            )
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("ppo")
        if state is None:  # another algorithm's checkpoint: only the policy is restored
            return
        controller = self.kl_controller
        if controller is not None and controller.target_nats is not None and state["kl_coef"] > 0:
            self.kl_coef = controller.coef = state["kl_coef"]  # otherwise the configured weight applies
        if self.normalizer is not None and state["value_normalizer"] is not None:
            self.normalizer.load_state_dict(state["value_normalizer"])
