"""Estimators of the Kullback-Leibler divergence from the tokens that were sampled, per token, in nats.

Shapes: B trajectories, T tokens; tensors are aligned to the token they describe.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from lightrl.functional.shapes import check_same_shape

KLEstimator = Literal["k1", "k2", "k3"]

# exp of more than this is of no use as a number and soon overflows; ordinary log-ratios are below 1.
_MAX_LOG_RATIO = 20.0


def kl(logprobs: Tensor, reference_logprobs: Tensor, estimator: KLEstimator = "k3") -> Tensor:
    """KL(policy ‖ reference) as estimated from each sampled token; with d = logprobs - reference_logprobs:

    k1 is d (unbiased, may be negative), k2 is d²/2 (biased, low variance; its gradient is that of the KL), k3 is
    exp(-d) - 1 + d (unbiased, never negative). Expectations are over tokens that the policy itself sampled.

    Source: J. Schulman, Approximating KL divergence, http://joschu.net/blog/kl-approx.html.

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
    raise ValueError(f"estimator={estimator!r}, expected one of {', '.join(get_args(KLEstimator))}. Mend it.")
