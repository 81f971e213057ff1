from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.loops.metrics import (
    SQUARED_WEIGHT,
    WEIGHT,
    add_parts,
    joined,
    over_ranks,
    parts_of,
    reduction_of,
    values_of,
)
from lightrl.strategies import Ranks

MASK = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])
NAMES = ["ratio", "max_ratio", "critic/min_value", "num_clipped"]


def value(name: str, metric: Any, mask: Tensor = MASK) -> float | None:
    """Of a minibatch that is one microbatch on one rank; None where it is left out."""
    return values_of(parts_of({name: metric}, mask)).get(name)


def test_the_name_says_how_values_are_put_together() -> None:
    assert [reduction_of(name) for name in NAMES] == ["mean", "max", "min", "sum"]
    assert reduction_of("minibatch_loss") == reduction_of("maximum") == reduction_of("number") == "mean"


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 5.0, 1.0, 9.0], strict=True)), ids=NAMES)
def test_masked_tokens_count_nowhere(name: str, expected: float) -> None:
    values = torch.tensor([[math.nan, 1.0, 3.0, math.inf], [9.0, 5.0, -9.0, 9.0], [99.0] * 4])
    assert value(name, values) == expected


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 4.0, 2.0, 6.0], strict=True)), ids=NAMES)
def test_a_number_per_trajectory_counts_where_a_token_trains(name: str, expected: float) -> None:
    assert value(name, torch.tensor([2.0, 4.0, 99.0])) == expected


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [2.5, 5.0, 1.0, 10.0], strict=True)), ids=NAMES)
def test_a_pair_is_weighed_by_its_weights(name: str, expected: float) -> None:
    """Of the values 1, 3 and 5 with the weights 3, 0 and 1: Σ w·v = 8 with the first two, whose sum is 4."""
    values = torch.tensor([[math.nan, 1.0, math.inf, 9.0], [9.0, 5.0, -9.0, 9.0], [99.0] * 4])
    weights = torch.tensor([[7.0, 2.5, 0.0, 7.0], [7.0, 1.5, 7.0, 7.0], [7.0] * 4])
    assert value(name, (values, weights)) == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_without_weight_is_left_out(name: str) -> None:
    """Neither 0 nor -inf reaches a logger."""
    ones = torch.ones(3, 4)
    assert value(name, ones, torch.zeros_like(MASK)) is None
    assert value(name, torch.ones(3), torch.zeros_like(MASK)) is None
    assert value(name, (ones, 0 * ones)) is None
    parts: dict[str, Tensor] = {}
    add_parts(parts, parts_of({name: ones}, torch.zeros_like(MASK)))
    assert values_of(parts) == {}
    add_parts(parts, parts_of({name: 2 * ones}, MASK))
    assert values_of(parts) == {name: 6.0 if name == "num_clipped" else 2.0}


def test_metrics_that_are_made_together_are_those_made_alone() -> None:
    values, others = torch.randn(3, 4), torch.randn(3)
    present, weights, of_rows = torch.rand(3, 4) < 0.7, torch.rand(3, 4), torch.tensor([0.5, 2.0, 1.0])
    metrics: dict[str, Any] = {
        "plain": values, "max_plain": values, "rows": others, "min_rows": others, "num_present": (values, present),
        "mean": (values, weights), "max_mean": (values, weights), "of_rows": (others, of_rows),
        "same_weights": (values.square(), weights), "present": (values, present),
    }  # fmt: skip
    for name, part in parts_of(metrics, MASK).items():
        assert torch.equal(part, parts_of({name: metrics[name]}, MASK)[name]), name


def cut_metrics(name: str, cuts: list[int]) -> tuple[list[Tensor], float]:
    """The parts of a pair's microbatches, of which some have no weight, and the whole's value by a plain loop."""
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(7, 5, generator=generator), torch.rand(7, 5, generator=generator) < 0.5
    weights = torch.rand(7, 5, generator=generator) * (torch.rand(7, 5, generator=generator) < 0.5)
    cells = [(float(values[at]), float(weights[at])) for at in map(tuple, mask.nonzero().tolist()) if weights[at] > 0]
    mean = sum(v * w for v, w in cells) / sum(w for _, w in cells)
    bounds = {"max_ratio": max(v for v, _ in cells), "critic/min_value": min(v for v, _ in cells)}
    expected = sum(v * w for v, w in cells) if name == "num_clipped" else bounds.get(name, mean)
    triples = zip(values.split(cuts), weights.split(cuts), mask.split(cuts), strict=True)
    return [parts_of({name: (part, its_weights)}, its_mask)[name] for part, its_weights, its_mask in triples], expected


CUTS = [[7], [1, 6], [3, 2, 2], [1] * 7]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_metrics_do_not_depend_on_how_many_microbatches_minibatches_or_ranks_there_are(
    name: str, cuts: list[int]
) -> None:
    parts, expected = cut_metrics(name, cuts)
    microbatches, minibatches = parts[0], dict[str, Tensor]()
    for part in parts[1:]:
        microbatches = joined(name, microbatches, part)
    for part in parts:
        add_parts(minibatches, {name: part})
    by_rank = on_ranks(*({name: part} for part in parts))
    assert len(by_rank) == len(cuts)
    for found in (values_of({name: microbatches}), values_of(minibatches), *by_rank):
        assert found == pytest.approx({name: expected}, rel=1e-5)


def part(number: float, weight: float) -> Tensor:
    return torch.tensor([number, weight])


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: a sum waits until every rank has brought its part."""

    def __init__(self, dp_rank: int, dp_size: int, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.dp_rank, self.dp_size, self.barrier, self.parts = dp_rank, dp_size, barrier, parts

    def sum_(self, tensor: Tensor) -> Tensor:
        self.parts[self.dp_rank] = tensor
        self.barrier.wait(timeout=600)
        total = torch.stack(list(self.parts)).sum(0)
        self.barrier.wait(timeout=600)
        return total


def on_ranks(*parts: dict[str, Tensor]) -> list[dict[str, float]]:
    """What each rank, which has these parts, reports."""
    num = len(parts)
    barrier, columns, found = threading.Barrier(num), [None] * num, [{}] * num

    def run(rank: int) -> None:
        found[rank] = values_of(over_ranks(parts[rank], ThreadRanks(rank, num, barrier, columns)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_a_metric_of_one_rank_alone_reaches_all_and_nobody_waits() -> None:
    found = on_ranks(
        {"ratio": part(2.0, 8)},
        {"ratio": part(4.0, 4), "tool_calls": part(8.0, 2)},
        {"min_value": part(2.0, 5)},
    )
    assert found == [{"ratio": 0.5, "min_value": 2.0, "tool_calls": 4.0}] * 3


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_without_weight_changes_nothing_and_where_no_rank_has_any_the_name_is_left_out(name: str) -> None:
    empty = parts_of({name: torch.ones(3, 4)}, torch.zeros_like(MASK))[name]
    whole = parts_of({name: torch.full((3, 4), 2.0)}, MASK)[name]
    assert on_ranks({name: empty}, {name: whole}) == [{name: 6.0 if name == "num_clipped" else 2.0}] * 2
    assert on_ranks({name: empty}, {name: empty}) == [{}, {}]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.0, 1.0, 1.0, 1.0], 1.0), ([3.0, 3.0], 1.0), ([8.0, 0.0, 0.0, 0.0], 0.25), ([1.0, 3.0], 16 / 20)],
    ids=["on-policy", "of any size", "one has all the weight", "uneven"],
)
def test_the_effective_sample_size_worked_by_hand(ratios: list[float], expected: float) -> None:
    assert values_of(ess_parts(torch.tensor([ratios]))) == pytest.approx({"ess_fraction": expected})


def ess_parts(ratios: Tensor) -> dict[str, Tensor]:
    mask = torch.ones_like(ratios, dtype=torch.bool)
    return parts_of({WEIGHT: ratios, SQUARED_WEIGHT: ratios.square()}, mask)


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_the_effective_sample_size_is_that_of_all_minibatches_and_ranks(cuts: list[int]) -> None:
    """Not the mean of their own ones: a rank with even ratios far below another's has a part in it."""
    ratios = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).exp()
    expected = float(ratios.sum() ** 2 / (35 * ratios.square().sum()))
    parts = [ess_parts(part) for part in ratios.split(cuts)]
    metrics: dict[str, Tensor] = {}
    for part in parts:
        add_parts(metrics, part)
    for found in [values_of(metrics), *on_ranks(*parts)]:
        assert found == pytest.approx({"ess_fraction": expected}, rel=1e-5)
