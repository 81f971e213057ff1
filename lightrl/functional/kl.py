"""Estimators of the Kullback-Leibler divergence from the tokens that were sampled, per token, in nats.

Shapes: B trajectories, T tokens; tensors are aligned to the token they describe.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightrl.functional.shapes import check_same_shape

KLEstimator = Literal["k1", "k2", "k3"]

# exp of more than this is of no use as a number and soon overflows; ordinary log-ratios are below 1.
_MAX_LOG_RATIO = 20.0

# Far below any weight that matters, and far above where a float becomes 0.
_MIN_COEF = 1e-30


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(policy ‖ reference) as estimated from each sampled token; with d = logprobs - reference_logprobs:

    k1 is d (unbiased, may be negative), k2 is d²/2 (biased, low variance), k3 is exp(-d) - 1 + d (unbiased, never
    negative). Expectations are over tokens that the policy itself sampled.

    As a loss it is the gradient that counts: k1's is 0 in expectation, k2's is that of KL(policy ‖ reference), k3's is
    that of KL(reference ‖ policy), to first order the same.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html; gradients,
    https://arxiv.org/abs/2506.09477 and https://arxiv.org/abs/2510.01555.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        reference_logprobs: [B, T] of the reference policy.
        estimator: "k1", "k2" or "k3". In k3 the exponent -d counts as 20 where it is larger, so that no loss overflows.

    Returns:
        The estimate for each token, [B, T], nats.

    Raises:
        ValueError: if the tensors differ in shape, or the estimator is unknown.
    """
    check_same_shape(logprobs=logprobs, reference_logprobs=reference_logprobs)
    difference = logprobs - reference_logprobs.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 + d loses when the policies are close.
        return (-difference).clamp(max=_MAX_LOG_RATIO).expm1() + difference
    raise ValueError(f"estimator must be k1, k2 or k3, got {estimator!r}.")


@dataclass
class KLController:
    """The weight of a KL penalty: fixed, or moved in proportion to how far the KL is from its target.

    A weight above 0 stays above 0: an update moves it by 20 % at most, however many trajectories it had.

    Source: https://arxiv.org/abs/1909.08593, section 2.2.

    Args:
        coef: the weight, at the start where it adapts.
        target_nats: KL per token to keep; None for a fixed weight.
        horizon: trajectories after which an error of 20 % has been answered by about 20 %; larger is slower. More than
            so many in one update count as so many.
    """

    coef: float
    target_nats: float | None = None
    horizon: int = 10_000

    def __post_init__(self) -> None:
        if self.coef < 0 or self.horizon < 1 or (self.target_nats is not None and self.target_nats <= 0):
            raise ValueError(
                "A KL term needs coef >= 0, target_nats > 0 or None, and horizon >= 1, got "
                f"coef={self.coef}, target_nats={self.target_nats}, horizon={self.horizon}."
            )

    def update(self, kl_nats: float, num_trajectories: int) -> None:
        """After an iteration with this mean KL per token."""
        if self.target_nats is None:
            return
        error = min(max(kl_nats / self.target_nats - 1, -0.2), 0.2)
        moved = self.coef * (1 + error * min(num_trajectories / self.horizon, 1))
        self.coef = max(moved, _MIN_COEF) if self.coef > 0 else 0.0
