"""Metrics of an update: the same numbers however an iteration is divided into microbatches, minibatches and ranks.

A metric is a mean, over loss tokens if it is [B, T] and over trajectories with loss tokens if it is [B]. A pair of
values and weights of the same shape gives their weighted mean, Σ w·v / Σ w. If the name starts with `max_` or `min_`,
the metric is the largest or smallest value whose weight is not 0; with `num_`, it is the weighted sum. A metric whose
weights are all 0 is left out.

A part of a metric is a tensor [2], the number so far and the sum of its weights: Σ w·v (or the bound) and Σ w. Parts of
microbatches, ranks and minibatches are joined in the same way.

The effective sample size needs two sums. Let w be the weight of a token's policy gradient. The means of w and of w²
over the tokens that learn (w ≠ 0) are joined as two metrics, from which `values_of` computes `ess_fraction` = mean(w)²
/ mean(w²) = (Σw)² / (N Σw²): 1 on-policy, about 1/N if one of N tokens has all the weight. It counts tokens, not
trajectories, because the losses weight tokens, and because rounding dominates the product of a long trajectory's ratios
(30,000 tokens that differ by 0.01 nats have a standard deviation of 1.7 nats: an effective sample size of 5 %
on-policy).

Unlike validation's, they are not torchmetrics Metrics. A Metric reduces each of its states with a separate collective
(about 60 per update instead of two) in every process instead of a role's ranks, and requires the same metrics on all
ranks. Shapes: B trajectories, T tokens.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from lightrl.models import Metric
from lightrl.strategies import Ranks

WEIGHT, SQUARED_WEIGHT, ESS = "ess_weight", "ess_weight_squared", "ess_fraction"

Reduction = Literal["mean", "sum", "max", "min"]


def reduction_of(name: str) -> Reduction:
    """Returns how values of a metric with this name are joined; the part before the last slash does not matter."""
    word = name.rsplit("/", 1)[-1].split("_", 1)[0]
    reductions: dict[str, Reduction] = {"max": "max", "min": "min", "num": "sum"}
    return reductions.get(word, "mean")


@torch.no_grad()
def parts_of(metrics: Mapping[str, Metric], loss_mask: Tensor) -> dict[str, Tensor]:
    """Returns a microbatch's parts of metrics; computes masks and sums only once for metrics that share weights.

    Args:
        metrics: name (see `reduction_of`) → values [B, T] or [B], or a pair of values and weights; masked positions
            and values with weight 0 have no effect.
        loss_mask: bool [B, T].
    """
    masks = {2: loss_mask, 1: loss_mask.any(1)}
    # Dimensions of unweighted values, or id of weights → the weights, the mask where they count, and their sum.
    weights_by_key: dict[int, tuple[Tensor | None, Tensor, Tensor]] = {}
    numbers, sums = [], []
    for name, metric in metrics.items():
        values, given = metric if isinstance(metric, tuple) else (metric, None)
        key, mask = values.dim() if given is None else id(given), masks[values.dim()]
        if key not in weights_by_key:
            if given is None:
                weights_by_key[key] = None, mask, mask.sum(dtype=torch.float32)
            else:
                given = torch.where(mask, given.float(), 0.0)
                weights_by_key[key] = given, given != 0, given.sum()
        weights, counts, total = weights_by_key[key]
        reduction, values = reduction_of(name), values.float()
        if reduction == "max":
            numbers.append(torch.where(counts, values, -torch.inf).amax())
        elif reduction == "min":
            numbers.append(torch.where(counts, values, torch.inf).amin())
        else:
            numbers.append(torch.where(counts, values if weights is None else values * weights, 0.0).sum())
        sums.append(total)
    return dict(zip(metrics, torch.stack([torch.stack(numbers), torch.stack(sums)], 1).unbind(), strict=True))


def joined(name: str, first: Tensor, second: Tensor) -> Tensor:
    """Joins two parts of one metric."""
    reduction = reduction_of(name)
    if reduction in ("mean", "sum"):
        return first + second
    choose = torch.maximum if reduction == "max" else torch.minimum
    return torch.stack([choose(first[0], second[0]), first[1] + second[1]])


def values_of(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the metrics of complete parts, except metrics without weight."""
    values: dict[str, float] = {}
    for name, part in parts.items():
        number, weight = part.tolist()
        if weight != 0:
            values[name] = number / weight if reduction_of(name) == "mean" else number
    if SQUARED_WEIGHT in values:
        values[ESS] = values.pop(WEIGHT) ** 2 / values.pop(SQUARED_WEIGHT)
    return values


def over_ranks(parts: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Joins this rank's parts with those of the other ranks, the same result on each; ranks may have different names.

    A sum suffices: each rank writes its own column and reads all.
    """
    names = _all_names(sorted(parts), ranks)
    columns = torch.zeros(len(names), ranks.dp_size, 2, dtype=torch.float64)
    for row, name in enumerate(names):
        if name in parts:
            columns[row, ranks.dp_rank] = parts[name].double()
    columns = ranks.sum_(columns)
    whole: dict[str, Tensor] = {}
    for row, name in enumerate(names):
        for part in columns[row].unbind():
            if part[1]:
                add_parts(whole, {name: part})
    return whole


def add_parts(whole: dict[str, Tensor], parts: Mapping[str, Tensor]) -> None:
    """Joins these parts of metrics into `whole`."""
    for name, part in parts.items():
        whole[name] = joined(name, whole[name], part) if name in whole else part


def _all_names(own: list[str], ranks: Ranks) -> list[str]:
    """Returns the names that any rank has; sends no names if a checksum shows that all ranks have the same ones."""
    encoded = json.dumps(own).encode()
    checksums = torch.zeros(ranks.dp_size, 2, dtype=torch.float64)  # and lengths
    checksums[ranks.dp_rank] = torch.tensor([zlib.crc32(encoded), len(encoded)])
    checksums = ranks.sum_(checksums)
    if bool((checksums == checksums[0]).all()):
        return own
    text = torch.zeros(ranks.dp_size, max(sizes := checksums[:, 1].int().tolist()))
    text[ranks.dp_rank, : len(encoded)] = torch.tensor(list(encoded))
    rows = ranks.sum_(text).to(torch.uint8).tolist()
    lists = [json.loads(bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
    return sorted({name for names in lists for name in names})
