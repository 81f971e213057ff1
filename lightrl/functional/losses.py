"""Policy losses, ratios and importance weights, per token: tensors in, tensors out; the framework masks and averages.

Shapes: B trajectories, T tokens. Every [B, T] tensor is aligned to the token it describes: `logprobs[b, t]` is the
log-probability of `token_ids[b, t]` given the tokens before it. Logprobs are in nats.

A ratio is the exponential of a difference of logprobs. The difference counts as ±20 where it is larger (a ratio of
4.9e8 or 2.1e-9, with zero gradient): values that far out are finite instead of infinite, all others are untouched.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.functional.kl import kl
from lightrl.functional.reduction import neutralize
from lightrl.functional.shapes import check_same_shape

WeightMode = Literal["mask", "clamp"]
WeightLevel = Literal["token", "sequence", "product"]
WeightMetric = Literal["ratio", "k1", "k2", "k3"]
WeightAggregation = Literal["mean", "sum", "max"]

_MAX_LOG_RATIO = 20.0

# How the tokens of a trajectory make one number, in logs; None where each stands for itself.
_AGGREGATION_OF: dict[str, WeightAggregation | None] = {"token": None, "sequence": "mean", "product": "sum"}


def policy_ratio(logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Policy ÷ proximal policy for each token, [B, T]; the gradient goes to `logprobs` only.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs)
    return _bounded_exp(logprobs - proximal_logprobs.detach())


def sequence_ratio(logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """GSPO's ratio: the geometric mean of the token ratios over the trajectory's loss tokens, at each of its tokens.

    It has the form of GSPO-token: every token of a trajectory has the same value, and token t's gradient is that value
    times the gradient of its own logprob. With advantages that are constant along a trajectory and the reduction
    "sequence", loss and gradient are those of GSPO; advantages per token are allowed too. For `clipped_ratio_loss`.

    Source: GSPO, equations 7, 13 and 14, https://arxiv.org/abs/2507.18071.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update.
        loss_mask: bool [B, T]; what the logprobs are elsewhere has no effect.

    Returns:
        [B, T]; 1 for a trajectory without loss tokens.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, loss_mask=loss_mask)
    logprobs, proximal_logprobs = neutralize(loss_mask, logprobs, proximal_logprobs.detach())
    mean = _mean_over_loss_tokens(logprobs.detach() - proximal_logprobs, loss_mask)
    return _bounded_exp(mean + (logprobs - logprobs.detach()))


def clipped_policy_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate; with `clip_high > clip_low` it is DAPO's clip-higher.

    Source: PPO, https://arxiv.org/abs/1707.06347; DAPO, https://arxiv.org/abs/2503.14476; dual clip,
    https://arxiv.org/abs/1912.09729.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update, center of the clip.
        advantages: [B, T], constant along a trajectory for outcome rewards.
        clip_low, clip_high: the ratio stops earning below `1 - clip_low` and above `1 + clip_high`.
        dual_clip: bounds a token's loss by `dual_clip · |advantage|`, which matters where the advantage is negative and
            the ratio large; greater than 1. None for no bound.

    Returns:
        The loss of each token, [B, T]; lower is better.

    Raises:
        ValueError: if the tensors differ in shape, or a setting is out of range.
    """
    return clipped_ratio_loss(
        policy_ratio(logprobs, proximal_logprobs),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
    )


def clipped_ratio_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """`clipped_policy_loss` of a ratio that is already there: of `policy_ratio`, or of `sequence_ratio` for GSPO.

    Args:
        ratio: [B, T], carries the gradient.
        advantages, clip_low, clip_high, dual_clip: as in `clipped_policy_loss`. GSPO's clip bounds are far smaller than
            PPO's: 3e-4 and 4e-4 in the paper.

    Returns:
        The loss of each token, [B, T].

    Raises:
        ValueError: if the tensors differ in shape, or a setting is out of range.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    _check_clip(clip_low, clip_high)
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip}, expected more than 1 (3 is usual) or None. Raise it.")
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    return loss if dual_clip is None else torch.minimum(loss, dual_clip * advantages.abs())


def cispo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float,
) -> Tensor:
    """CISPO: the policy gradient with a clipped ratio as its weight, so that no token loses its gradient.

    -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) · advantages · logprobs.

    Source: MiniMax-M1, equations 4 and 5, https://arxiv.org/abs/2506.13585.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update, or of the behavior policy.
        advantages: [B, T].
        clip_low: 1 puts no lower bound on the weight, as the paper does.
        clip_high: the paper tunes it and names no number, so there is no default.

    Returns:
        The loss of each token, [B, T]. Its value means little, its gradient is what counts.

    Raises:
        ValueError: if the tensors differ in shape, or a clip bound is negative.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, advantages=advantages)
    _check_clip(clip_low, clip_high)
    weight = policy_ratio(logprobs.detach(), proximal_logprobs).clamp(1 - clip_low, 1 + clip_high)
    return -weight * advantages * logprobs


def sapo_loss(
    ratio: Tensor, advantages: Tensor, *, temperature_positive: float = 1.0, temperature_negative: float = 1.05
) -> Tensor:
    """SAPO: a smooth gate in the place of the clip, so that a token's gradient fades instead of vanishing.

    -gate(ratio) · advantages with gate(r) = 4/τ · sigmoid(τ·(r - 1)), whose slope at r = 1 is 1, as the ratio's own.

    Source: https://arxiv.org/abs/2511.20347, equations 5 and 6.

    Args:
        ratio: [B, T], carries the gradient.
        advantages: [B, T].
        temperature_positive, temperature_negative: τ where the advantage is above 0, and elsewhere; the larger, the
            faster the gradient fades off-policy.

    Returns:
        The loss of each token, [B, T].

    Raises:
        ValueError: if the tensors differ in shape, or a temperature is not above 0.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    if min(temperature_positive, temperature_negative) <= 0:
        raise ValueError(
            f"temperature_positive={temperature_positive}, temperature_negative={temperature_negative}, expected more "
            "than 0 each (1 and 1.05 in the paper). Raise the lower one."
        )
    temperature = torch.where(advantages > 0, temperature_positive, temperature_negative)
    return -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantages


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """1 where the clip takes a token's gradient away, 0 elsewhere; its mean is the clipped fraction.

    Args:
        ratio: [B, T], of `policy_ratio` or `sequence_ratio`.
        advantages: [B, T].
        clip_low, clip_high: those of the loss.

    Returns:
        float [B, T], detached.

    Raises:
        ValueError: if the tensors differ in shape, or a clip bound is negative.
    """
    check_same_shape(ratio=ratio, advantages=advantages)
    _check_clip(clip_low, clip_high)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    return (too_high | too_low).to(ratio.dtype)


def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    loss_mask: Tensor,
    cap: float | None = None,
    mode: WeightMode = "mask",
    level: WeightLevel = "token",
    floor: float | None = None,
    metric: WeightMetric = "ratio",
    aggregation: WeightAggregation | None = None,
) -> Tensor:
    """Proximal ÷ behavior policy: what a token's loss is multiplied by because another policy sampled it.

    The factor of the decoupled loss, and of truncated (TIS, "clamp") or masked (MIS, "mask") importance sampling
    between engine and trainer; IcePop is "mask" with a floor too. What a bound is held against is the weight itself, or
    an estimate of KL(behavior ‖ proximal): with r the ratio, k1 is -log r, k2 is (log r)²/2, k3 is r - 1 - log r.

    Source: decoupled PPO, https://arxiv.org/abs/2110.00641, and AReaL, https://arxiv.org/abs/2505.24298; truncated
    importance sampling, https://fengyao.notion.site/off-policy-rl; masked, by trajectory,
    https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda;
    IcePop, https://arxiv.org/abs/2510.18855; the estimators, http://joschu.net/blog/kl-approx.html.

    Args:
        proximal_logprobs: [B, T] of the policy at the start of the update.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        loss_mask: bool [B, T]; what the logprobs are elsewhere has no effect.
        cap: the largest weight, or estimate, that counts; None for no bound.
        mode: a weight beyond a bound becomes 0 ("mask") or the bound ("clamp").
        level: "token"; "sequence", where each token of a trajectory has the geometric mean over its loss tokens; or
            "product", where it has their product, the trajectory's exact weight.
        floor: the smallest weight, or estimate, that counts; None for no bound.
        metric: what the bounds are held against: "ratio", the weight, or the estimate "k1", "k2" or "k3", in nats;
            with an estimate the mode is "mask".
        aggregation: a trajectory is judged whole, by "mean", "sum" or "max" over its loss tokens (of "ratio", mean and
            sum are those of log r). None judges what the level says: each token, the mean, or the sum.

    Returns:
        [B, T], detached; 1 where the mask is False.

    Raises:
        ValueError: if the tensors differ in shape, or a setting is none of the above.
    """
    check_same_shape(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs, loss_mask=loss_mask)
    _check_bounds(cap, floor, mode, level, metric, aggregation)
    proximal, behavior = neutralize(loss_mask, proximal_logprobs.detach(), behavior_logprobs.detach())
    by_level = _AGGREGATION_OF[level]
    weights = _measured("ratio", by_level, proximal, behavior, loss_mask)
    if mode == "clamp" and (cap is not None or floor is not None):
        weights = weights.clamp(min=floor, max=cap)
    elif cap is not None or floor is not None:
        judged = _measured(metric, aggregation or by_level, proximal, behavior, loss_mask)
        weights = torch.where(judged.clamp(min=floor, max=cap) == judged, weights, 0.0)
    return torch.where(loss_mask, weights, 1.0)


def _check_bounds(
    cap: float | None, floor: float | None, mode: str, level: str, metric: str, aggregation: str | None
) -> None:
    for name, value, allowed in (
        ("mode", mode, get_args(WeightMode)),
        ("level", level, get_args(WeightLevel)),
        ("metric", metric, get_args(WeightMetric)),
        ("aggregation", aggregation or "mean", get_args(WeightAggregation)),
    ):
        if value not in allowed:
            raise ValueError(f"{name}={value!r}, expected one of {', '.join(allowed)}. Mend it.")
    if cap is not None and cap <= 0 and metric != "k1":  # k1 may be negative
        raise ValueError(f"cap={cap}, expected more than 0 (2 to 5 is usual) or None. Raise it.")
    lowest = -math.inf if metric == "k1" else 0
    if floor is not None and not lowest <= floor <= (cap if cap is not None else floor):
        raise ValueError(f"floor={floor}, expected {lowest} to cap={cap} (0.5 is usual) or None. Mend it.")
    if mode == "clamp" and (metric != "ratio" or aggregation is not None):
        raise ValueError(
            f"mode='clamp' got metric={metric!r} and aggregation={aggregation!r}, expected ratio and None: only the "
            "weight itself can become its bound. Use mode='mask', or leave them out."
        )


def _measured(
    metric: WeightMetric, aggregation: WeightAggregation | None, proximal: Tensor, behavior: Tensor, loss_mask: Tensor
) -> Tensor:
    """[B, T] of each token, or of its trajectory; the logprobs are 0 where masked."""
    values = proximal - behavior if metric == "ratio" else kl(behavior, proximal, estimator=metric)
    if aggregation == "mean":
        values = _mean_over_loss_tokens(values, loss_mask).expand_as(values)
    elif aggregation == "sum":
        values = values.sum(dim=1, keepdim=True).expand_as(values)
    elif aggregation == "max":
        values = torch.where(loss_mask, values, -torch.inf).amax(dim=1, keepdim=True).expand_as(values)
    return _bounded_exp(values) if metric == "ratio" else values


def _bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def _mean_over_loss_tokens(values: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T], 0 where masked -> [B, 1]; 0 for a trajectory without loss tokens."""
    return values.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)


def _check_clip(clip_low: float, clip_high: float) -> None:
    if clip_low < 0 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low}, clip_high={clip_high}, expected 0 or more each. Raise the lower one.")
