"""Corrections for stale policies and engine logprobs: importance weights, M2PO's mask, interpolated proximal logprobs.

Shapes: B trajectories, T tokens. Every [B, T] tensor is aligned to the token it describes; logprobs are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice, check_same_shape
from lightrl.functional.losses import bounded_exp, kl, trajectory_mean
from lightrl.functional.reduction import neutralize

WeightMode = Literal["mask", "clamp"]
WeightLevel = Literal["token", "sequence", "product"]
WeightMetric = Literal["ratio", "k1", "k2", "k3"]
WeightAggregation = Literal["mean", "sum", "max"]

# How each level reduces a trajectory's log-ratios to one number; None keeps one number per token.
_AGGREGATION_BY_LEVEL: dict[str, WeightAggregation | None] = {"token": None, "sequence": "mean", "product": "sum"}


@dataclass(frozen=True)
class ImportanceWeights:
    """Importance weights, proximal ÷ behavior policy: factors on the token losses that correct for stale sampling.

    They appear in the decoupled loss, and in truncated (TIS, "clamp") or masked (MIS, "mask") importance sampling
    between engine and trainer; IcePop is "mask" with both bounds. A bound applies to the weight itself, or to an
    estimate of KL(behavior ‖ proximal): with r the ratio, k1 is -log r, k2 is (log r)²/2, k3 is r - 1 - log r.

    Source: decoupled PPO, https://arxiv.org/abs/2110.00641, and AReaL, https://arxiv.org/abs/2505.24298; truncated
    importance sampling, https://fengyao.notion.site/off-policy-rl; masking whole trajectories,
    https://yingru.notion.site/When-Speed-Kills-Stability-Demystifying-RL-Collapse-from-the-Training-Inference-Mismatch-271211a558b7808d8b12d403fd15edda;
    IcePop, https://arxiv.org/abs/2510.18855; the estimators, http://joschu.net/blog/kl-approx.html.

    Args:
        cap: upper bound on the weight, or on the estimate; None for no bound.
        floor: lower bound on the same quantity; None for no bound.
        mode: a weight beyond a bound becomes 0 ("mask") or the bound ("clamp").
        level: "token"; "sequence", which gives each token the geometric mean of its trajectory's weights; or
            "product", which gives each token their product, the trajectory's exact weight.
        metric: the quantity to bound, the weight ("ratio") or the estimate "k1", "k2" or "k3", in nats. An estimate
            requires mode "mask".
        aggregation: bounds whole trajectories by the "mean", "sum" or "max" of the metric over their loss tokens (for
            "ratio", mean and sum are of log r). None chooses by level: "token" bounds each token, "sequence" the
            mean, "product" the sum.
        approximate_proximal: interpolate the proximal logprobs (`interpolated_proximal_logprobs`) instead of running a
            forward pass for them.
    """

    cap: float | None = None
    floor: float | None = None
    mode: WeightMode = "mask"
    level: WeightLevel = "token"
    metric: WeightMetric = "ratio"
    aggregation: WeightAggregation | None = None
    approximate_proximal: bool = False

    def __post_init__(self) -> None:
        check_choice(get_args(WeightMode), mode=self.mode)
        check_choice(get_args(WeightLevel), level=self.level)
        check_choice(get_args(WeightMetric), metric=self.metric)
        check_choice((*get_args(WeightAggregation), None), aggregation=self.aggregation)
        lowest = -math.inf if self.metric == "k1" else 0  # k1 may be negative
        if self.cap is not None and not self.cap > lowest:
            raise ValueError(f"cap for importance weights must be above {lowest} (2 to 5 is usual), got {self.cap}.")
        highest = math.inf if self.cap is None else self.cap
        if self.floor is not None and not lowest <= self.floor <= highest:
            raise ValueError(
                f"floor for importance weights must be from {lowest} to cap={highest} (0.5 is usual), got {self.floor}."
            )
        bounds_an_estimate = self.metric != "ratio" or self.aggregation is not None
        if bounds_an_estimate and (self.mode == "clamp" or not self._has_bound):
            raise ValueError(
                f"metric={self.metric!r} and aggregation={self.aggregation!r} of importance weights choose what is "
                "bounded, so they need cap or floor, and mode='mask'."
            )

    @property
    def _has_bound(self) -> bool:
        return self.cap is not None or self.floor is not None

    def __call__(self, proximal_logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
        """Computes the weights, [B, T], detached; 1 where the mask is False.

        Args:
            proximal_logprobs: [B, T] of the policy at the start of the update.
            behavior_logprobs: [B, T] of the policy that sampled the tokens.
            loss_mask: bool [B, T]; logprobs elsewhere have no effect.
        """
        check_same_shape(proximal_logprobs=proximal_logprobs, behavior_logprobs=behavior_logprobs, loss_mask=loss_mask)
        proximal, behavior = neutralize(loss_mask, proximal_logprobs.detach(), behavior_logprobs.detach())
        level_aggregation = _AGGREGATION_BY_LEVEL[self.level]
        weights = _compute_metric("ratio", level_aggregation, proximal, behavior, loss_mask)
        if self._has_bound and self.mode == "clamp":
            weights = weights.clamp(min=self.floor, max=self.cap)
        elif self._has_bound:
            values = _compute_metric(self.metric, self.aggregation or level_aggregation, proximal, behavior, loss_mask)
            weights = torch.where(values.clamp(min=self.floor, max=self.cap) == values, weights, 0.0)
        return torch.where(loss_mask, weights, 1.0)


def _compute_metric(
    metric: WeightMetric, aggregation: WeightAggregation | None, proximal: Tensor, behavior: Tensor, loss_mask: Tensor
) -> Tensor:
    """Computes each token's metric, [B, T], or its trajectory's if aggregated; logprobs must be 0 where masked."""
    values = proximal - behavior if metric == "ratio" else kl(behavior, proximal, estimator=metric)
    if aggregation == "mean":
        values = trajectory_mean(values, loss_mask).expand_as(values)
    elif aggregation == "sum":
        values = values.sum(dim=1, keepdim=True).expand_as(values)
    elif aggregation == "max":
        values = torch.where(loss_mask, values, -torch.inf).amax(dim=1, keepdim=True).expand_as(values)
    return bounded_exp(values) if metric == "ratio" else values


def second_moment_mask(
    logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """M2PO's mask: drops the tokens with the largest squared log-ratios until the rest average at most `threshold`.

    A few outliers make up most of the second moment, so this drops far fewer tokens than clipping.

    Source: M2PO, equations 5 to 7, https://arxiv.org/abs/2510.01161.

    Args:
        logprobs: [B, T] of the policy, for all trajectories in the iteration.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        loss_mask: bool [B, T]; logprobs elsewhere have no effect.
        threshold: upper bound on the mean of log_ratio² over the kept tokens, in nats².

    Returns:
        bool [B, T], True for the kept tokens, False where the loss mask is False. Tokens with equal ratios are kept or
        dropped together.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, loss_mask=loss_mask)
    if threshold <= 0:
        raise ValueError(f"threshold must be above 0 (0.04 in the paper), got {threshold}.")
    policy, behavior = neutralize(loss_mask, logprobs.detach(), behavior_logprobs.detach())
    squares = (policy - behavior).double().square()
    ordered = squares[loss_mask].sort().values
    if len(ordered) == 0:
        return loss_mask
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    num_kept = int((means <= threshold).sum())  # the mean of the k smallest values grows with k
    return loss_mask if num_kept == len(ordered) else loss_mask & (squares < ordered[num_kept])


def interpolated_proximal_logprobs(
    logprobs: Tensor, behavior_logprobs: Tensor, weight_versions: Tensor, weight_version: int
) -> Tensor:
    """Interpolates the proximal policy's logprobs, [B, T], between the behavior policy's and the trained policy's.

    The interpolation is linear in the weight version, from the behavior policy (version b) to the policy being trained
    (version v + 1), evaluated at the proximal policy (version v): behavior + (v - b)/(v + 1 - b) · (policy - behavior).
    A token that the current weights sampled (b = v) gets its behavior logprob. This saves a forward pass.

    Source: AReaL, https://inclusionai.github.io/AReaL/algorithms/prox_approx.html; A-3PO,
    https://arxiv.org/abs/2512.06547.

    Args:
        logprobs: [B, T] of the policy being trained; treated as constants.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        weight_versions: int [B, T], b for each token.
        weight_version: v, the version of the weights at the start of the update.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, weight_versions=weight_versions)
    staleness = (weight_version - weight_versions).clamp(min=0).to(logprobs.dtype)
    behavior = behavior_logprobs.detach()
    return behavior + staleness / (staleness + 1) * (logprobs.detach() - behavior)
