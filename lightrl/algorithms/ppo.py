"""PPO: proximal policy optimization with a critic, GRPO's clipped loss with advantages per token."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from lightrl.algorithms.grpo import GRPO
from lightrl.algorithms.setting_names import setting_names
from lightrl.checks.bounds import check_bounds
from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.functional import (
    KLController,
    ValueNormalizer,
    batch_normalized,
    explained_variance,
    gae,
    kl,
    masked_mean,
    on_last_loss_token,
    on_loss_tokens,
    value_loss,
)
from lightrl.models import ModelSpec
from lightrl.models.model_folder import ModelDescription
from lightrl.strategies import local


class PPO(GRPO):
    """A clipped policy gradient whose baseline is a critic: a network that predicts the reward to come at each token.

    One completion per prompt is enough. The critic's loss is trained in the same step of the optimizer as the policy's,
    in a parameter group of its own. Decoupled, dual-clipped or bounded variants are the settings of GRPO's loss.

    Source: https://arxiv.org/abs/1707.06347; for language models, https://arxiv.org/abs/1909.08593.

    Args:
        policy: the model to train.
        critic: the checkpoint that the critic starts from, of a language model or a reward model, or a ModelSpec, which
            can have an `lr` of its own; the policy's if None. `shared` is a head on the policy's body instead: one
            backward, no second model. It begins as one that says 0, and goes on only from a checkpoint.
        gamma: discount of one loss token.
        lam: 0 trusts the critic for all that comes later, 1 the rewards.
        bootstrap_truncated: after a truncated end the critic's value stands for what would have come. False where the
            reward is the last word, as where an answer that reaches the length limit is wrong: there both would count.
        value_clip: bound on the move of a value in an iteration, in the critic's units; None for no bound.
        huber_delta: distance from which the critic's loss grows linearly; None for never.
        value_normalization: the critic predicts returns less their mean, over their deviation: `running` over all so
            far, `exponential` over the last ones, None for returns as they are.
        value_decay: of `exponential`, per iteration.
        value_coef: weight of the critic's loss where it shares the policy's body.
        critic_warmup_iterations: so many first iterations train the critic alone; on the policy's body, its head alone.
        whiten_advantages: over all loss tokens of the iteration.
        reward_bias, reward_scaling, reward_clip: the reward becomes (reward + bias) · scaling, bounded by ± clip.
        kl_in_reward: the KL divergence from the reference comes off each token's reward; False adds it to the loss.
        kl_estimator: None is k1 in the reward, which is what the gradient of the KL asks for, and k3 in the loss.
        kl_target_nats: kl_coef moves so as to keep the KL per token there; None keeps it fixed.
        kl_horizon: trajectories over which it moves.
        reference_decay: after each iteration the reference becomes decay · itself + (1 - decay) · policy; None: fixed.
        stop_kl_nats, stop_ratio: the iteration's further updates are left out once the KL (k3) from the policy that the
            clip is centered on, or the mean ratio to it or its inverse, is above that. With `decoupled` that policy is
            the one at the start of the iteration, so that stale tokens stop nothing; else the one that sampled.
        kwargs: those of GRPO, less the group's statistics.
    """

    advantage_keys = ("advantages", "returns")

    def __init__(
        self,
        policy: str | ModelSpec,
        *,
        critic: str | ModelSpec | None = None,
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
        reward_bias: float = 0.0,
        reward_scaling: float = 1.0,
        reward_clip: float | None = None,
        kl_in_reward: bool = True,
        kl_estimator: Literal["k1", "k2", "k3"] | None = None,
        kl_target_nats: float | None = None,
        kl_horizon: int = 10_000,
        reference_decay: float | None = None,
        stop_kl_nats: float | None = None,
        stop_ratio: float | None = None,
        group_size: int = 1,
        **kwargs: Any,
    ) -> None:
        # A command line fills in GRPO's defaults, which ask for nothing.
        for name, default in (("advantage_mean", "group"), ("advantage_std", "group"), ("leave_one_out", False)):
            value = kwargs.pop(name, default)
            if value not in (default, None):
                raise ValueError(
                    f"PPO got {name}={value!r}, expected none: its baseline is the critic, not other trajectories. "
                    "Leave it out, or use GRPO."
                )
        self.kl_in_reward = kl_in_reward
        super().__init__(
            policy,
            advantage_mean=None,
            advantage_std=None,
            kl_estimator=kl_estimator or ("k1" if kl_in_reward else "k3"),
            group_size=group_size,
            **kwargs,
        )
        check_bounds(0, value_coef=value_coef, critic_warmup_iterations=critic_warmup_iterations)
        if reward_scaling == 0:
            raise ValueError(
                "reward_scaling=0 makes every reward 0, expected another number. Set 1 to leave rewards as they are."
            )
        if reward_clip is not None and reward_clip <= 0:
            raise ValueError(f"reward_clip={reward_clip}, expected more than 0 or None. Raise it.")
        if self.kl_coef == 0 and (kl_target_nats is not None or reference_decay is not None):
            raise ValueError(
                "kl_target_nats and reference_decay belong to a KL term, expected kl_coef above 0 with them. Set "
                "kl_coef and reference, or leave them out."
            )
        if reference_decay is not None and (self.reference_spec is None or self.reference_spec.url is not None):
            raise ValueError(
                f"reference_decay={reference_decay} moves a reference policy, but that is the policy without its "
                "adapters here, or behind a server, expected reference= a model of its own. Give the checkpoint that "
                "training starts from."
            )
        mesh = None if self.reference_spec is None else self.reference_spec.mesh
        if reference_decay is not None and mesh != self.policy_spec.mesh:
            raise ValueError(
                f"reference_decay={reference_decay} moves a reference with mesh={mesh} towards the policy, whose "
                f"mesh is {self.policy_spec.mesh}, expected the same one. Give the reference the policy's mesh."
            )
        check_bounds(0, 1, reference_decay=reference_decay)
        if reference_decay is not None and self.policy_spec.lora is not None:
            raise ValueError(
                f"reference_decay={reference_decay} moves a reference towards all of the policy's weights, but lora "
                "trains none of them, expected one of the two. Leave reference_decay out, or train all weights."
            )
        if stop_kl_nats is not None and stop_kl_nats <= 0:
            raise ValueError(f"stop_kl_nats={stop_kl_nats}, expected more than 0 or None. Raise it.")
        if stop_ratio is not None and stop_ratio <= 1:
            raise ValueError(f"stop_ratio={stop_ratio}, expected more than 1. Raise it.")
        self.shares_body = critic == "shared"
        self.critic_spec = _critic_spec(critic, self.policy_spec)
        self.gamma = gamma
        self.lam = lam
        self.bootstrap_truncated = bootstrap_truncated
        self.value_clip = value_clip
        self.huber_delta = huber_delta
        with setting_names(kind="value_normalization", decay="value_decay"):
            self.normalizer = ValueNormalizer(value_normalization, value_decay) if value_normalization else None
        self.value_coef = value_coef
        self.critic_warmup_iterations = critic_warmup_iterations
        self.whiten_advantages = whiten_advantages
        self.reward_bias = reward_bias
        self.reward_scaling = reward_scaling
        self.reward_clip = reward_clip
        self.kl_controller = KLController(self.kl_coef, kl_target_nats, kl_horizon)
        self.reference_decay = reference_decay
        self.stop_kl_nats = stop_kl_nats
        self.stop_ratio = stop_ratio
        one = torch.ones(1, 1)  # of which the equations refuse what they cannot use, before anything is loaded
        gae(one, one, one.bool(), gamma, lam)
        with setting_names(clip="value_clip"):
            value_loss(one, one, one, clip=value_clip, huber_delta=huber_delta)

    # ------------------------------------------------------------------ models and calls

    def models(self) -> dict[str, ModelSpec]:
        models = super().models()
        if not self.shares_body:
            models["critic"] = self.critic_spec
        return models

    def configure_model(self) -> None:
        super().configure_model()
        if self.reference_decay is not None:
            self._check_reference_is_like_the_policy()
        if self.shares_body and self.value_head is None:
            policy: Any = self.policy
            weight = policy.get_output_embeddings().weight
            home = "cpu" if weight.is_meta else weight.device  # no checkpoint will bring its weights
            # No bias, as in Hugging Face's scalar heads: with its body it is such a model, and can be exported.
            self.value_head = torch.nn.Linear(weight.shape[1], 1, bias=False, device=home, dtype=weight.dtype)
            torch.nn.init.zeros_(self.value_head.weight)

    def score_calls(self) -> list[ModelCall]:
        role = "policy" if self.shares_body else "critic"
        outputs = ("values", "bootstrap_values") if self.bootstrap_truncated else ("values",)
        return [*super().score_calls(), ModelCall("values", role, "infer", ("token_ids",), outputs)]

    def train_calls(self) -> list[ModelCall]:
        calls = super().train_calls()
        if not self.shares_body:
            return calls[1:] if self.is_warming_up else calls
        inputs = (*calls[0].inputs, "values", *self.advantage_keys[1:])
        return [dataclasses.replace(calls[0], inputs=inputs)]

    def resting_parameters(self) -> Iterable[torch.nn.Parameter]:
        """While a critic on the policy's body warms up: the body, without the critic's head."""
        models: Any = self
        return models.policy.parameters() if self.is_warming_up and self.shares_body else ()

    def saved_roles(self) -> list[str]:
        moves = self.reference_decay is not None
        return [*super().saved_roles(), *(["reference"] if moves else [])]

    # ------------------------------------------------------------------ once for the whole iteration

    def advantages(self, experience: Experience) -> dict[str, Tensor]:  # type: ignore[override]
        mask = experience.loss_mask
        values, bootstrap = experience["values"], experience.bootstrap_values
        if self.normalizer is not None:
            values = self.normalizer.denormalize(values)
            if bootstrap is not None:
                bootstrap = torch.where(experience.is_truncated, self.normalizer.denormalize(bootstrap), 0.0)
        rewards = self.token_rewards(experience)
        if self.kl_coef > 0:
            divergence = kl(experience.behavior_logprobs, experience["reference_logprobs"], self.kl_estimator)
            if self.kl_in_reward:
                rewards = rewards - self.kl_coef * torch.where(mask, divergence, 0.0)
            self._follow_kl(float(masked_mean(divergence, mask)), len(experience))
        advantages, returns = gae(rewards, values, mask, self.gamma, self.lam, bootstrap)
        self._log("critic/explained_variance", explained_variance(values, returns, mask))
        self._log("critic/return", float(masked_mean(returns, mask)))
        if self.normalizer is not None:
            self.normalizer.update(returns[mask])
            returns = self.normalizer.normalize(returns)
        if self.whiten_advantages:
            advantages = batch_normalized(advantages, mask)
        return {"advantages": advantages, "returns": returns}

    def token_rewards(self, experience: Experience) -> Tensor:
        """Shaped rewards on the tokens that earned them, [B, T]: an outcome's on the last loss token."""
        mask = experience.loss_mask
        if experience.token_rewards is None:
            rewards = on_last_loss_token(self.shaped_rewards(experience), mask)
        else:
            rewards = on_loss_tokens(experience.token_rewards, mask)
            rewards = rewards + on_last_loss_token(self.shaped_rewards(experience) - experience.rewards, mask)
        bias = torch.full_like(experience.rewards, self.reward_bias)
        rewards = (rewards + on_last_loss_token(bias, mask)) * self.reward_scaling
        return rewards if self.reward_clip is None else rewards.clamp(-self.reward_clip, self.reward_clip)

    def _follow_kl(self, kl_nats: float, num_trajectories: int) -> None:
        """Moves the weight of the KL term, from the next iteration's rewards on."""
        self._log("policy/kl_coef", self.kl_coef)
        self._log("policy/kl_behavior_reference_nats", kl_nats)
        self.kl_controller.update(kl_nats, num_trajectories)
        self.kl_coef = self.kl_controller.coef

    def _log(self, name: str, value: float) -> None:
        if self._trainer is not None:
            self.log(name, value)

    # ------------------------------------------------------------------ the losses

    def value_loss(self, experience: Experience, values: Tensor) -> dict[str, Any]:
        old = experience["values"]
        loss = value_loss(values, experience["returns"], old, clip=self.value_clip, huber_delta=self.huber_delta)
        moved = (values - old).detach().abs()
        metrics = {"value": values.detach(), "max_move": moved}
        if self.value_clip is not None:
            metrics["clipped_fraction"] = (moved > self.value_clip).float()
        return {"loss": loss, **metrics}

    @property
    def is_warming_up(self) -> bool:
        """Whether this iteration trains the critic alone; False outside a run, where a plan shows all that there is."""
        return self._trainer is not None and self.weight_version < self.critic_warmup_iterations

    def is_update_the_last(self, metrics: dict[str, float]) -> bool:
        if self.is_warming_up:
            return False
        moved_nats = metrics.get("kl_update_nats", metrics.get("kl_behavior_nats", 0.0))
        if self.stop_kl_nats is not None and moved_nats > self.stop_kl_nats:
            return True
        ratio = metrics.get("ratio", 1.0)
        return self.stop_ratio is not None and not 1 / self.stop_ratio <= ratio <= self.stop_ratio

    # ------------------------------------------------------------------ after the update

    def _check_reference_is_like_the_policy(self) -> None:
        models: Any = self
        shapes = [
            {name: tuple(value.shape) for name, value in model.named_parameters()}
            for model in (models.reference, models.policy)
        ]
        apart = sorted(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        if apart:
            raise ValueError(
                f"reference_decay={self.reference_decay} moves the reference towards the policy, but {apart[0]!r} is "
                f"{shapes[0].get(apart[0])} in the one and {shapes[1].get(apart[0])} in the other, expected equal "
                "models. Give the checkpoint that training starts from."
            )

    @torch.no_grad()
    def on_policy_updated(self, weight_version: int) -> None:
        """Moves the reference towards the policy."""
        models: Any = self
        if self.reference_decay is not None:
            # Split alike, so that each process moves its part, wherever that waits.
            for kept, new in zip(models.reference.parameters(), models.policy.parameters(), strict=True):
                local(kept).lerp_(local(new).to(local(kept)), 1 - self.reference_decay)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        if self.shares_body:
            models: Any = self
            critic = ModelDescription.of_critic(models.policy, self.policy_spec)
            checkpoint["models"].update({} if critic is None else {"critic": dict(vars(critic))})
        normalizer = None if self.normalizer is None else self.normalizer.state_dict()
        checkpoint["ppo"] = {"kl_coef": self.kl_coef, "value_normalizer": normalizer}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        had = checkpoint.get("models", {}).get("critic")
        if had is not None and (had.get("body") is not None) != self.shares_body:
            raise ValueError(
                f"The checkpoint's critic is {'a model of its own' if self.shares_body else 'a head on the policy'}, "
                f"and this PPO's is not, expected the same. Set critic as that run had it, or start a new run from "
                "exports of the checkpoint's policy and critic."
            )
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("ppo")
        if state is None:  # of another algorithm, whose policy is gone on with
            return
        if self.kl_controller.target_nats is not None and state["kl_coef"] > 0:  # a fixed one is the configuration's
            self.kl_coef = self.kl_controller.coef = state["kl_coef"]
        if self.normalizer is not None and state["value_normalizer"] is not None:
            self.normalizer.load_state_dict(state["value_normalizer"])


def _critic_spec(critic: str | ModelSpec | None, policy: ModelSpec) -> ModelSpec:
    spec = policy if critic is None or critic == "shared" else ModelSpec.of(critic)
    return dataclasses.replace(spec, head="scalar")
