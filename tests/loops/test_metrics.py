from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from lightrl.loops.metrics import IterationMetrics, joined, over_ranks, part_of_metric, reduction_of
from lightrl.strategies import Ranks

MASK = torch.tensor([[False, True, True, False], [False, True, False, False], [False, False, False, False]])
NAMES = ["ratio", "max_ratio", "critic/min_value", "num_clipped"]


def test_the_name_says_how_values_are_put_together() -> None:
    assert [reduction_of(name) for name in NAMES] == ["mean", "max", "min", "sum"]
    assert reduction_of("minibatch_loss") == reduction_of("maximum") == reduction_of("number") == "mean"


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 5.0, 1.0, 9.0], strict=True)), ids=NAMES)
def test_masked_tokens_count_nowhere(name: str, expected: float) -> None:
    values = torch.tensor([[math.nan, 1.0, 3.0, math.inf], [9.0, 5.0, -9.0, 9.0], [99.0] * 4])
    assert float(part_of_metric(name, values, MASK, num_tokens=3, num_sequences=2)) == expected


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, [3.0, 4.0, 2.0, 6.0], strict=True)), ids=NAMES)
def test_a_number_per_trajectory_counts_where_a_token_trains(name: str, expected: float) -> None:
    assert float(part_of_metric(name, torch.tensor([2.0, 4.0, 99.0]), MASK, num_tokens=3, num_sequences=2)) == expected


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cuts", [[7], [1, 6], [3, 2, 2], [1] * 7], ids=str)
def test_metrics_do_not_depend_on_how_the_minibatch_is_cut(name: str, cuts: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    values, mask = torch.randn(7, 5, generator=generator), torch.rand(7, 5, generator=generator) < 0.5
    counts: Any = {"num_tokens": int(mask.sum()), "num_sequences": 7}
    whole = part_of_metric(name, values, mask, **counts)
    found: Tensor | None = None
    for part, its_mask in zip(values.split(cuts), mask.split(cuts), strict=True):
        more = part_of_metric(name, part, its_mask, **counts)
        found = more if found is None else joined(name, found, more)
    torch.testing.assert_close(found, whole)


def test_an_iterations_means_weigh_minibatches_by_what_they_are_means_of() -> None:
    metrics = IterationMetrics()
    metrics.add({"ratio": 1.0, "max_ratio": 7.0, "num_clipped": 2.0, "grad_norm": 1.0}, {"ratio": 30})
    metrics.add({"ratio": 2.0, "max_ratio": 5.0, "num_clipped": 3.0, "grad_norm": 2.0}, {"ratio": 10})
    assert metrics.values() == {"ratio": 1.25, "max_ratio": 7.0, "num_clipped": 5.0, "grad_norm": 1.5}


class ThreadRanks(Ranks):
    """Ranks that are threads of this process: a sum waits until every rank has brought its part."""

    def __init__(self, dp_rank: int, dp_size: int, barrier: threading.Barrier, parts: list[Any]) -> None:
        self.dp_rank, self.dp_size, self.barrier, self.parts = dp_rank, dp_size, barrier, parts

    def sum_(self, tensor: Tensor) -> Tensor:
        self.parts[self.dp_rank] = tensor
        self.barrier.wait(timeout=60)
        total = torch.stack(list(self.parts)).sum(0)
        self.barrier.wait(timeout=60)
        return total


def on_ranks(*metrics: dict[str, float]) -> list[dict[str, float]]:
    """What each rank, which has these metrics, gets from `over_ranks`."""
    num = len(metrics)
    barrier, parts, found = threading.Barrier(num), [None] * num, [{}] * num

    def run(rank: int) -> None:
        own = {name: torch.tensor(value) for name, value in metrics[rank].items()}
        result, weights = over_ranks(own, ThreadRanks(rank, num, barrier, parts), dict.fromkeys(own, 30))
        assert weights == dict.fromkeys(result, 30)
        found[rank] = {name: float(value) for name, value in result.items()}

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_every_rank_gets_the_same_numbers() -> None:
    one = {"ratio": 0.25, "max_ratio": 3.0, "critic/min_value": -1.0, "num_clipped": 2.0}
    two = {"ratio": 0.5, "max_ratio": 2.0, "critic/min_value": -4.0, "num_clipped": 1.0}
    expected = {"ratio": 0.75, "max_ratio": 3.0, "critic/min_value": -4.0, "num_clipped": 3.0}
    assert on_ranks(one, two) == [expected, expected]


def test_a_metric_of_one_rank_alone_reaches_all_and_nobody_waits() -> None:
    expected = {"ratio": 0.75, "min_value": 2.0, "tool_calls": 4.0}
    found = on_ranks({"ratio": 0.25}, {"ratio": 0.5, "tool_calls": 4.0}, {"min_value": 2.0})
    assert found == [expected] * 3
