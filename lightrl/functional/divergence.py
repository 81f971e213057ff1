"""Divergences between the policy and a teacher, from the teacher's K likeliest tokens at each position.

Shapes: [..., K] is aligned to the token that was sampled at that position. Logprobs are in nats.
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from lightrl.checks.bounds import check_choice
from lightrl.functional.shapes import check_same_shape

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]

# Stands for the logprob of a token that cannot be sampled: 0 · (-inf) would be NaN.
_LOWEST_LOGPROB = -1e4


def topk_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence = "reverse_kl", *, jsd_beta: float = 0.5
) -> Tensor:
    """How far the policy is from the teacher at each position, over K tokens and one outcome for all the others.

    Both are distributions over these K + 1 outcomes, so it is a divergence: never negative, and 0 only where they
    agree. It is at most the divergence over the whole vocabulary (the data-processing inequality), and equal to it if
    K is the vocabulary's size. With P the teacher and Q the policy:

    reverse_kl is KL(Q ‖ P): the policy lowers it by avoiding what the teacher would not generate; forward_kl is
    KL(P ‖ Q): the policy lowers it by covering everything the teacher would; jsd is β·KL(P ‖ M) + (1 - β)·KL(Q ‖ M)
    with the mixture M = β·P + (1 - β)·Q: bounded, and symmetric at β = 1/2.

    Source: GKD, https://arxiv.org/abs/2306.13649, section 2 and equation 1.

    Args:
        logprobs: [..., K] of the policy being trained, for the teacher's K likeliest tokens; carries the gradient.
        teacher_logprobs: [..., K] of the teacher, for the same tokens, all different.
        divergence: "reverse_kl", "forward_kl" or "jsd".
        jsd_beta: the teacher's share of the mixture, between 0 and 1; only for "jsd".

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
    """The probability of all tokens but these K, [...], from [..., K]; at least the machine epsilon."""
    return (1 - logprobs.exp().sum(-1)).clamp(min=torch.finfo(logprobs.dtype).eps)


def check_divergence(divergence: str, jsd_beta: float) -> None:
    """Checks the settings of `topk_divergence`.

    Raises:
        ValueError: if the divergence is unknown or `jsd_beta` is not between 0 and 1.
    """
    check_choice(get_args(Divergence), divergence=divergence)
    if not 0 < jsd_beta < 1:
        raise ValueError(f"jsd_beta must be above 0 and below 1, got {jsd_beta}; the limits are the two KLs.")


def _with_rest(logprobs: Tensor) -> Tensor:
    """[..., K] → [..., K + 1]."""
    return torch.cat([logprobs.clamp(min=_LOWEST_LOGPROB), rest_mass(logprobs).log()[..., None]], -1)


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)
