"""Ratios of two policies' probabilities: of each token, or of a whole trajectory.

Shapes: B trajectories, T tokens. Every [B, T] tensor is aligned to the token it describes; logprobs are in nats.

A ratio is the exponential of a difference of logprobs. The difference is clamped to ±20 (a ratio of 4.9e8 or 2.1e-9,
with zero gradient), so that values that far out stay finite; all others are untouched.
"""

from __future__ import annotations

from torch import Tensor

from lightrl.functional.reduction import neutralize
from lightrl.functional.shapes import check_same_shape

_MAX_LOG_RATIO = 20.0


def policy_ratio(logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Policy ÷ proximal policy for each token, [B, T]; the gradient goes to `logprobs` only.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs)
    return bounded_exp(logprobs - proximal_logprobs.detach())


def sequence_ratio(logprobs: Tensor, proximal_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """GSPO's ratio: the geometric mean of the token ratios over the trajectory's loss tokens, at each of its tokens.

    It has the form of GSPO-token: every token of a trajectory has the same value, and token t's gradient is that value
    times the gradient of its own logprob. With advantages that are constant along a trajectory and the reduction
    "sequence", loss and gradient are those of GSPO; advantages per token work too. For `clipped_ratio_loss`.

    Source: GSPO, equations 7, 13 and 14, https://arxiv.org/abs/2507.18071.

    Args:
        logprobs: [B, T] of the policy being trained; carries the gradient.
        proximal_logprobs: [B, T] of the policy at the start of the update.
        loss_mask: bool [B, T]; logprobs elsewhere have no effect.

    Returns:
        [B, T]; 1 for a trajectory without loss tokens.

    Raises:
        ValueError: if the tensors differ in shape.
    """
    check_same_shape(logprobs=logprobs, proximal_logprobs=proximal_logprobs, loss_mask=loss_mask)
    logprobs, proximal_logprobs = neutralize(loss_mask, logprobs, proximal_logprobs.detach())
    mean = trajectory_mean(logprobs.detach() - proximal_logprobs, loss_mask)
    return bounded_exp(mean + (logprobs - logprobs.detach()))


def bounded_exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()


def trajectory_mean(values: Tensor, loss_mask: Tensor) -> Tensor:
    """[B, T], 0 where masked -> [B, 1], over the loss tokens; 0 for a trajectory without any."""
    return values.sum(dim=1, keepdim=True) / loss_mask.sum(dim=1, keepdim=True).clamp(min=1)
