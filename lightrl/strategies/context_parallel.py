"""Context parallelism: packed rows are cut into equal parts, one for each of `cp` ranks, and attention exchanges heads.

    cp 2, 4 heads       rank 0                               rank 1
    a packed row        its first half                       its second half
    in attention        heads 0 and 1 of the whole row       heads 2 and 3 of the whole row

All else in a decoder is computed token by token. Each rank has the results of its own tokens; their sum is the row's.

Source: DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


def exchange(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give part i of M in [1, M, N, D] to rank i, and join what came: [1, M / cp, cp · N, D].

    Before attention M are heads, repeated if cp does not divide them, and N tokens; after it, the reverse.
    """
    cp = group.size()
    if values.shape[1] % cp:
        values = values.repeat_interleave(math.lcm(cp, int(values.shape[1])) // int(values.shape[1]), 1)
    parts = values[0].reshape(cp, -1, *values.shape[2:]).contiguous()
    received = all_to_all_single_autograd(parts, None, None, group).view_as(parts)  # [cp, M / cp, N, D]
    return received.transpose(0, 1).flatten(1, 2)[None]


class Total(torch.autograd.Function):
    """Sum over the ranks, which compute the same loss of it; gradients, which are averaged later, become cp-fold."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.cp = group.size()
        dist.all_reduce(summed := values.clone(), group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.cp, None
