"""The KL divergence from a reference policy, added to the loss or subtracted from the reward.

Shapes: B trajectories, T tokens. Every [B, T] tensor is aligned to the token it describes; logprobs are in nats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.dataflow import ModelCall
from lightrl.functional import KLController, kl
from lightrl.functional.losses import KLEstimator
from lightrl.models import ModelSpec, Role
from lightrl.strategies import local


@dataclass(frozen=True)
class ReferenceKL:
    """A KL term that measures, at each sampled token, how far the policy is from a fixed reference policy.

    Args:
        coef: weight of the term, above 0.
        model: the reference policy, usually the checkpoint that training starts from. None requires LoRA and uses the
            initial policy: the model without its adapters, which costs no memory, or with `lora.adapter` a frozen copy.
        estimator: "k2" (its on-policy gradient is the KL's gradient) or "k3". "k1" is for a KL subtracted from the
            reward: as a loss, its gradient is 0 in expectation. None uses k3 in the loss and k1 in the reward.
    """

    coef: float
    model: str | ModelSpec | Role | None = None
    estimator: KLEstimator | None = None

    def __post_init__(self) -> None:
        if not self.coef > 0:
            raise ValueError(f"reference.coef must be above 0, got {self.coef}. To train without KL, omit reference.")
        check_choice((*get_args(KLEstimator), None), estimator=self.estimator)

    def check(self, policy: Role, *, in_reward: bool) -> None:
        """Raises ValueError if there is no reference policy, or the term would have no effect."""
        if self.model is None and not policy.tuning.keeps_base:
            raise ValueError(
                "reference needs a model: the policy has no LoRA adapters to turn off. Set reference.model, usually to "
                "the checkpoint that training starts from."
            )
        if self.estimator == "k1" and not in_reward:
            raise ValueError(
                "reference.estimator must be k2 or k3 if the KL is in the loss, got 'k1', whose gradient is 0 in "
                "expectation. k1 is for a KL in the reward."
            )

    def role(self, policy: Role) -> Role | None:
        """Returns the reference's role; None if the reference is the policy without its adapters."""
        return policy.initial if self.model is None else Role.of(self.model)

    def score_call(self, policy: Role) -> ModelCall:
        """Returns a model call that computes `reference_logprobs`."""
        role = "policy" if self.role(policy) is None else "reference"
        outputs = ("reference_logprobs",)
        return ModelCall(outputs[0], role, "infer", ("token_ids",), outputs, base_only=role == "policy")

    def per_token(self, logprobs: Tensor, reference_logprobs: Tensor | None, *, in_reward: bool = False) -> Tensor:
        """Estimates KL(policy ‖ reference) for each token, [B, T], in nats, without the weight `coef`."""
        assert reference_logprobs is not None
        return kl(logprobs, reference_logprobs, estimator=self.estimator or ("k1" if in_reward else "k3"))


@dataclass(frozen=True)
class AdaptiveKL(ReferenceKL):
    """PPO's KL term, in the reward or in the loss. The weight can adapt, and the reference can move.

    Args:
        coef, model, estimator: as in ReferenceKL; `coef` is the initial weight.
        in_reward: subtract the KL from each token's reward; False adds it to the loss.
        target_nats: adapt the weight to keep the KL per token at this target; None keeps the weight fixed.
        horizon: number of trajectories over which the weight adapts; see KLController.
        decay: after each iteration, reference = decay · reference + (1 - decay) · policy (float32); None freezes it.
    """

    in_reward: bool = True
    target_nats: float | None = None
    horizon: int = 10_000
    decay: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_bounds(0, 1, decay=self.decay)
        self.controller()

    def controller(self) -> KLController:
        """Returns a new controller of the weight."""
        return KLController(self.coef, self.target_nats, self.horizon)

    def role(self, policy: Role) -> Role | None:
        role = super().role(policy)
        if role is None or self.decay is None:
            return role
        return replace(role, model=replace(role.spec, dtype="float32"))

    def check(self, policy: Role, *, in_reward: bool) -> None:
        super().check(policy, in_reward=in_reward)
        if self.decay is None:
            return
        reference = self.role(policy)
        if reference is None or reference.spec.url is not None:
            raise ValueError(
                f"reference.decay={self.decay} moves the reference policy, but the reference is on a server, or is "
                "the policy without its adapters. Set reference.model to the checkpoint that training starts from."
            )
        if reference.mesh != policy.mesh:
            raise ValueError(
                f"reference.decay={self.decay} moves the reference towards the policy, so both need the same mesh, got "
                f"{reference.mesh} and {policy.mesh}."
            )
        if policy.tuning.keeps_base:
            raise ValueError(
                f"reference.decay={self.decay} moves the reference towards the policy's weights, but lora does not "
                "train them. Leave out decay, or train all weights."
            )

    def check_models(self, reference: torch.nn.Module, policy: torch.nn.Module) -> None:
        """Raises ValueError if a moving reference and the policy differ in the names or shapes of their parameters."""
        left, right = (
            {name: tuple(value.shape) for name, value in model.named_parameters()} for model in (reference, policy)
        )
        different = sorted(name for name in {**left, **right} if left.get(name) != right.get(name))
        if different:
            raise ValueError(
                f"reference.decay={self.decay} moves the reference towards the policy, but {different[0]!r} has shape "
                f"{left.get(different[0])} in the reference and {right.get(different[0])} in the policy. Set "
                "reference.model to the checkpoint that training starts from."
            )

    @torch.no_grad()
    def move(self, reference: torch.nn.Module, policy: torch.nn.Module) -> None:
        """Moves the reference towards the policy. Both are sharded alike, so each process moves only its shards."""
        assert self.decay is not None
        for old, new in zip(reference.parameters(), policy.parameters(), strict=True):
            local(old).lerp_(local(new).to(local(old)), 1 - self.decay)
