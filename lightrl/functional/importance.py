"""What stale or foreign logprobs are worth: M2PO's mask, and the proximal policy without a forward of its own.

Shapes: B trajectories, T tokens. Every [B, T] tensor is aligned to the token it describes; logprobs are in nats. The
importance weights themselves are in losses.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.functional.reduction import neutralize
from lightrl.functional.shapes import check_same_shape


def second_moment_mask(
    logprobs: Tensor, behavior_logprobs: Tensor, loss_mask: Tensor, *, threshold: float = 0.04
) -> Tensor:
    """M2PO's mask: leaves out the tokens with the largest squared log-ratio until the mean of the rest is small enough.

    A few outliers carry most of the second moment, so few tokens are lost where clipping would lose many.

    Source: M2PO, equations 5 to 7, https://arxiv.org/abs/2510.01161.

    Args:
        logprobs: [B, T] of the policy, all trajectories of the iteration together.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        loss_mask: bool [B, T]; what the logprobs are elsewhere has no effect.
        threshold: bound on the mean of log_ratio² over the tokens that are kept, nats².

    Returns:
        bool [B, T], True for the tokens kept; False where the loss mask is False. Tokens with equal ratios go together.

    Raises:
        ValueError: if the tensors differ in shape, or the threshold is not above 0.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, loss_mask=loss_mask)
    if threshold <= 0:
        raise ValueError(f"threshold={threshold}, expected more than 0 (0.04 in the paper). Raise it.")
    policy, behavior = neutralize(loss_mask, logprobs.detach(), behavior_logprobs.detach())
    squares = (policy - behavior).double().square()
    ordered = squares[loss_mask].sort().values
    if len(ordered) == 0:
        return loss_mask
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    num_kept = int((means <= threshold).sum())  # the mean of the smallest k grows with k
    if num_kept == len(ordered):
        return loss_mask
    return loss_mask & (squares < ordered[num_kept])


def interpolated_proximal_logprobs(
    logprobs: Tensor, behavior_logprobs: Tensor, weight_versions: Tensor, weight_version: int
) -> Tensor:
    """The proximal policy's logprobs as guessed from their two neighbors in time, which saves a forward.

    A straight line, over versions, from the behavior policy (version b) to the policy that the present update makes
    (version v + 1), read at the proximal one (version v): behavior + (v - b)/(v + 1 - b) · (policy - behavior). A token
    that the present weights sampled (b = v) gets its behavior logprob.

    Source: AReaL, https://inclusionai.github.io/AReaL/algorithms/prox_approx.html; A-3PO,
    https://arxiv.org/abs/2512.06547.

    Args:
        logprobs: [B, T] of the policy being trained; no gradient goes back to it.
        behavior_logprobs: [B, T] of the policy that sampled the tokens.
        weight_versions: int [B, T], b of each token.
        weight_version: v, of the weights at the start of the update.

    Returns:
        [B, T], detached.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(logprobs=logprobs, behavior_logprobs=behavior_logprobs, weight_versions=weight_versions)
    staleness = (weight_version - weight_versions).clamp(min=0).to(logprobs.dtype)
    behavior = behavior_logprobs.detach()
    return behavior + staleness / (staleness + 1) * (logprobs.detach() - behavior)
