"""Divergences between policies, per token, in nats: from sampled tokens, or from a teacher's top-k tokens.

Shapes: B trajectories, T tokens, K top tokens of the teacher; tensors are aligned to the token they describe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_bounds, check_choice, check_positive, check_same_shape

KLEstimator = Literal["k1", "k2", "k3"]

# Normal log-ratios are below 1; exp of a log-ratio much above 20 overflows.
MAX_LOG_RATIO = 20.0

# Far below any weight that has an effect, and far above the smallest positive float.
_MIN_COEF = 1e-30


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """Estimates KL(policy ‖ reference) from each sampled token.

    With d = logprobs - reference_logprobs: k1 is d (unbiased, may be negative), k2 is d²/2 (biased, low variance), k3
    is exp(-d) - 1 + d (unbiased, never negative). Expectations are over tokens that the policy itself sampled.

    A loss uses only the gradient. In expectation, k1's gradient is 0, k2's is that of KL(policy ‖ reference), and k3's
    is that of KL(reference ‖ policy), which is the same to first order.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; gradients,
    https://arxiv.org/abs/2506.09477 and https://arxiv.org/abs/2510.01555.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        reference_logprobs: [B, T] of the reference policy.
        estimator: "k1", "k2" or "k3". k3 caps the exponent -d at 20, so that no loss overflows.

    Returns:
        The estimate for each token, [B, T], nats.
    """
    check_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    check_choice(get_args(KLEstimator), estimator=estimator)
    difference = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    # expm1 keeps the digits that exp(-d) - 1 + d loses when the policies are close.
    return (-difference).clamp(max=MAX_LOG_RATIO).expm1() + difference


@dataclass
class KLController:
    """The weight of a KL penalty: fixed, or adapted in proportion to the KL's relative distance from a target.

    One update changes the weight by at most 20%, so a weight above 0 stays above 0.

    Source: https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        coef: the weight, or the initial weight if there is a target.
        target_nats: target KL per token; None for a fixed weight.
        horizon: the number of trajectories over which a KL 20% off its target changes the weight by about 20%. An
            update with more trajectories counts as one with `horizon`.
    """

    coef: float
    target_nats: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        check_bounds(0, coef=self.coef)
        check_bounds(1, horizon=self.horizon)
        check_positive(target_nats=self.target_nats)

    def update(self, kl_nats: float, num_trajectories: int) -> None:
        """Adapts the weight after an iteration with this mean KL per token."""
        if self.target_nats is None:
            return
        error = min(max(kl_nats / self.target_nats - 1, -0.2), 0.2)
        adapted = self.coef * (1 + error * min(num_trajectories / self.horizon, 1))
        self.coef = max(adapted, _MIN_COEF) if self.coef > 0 else 0.0


Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

# Replaces the logprob -inf of a token that cannot be sampled: 0 · (-inf) would be NaN.
_LOWEST_LOGPROB = -1e4


def topk_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence = "reverse_kl", *, jsd_beta: float = 0.5
) -> Tensor:
    """Computes the policy's divergence from the teacher at each position, over K tokens and one outcome for all others.

    Policy and teacher are distributions over these K + 1 outcomes, so this is a true divergence: never negative, and 0
    only where they agree. It is at most the divergence over the whole vocabulary (the data-processing inequality), and
    equal to it if K is the vocabulary size. With P the teacher and Q the policy:

    reverse_kl, KL(Q ‖ P), falls as the policy avoids what the teacher would not generate. forward_kl, KL(P ‖ Q), falls
    as the policy covers everything that the teacher would generate. jsd is β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M) with the
    mixture M = β·P + (1 - β)·Q; it is bounded, and symmetric at β = 1/2.

    Source: GKD, https://arxiv.org/abs/2306.13649, section 2 and equation 1.

    Args:
        logprobs: [..., K] of the policy being trained, for the teacher's top-k tokens; carries the gradient.
        teacher_logprobs: [..., K] of the teacher, for the same K distinct tokens.
        divergence: "reverse_kl", "forward_kl" or "jsd".
        jsd_beta: the teacher's weight in the mixture, between 0 and 1; only for "jsd".

    Returns:
        The divergence at each position, [...], nats.
    """
    check_same_shape(logprobs=logprobs, teacher_logprobs=teacher_logprobs)
    check_divergence(divergence, jsd_beta)
    policy, teacher = _with_rest(logprobs), _with_rest(teacher_logprobs.detach())
    if divergence == "reverse_kl":
        return _kl(policy, teacher)
    if divergence == "forward_kl":
        return _kl(teacher, policy)
    mixture = torch.logaddexp(teacher + math.log(jsd_beta), policy + math.log1p(-jsd_beta))
    return jsd_beta * _kl(teacher, mixture) + (1 - jsd_beta) * _kl(policy, mixture)


def rest_mass(logprobs: Tensor) -> Tensor:
    """Returns the probability of all tokens but these K, [..., K] → [...]; at least the machine epsilon."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)


def check_divergence(divergence: str, jsd_beta: float) -> None:
    """Raises ValueError if the divergence is unknown or `jsd_beta` is not between 0 and 1."""
    check_choice(get_args(Divergence), divergence=divergence)
    if not 0 < jsd_beta < 1:
        raise ValueError(f"jsd_beta must be above 0 and below 1, got {jsd_beta}. For a plain KL, change divergence.")


def _with_rest(logprobs: Tensor) -> Tensor:
    """Appends the logprob of all other tokens: [..., K] → [..., K + 1]."""
    return torch.cat([logprobs.clamp(min=_LOWEST_LOGPROB), rest_mass(logprobs).log()[..., None]], -1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)
