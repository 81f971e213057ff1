"""Score centering: subtracts the policy gradient's mean, which is not 0 if sampler and trainer probabilities differ.

Shapes: K, the sampler's most likely tokens at a position; any number of positions. Logprobs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightrl.checks.bounds import check_effect, check_same_shape
from lightrl.functional.importance import ImportanceWeights
from lightrl.functional.losses import is_clipped, policy_ratio

_LOWEST_LOGPROB = -1e4  # replaces the logprob -inf of a token that the policy cannot sample: 0 · (-inf) would be NaN
_MIN_REST = 1e-6


def score_correction(logprobs: Tensor, behavior_logprobs: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Computes C at each position, [...]; adding advantage · C to the loss centers the score.

    A policy gradient multiplies each token's score, the gradient of log p, by g(p/q), where p is the policy, q the
    behavior policy and g the algorithm's importance weight: 1, p/q, or p/q within bounds. A constant advantage, such as
    a baseline, has no effect if the mean of g · score over q is 0, which holds only for g = p/q. C subtracts the mean:
    with m = q · g(p/q), it is Σ_v m_v · log p_v, and m_v carries no gradient. Only the sampler's K most likely tokens H
    are known. All others are treated as one token with ratio 1/ρ and score -Σ_H p · ∇log p / (1 - Σ_H p):

        ρ = (1 - Σ_H q) / max(1 - Σ_H p, 1e-6)    α = ρ · g(1/ρ)    C = Σ_H (m - α·p) · log p

    This is exact if H is the vocabulary (or the support, with truncated sampling), or if p/q is the same for all other
    tokens. Otherwise, for a constant advantage A, the gradient's mean is A · Σ_others (α·p - m) · score.

    Source: https://arxiv.org/abs/2609.20807, with these cases: g = 1 has m = q, α = ρ; g = clamp(p/q, lo, hi) has
    m = clamp(p, lo·q, hi·q), α = clamp(1, lo·ρ, hi·ρ); g = p/q where it is between lo and hi, otherwise 0, has m = p or
    0 and α = 1 or 0. For g = p/q, C has no gradient.

    Args:
        logprobs: [..., K] of the policy being trained, at the sampler's top-k tokens; carries the gradient.
        behavior_logprobs: [..., K] of the sampler. Entries with a probability of 0 have no effect.
        weights: g; maps log(p/q), [..., K] or [..., 1], to weights of the same shape.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs)
    behavior = behavior_logprobs.exp()
    is_token = behavior > 0
    logprobs = logprobs.clamp(min=_LOWEST_LOGPROB)
    with torch.no_grad():
        policy = torch.where(is_token, logprobs.exp(), 0.0)
        rest_ratio = rest_of(behavior_logprobs) / (1 - policy.sum(-1)).clamp(min=_MIN_REST)
        alpha = rest_ratio * weights(-rest_ratio.clamp(min=_MIN_REST).log()[..., None])[..., 0]
        mass = behavior * weights(torch.where(is_token, logprobs - behavior_logprobs, 0.0))
        coefficients = torch.where(is_token, mass - alpha[..., None] * policy, 0.0)
    return (coefficients * logprobs).sum(-1)


def rest_of(behavior_logprobs: Tensor) -> Tensor:
    """Returns the sampler's total probability of all tokens except these K, [..., K] → [...]; never below 0."""
    return (1 - behavior_logprobs.exp().sum(-1)).clamp(min=0)


def clipped_weights(
    log_ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """Returns how `clipped_ratio_loss` would weight the policy gradient of K tokens: the ratio, or 0 where clipped.

    Args:
        log_ratio: [..., K], log(p/q) of K tokens at each position.
        advantages: [...], of the sampled token.
        clip_low, clip_high, dual_clip: as in `clipped_ratio_loss`.
    """
    ratio, advantages = policy_ratio(log_ratio, torch.zeros_like(log_ratio)), advantages[..., None].expand_as(log_ratio)
    return ratio * (1 - is_clipped(ratio, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip))


def check_centering(
    is_centered: bool, topk: int, weights: ImportanceWeights | None, weighs_tokens: bool, algorithm: str
) -> None:
    """Raises ValueError if scores cannot be centered, or if centering or recording top-k logprobs would have no effect.

    Args:
        topk: number of tokens whose logprobs the sampler returns.
        weights: bounded importance weights, if there are any.
        weighs_tokens: whether the algorithm's weight of each token depends on that token's ratio alone.
    """
    if not is_centered:
        check_effect("without score_centering", **{"sampling.topk_logprobs": (topk, 0)})
        return
    if not topk:
        raise ValueError("score_centering needs the engine's most likely tokens. Set sampling.topk_logprobs to 64.")
    if weights is not None and weights.approximate_proximal:
        raise ValueError("score_centering needs exact proximal logprobs. Remove decoupled.approximate_proximal.")
    if weights is not None and weights.cap is None and weights.floor is None:
        check_effect("with unbounded importance weights", score_centering=(True, False))
    if not weighs_tokens or (weights is not None and (weights.level, weights.aggregation) != ("token", None)):
        raise ValueError(
            f"score_centering needs a weight that depends on each token's ratio alone, which {algorithm} with these "
            "settings does not have. Use GRPO with ratio_level and decoupled.level 'token', or remove score_centering."
        )


def defines_together(kind: type, method: str, other: str) -> bool:
    """Whether the two methods still match: False if a subclass overrides `other` without overriding `method`."""
    defining = next(item for item in kind.__mro__ if {method, other} & vars(item).keys())
    return method in vars(defining)
