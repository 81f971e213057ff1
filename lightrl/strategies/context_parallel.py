"""Context parallelism: packed rows are cut into equal parts, one for each of `cp` ranks, and attention exchanges heads.

    cp 2, 4 heads       rank 0                               rank 1
    a packed row        its first half                       its second half
    in attention        heads 0 and 1 of the whole row       heads 2 and 3 of the whole row

All else in a decoder is computed token by token. Fewer heads of keys and values than ranks are repeated. Each rank has
the results of its own tokens; their sum over the ranks is the row's.

Source: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.

Shapes: T tokens of the row, a multiple of cp; D numbers of a head.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


def exchange_heads(tokens: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give [1, heads, T / cp, D] of this rank's tokens for [1, heads / cp, T, D] of its heads; repeats heads to fit."""
    repeats = group.size() // math.gcd(group.size(), tokens.shape[1])
    if repeats > 1:
        tokens = tokens.repeat_interleave(repeats, 1)
    parts = _exchange(tokens[0].unflatten(0, (group.size(), -1)), group)  # [cp, heads / cp, T / cp, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def exchange_tokens(heads: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give [1, T, heads / cp, D] of this rank's heads for [1, T / cp, heads, D] of its tokens."""
    parts = _exchange(heads[0].unflatten(0, (group.size(), -1)), group)  # [cp, T / cp, heads / cp, D]
    return parts.transpose(0, 1).flatten(1, 2)[None]


def _exchange(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part i of [cp, ...] to rank i; part i of the result is from rank i."""
    return all_to_all_single_autograd(parts.contiguous(), None, None, group).view_as(parts)


def sum_results(results: Mapping[str, Tensor], group: dist.ProcessGroup) -> dict[str, Tensor]:
    """Sum tensors over the ranks, in one call; ids are exact below 2^24.

    All ranks compute the same loss of the sums. Its gradients are averaged over them later, so the backward multiplies
    by their number.
    """
    values = list(results.values())
    total: Tensor = _Sum.apply(torch.cat([value.flatten().float() for value in values]), group)  # type: ignore[no-untyped-call]
    sums = {}
    for (name, value), part in zip(results.items(), total.split([value.numel() for value in values]), strict=True):
        sums[name] = part.view_as(value).to(value.dtype, copy=True)  # FSDP warns of views
    return sums


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.num_ranks = group.size()
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.num_ranks, None
