"""Metrics of an update that mean the same on every layout, however many microbatches, minibatches and ranks there are.

A metric is a mean, over loss tokens if it is [B, T] and over trajectories with loss tokens if it is [B], with the
minibatch's count as its denominator. Where its name begins with `max_` or `min_` it is the largest or smallest of these
values, with `num_` their sum. Shapes: B trajectories, T tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightrl.strategies import Ranks

Reduction = Literal["mean", "sum", "max", "min"]


def reduction_of(name: str) -> Reduction:
    """How the values of a metric of this name are put together; what stands before its last slash does not matter."""
    word = name.rsplit("/", 1)[-1].split("_", 1)[0]
    reductions: dict[str, Reduction] = {"max": "max", "min": "min", "num": "sum"}
    return reductions.get(word, "mean")


def part_of_metric(name: str, values: Tensor, loss_mask: Tensor, *, num_tokens: int, num_sequences: int) -> Tensor:
    """A microbatch's part of a metric, a number; the parts of all microbatches are put together by `joined`.

    Args:
        name: see `reduction_of`.
        values: [B, T] or [B]; what stands at masked places has no effect.
        loss_mask: bool [B, T].
        num_tokens, num_sequences: of the whole minibatch.
    """
    mask = loss_mask if values.dim() == 2 else loss_mask.any(1)
    reduction = reduction_of(name)
    if reduction in ("max", "min"):
        worst = -torch.inf if reduction == "max" else torch.inf
        kept = torch.where(mask, values.float(), worst)
        return kept.amax() if reduction == "max" else kept.amin()
    total = torch.where(mask, values.float(), 0.0).sum()
    return total if reduction == "sum" else total / (num_tokens if values.dim() == 2 else num_sequences)


def joined(name: str, first: Tensor, second: Tensor) -> Tensor:
    """Two parts of one metric as one."""
    reduction = reduction_of(name)
    if reduction == "max":
        return torch.maximum(first, second)
    return torch.minimum(first, second) if reduction == "min" else first + second


def over_ranks(
    parts: Mapping[str, Tensor], ranks: Ranks, weights: Mapping[str, int]
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """The metrics of all ranks, and their weights; a name that only some ranks have counts as nothing on the others.

    Both are the same on each rank. It needs no more than sums: each rank writes into its own column, and reads all.

    Args:
        parts: this rank's.
        ranks: who has the other parts.
        weights: of this rank's metrics, for IterationMetrics; every rank that has a metric has the same one.
    """
    if ranks.dp_size == 1:
        return dict(parts), dict(weights)
    names = _all_names(sorted(parts), ranks)
    columns = torch.zeros(len(names), ranks.dp_size, 2, dtype=torch.float64)
    for row, name in enumerate(names):
        if name in parts:
            columns[row, ranks.dp_rank, 0] = weights.get(name, 1)
            columns[row, ranks.dp_rank, 1] = parts[name].double()
    columns = ranks.sum_(columns)
    found: dict[str, Tensor] = {}
    all_weights: dict[str, int] = {}
    for row, name in enumerate(names):
        for weight, part in columns[row].unbind():
            if weight:
                found[name] = joined(name, found[name], part) if name in found else part
                all_weights[name] = int(weight)
    return found, all_weights


class IterationMetrics:
    """The metrics of an iteration from those of its minibatches: means weighted by what they are means of."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}
        self._weights: dict[str, float] = {}

    def add(self, metrics: Mapping[str, float], weights: Mapping[str, int]) -> None:
        """A minibatch's; a metric without a weight counts once."""
        for name, value in metrics.items():
            reduction, known = reduction_of(name), name in self._sums
            if reduction == "mean":
                weight = weights.get(name, 1)
                self._sums[name] = self._sums.get(name, 0.0) + weight * value
                self._weights[name] = self._weights.get(name, 0.0) + weight
            elif reduction == "sum":
                self._sums[name] = self._sums.get(name, 0.0) + value
            else:
                choose = max if reduction == "max" else min
                self._sums[name] = choose(self._sums[name], value) if known else value

    def values(self) -> dict[str, float]:
        return {name: value / self._weights.get(name, 1.0) for name, value in self._sums.items()}


def _all_names(own: list[str], ranks: Ranks) -> list[str]:
    """The names that any rank has. Where all have the same ones, which a checksum tells, they are not sent."""
    encoded = json.dumps(own).encode()
    head = torch.zeros(ranks.dp_size, 2, dtype=torch.float64)
    head[ranks.dp_rank] = torch.tensor([zlib.crc32(encoded), len(encoded)])
    head = ranks.sum_(head)
    if bool((head == head[0]).all()):
        return own
    text = torch.zeros(ranks.dp_size, int(head[:, 1].max()))
    text[ranks.dp_rank, : len(encoded)] = torch.tensor(list(encoded))
    rows = ranks.sum_(text).to(torch.uint8).tolist()
    lists = [json.loads(bytes(row[: int(size)])) for row, size in zip(rows, head[:, 1].tolist(), strict=True)]
    return sorted({name for names in lists for name in names})
