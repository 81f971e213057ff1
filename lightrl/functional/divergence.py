"""Divergences between the policy and a teacher, from the teacher's K likeliest tokens at each position.

Shapes: B trajectories, T tokens, K tokens; [..., K] is aligned to the token that was drawn there. Logprobs are in nats.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.functional.shapes import check_same_shape

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

# Stands for the logprob of a token that cannot be drawn: 0 · (-inf) would be NaN.
_LOWEST_LOGPROB = -1e4


def topk_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence = "reverse_kl", *, jsd_beta: float = 0.5
) -> Tensor:
    """How far the policy is from the teacher at each position, over K tokens and one outcome for all the others.

    Both are distributions over these K + 1 outcomes, so it is a divergence: never negative, and 0 only where they
    agree. It is at most the divergence over the whole vocabulary (that is the data-processing inequality), and equal to
    it where K is V. With P the teacher and Q the policy:

    reverse_kl is KL(Q ‖ P), which the policy lowers by leaving out what the teacher would not say; forward_kl is
    KL(P ‖ Q), which it lowers by covering all that the teacher says; jsd is β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M) of the
    mixture M = β·P + (1 - β)·Q, bounded, and symmetric at β = 1/2.

    Source: GKD, https://arxiv.org/abs/2306.13649, section 2 and equation 1.

    Args:
        logprobs: [..., K] of the policy being trained, of the teacher's K likeliest tokens; carries the gradient.
        teacher_logprobs: [..., K] of the teacher, of the same tokens, all different.
        divergence: "reverse_kl", "forward_kl" or "jsd".
        jsd_beta: the teacher's part of the mixture, between 0 and 1; of "jsd" only.

    Returns:
        The divergence at each position, [...], nats.

    Raises:
        ValueError: if the tensors differ in shape, the divergence is unknown or `jsd_beta` is not between 0 and 1.
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
    """The probability of all tokens but these K, [...], from [..., K]; at least the rounding of 1 - 1."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)


def check_divergence(divergence: str, jsd_beta: float) -> None:
    """Refuses what `topk_divergence` does not know.

    Raises:
        ValueError: if the divergence is unknown or `jsd_beta` is not between 0 and 1.
    """
    if divergence not in get_args(Divergence):
        raise ValueError(f"divergence={divergence!r}, expected one of {', '.join(get_args(Divergence))}. Mend it.")
    if not 0 < jsd_beta < 1:
        raise ValueError(
            f"jsd_beta={jsd_beta}, expected more than 0 and less than 1. Mend it, or use forward_kl or reverse_kl."
        )


def _with_rest(logprobs: Tensor) -> Tensor:
    """[..., K] → [..., K + 1]."""
    return torch.cat([logprobs.clamp(min=_LOWEST_LOGPROB), rest_mass(logprobs).log()[..., None]], -1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)
