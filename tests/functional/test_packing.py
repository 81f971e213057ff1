"""Rectangles against exhaustive search; bins by hand."""

import random
from collections.abc import Iterator

import pytest

from lightrl.functional import bins, rectangles


def cost(groups: list[list[int]], lengths: list[int], overhead_tokens: int) -> int:
    return sum(len(rows) * max(lengths[row] for row in rows) + overhead_tokens for rows in groups)


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    """Every way to put the rows into groups, like length or not."""
    if not rows:
        yield []
        return
    first, *rest = rows
    for groups in partitions(rest):
        for index in range(len(groups)):
            yield [*groups[:index], [first, *groups[index]], *groups[index + 1 :]]
        yield [[first], *groups]


@pytest.mark.parametrize("overhead_tokens", [0, 1, 5, 20])
def test_rectangles_cost_the_least_of_all_partitions(overhead_tokens: int) -> None:
    generator = random.Random(overhead_tokens)
    for _ in range(6):
        lengths = [generator.randint(0, 9) for _ in range(7)]
        groups = rectangles(lengths, overhead_tokens)
        least = min(cost(other, lengths, overhead_tokens) for other in partitions(list(range(7))))
        assert cost(groups, lengths, overhead_tokens) == least
        assert sorted(row for rows in groups for row in rows) == list(range(7))


def test_rectangles_worked_by_hand() -> None:
    # Apart: 3·2 + 1·10 = 16 and twice the overhead; together: 4·10 = 40 and once the overhead.
    lengths = [2, 10, 2, 1]
    assert rectangles(lengths, 23) == [[0, 2, 3], [1]]
    assert rectangles(lengths, 25) == [[0, 1, 2, 3]]


def test_no_trajectories_need_no_rectangles_and_no_bins() -> None:
    assert rectangles([], 10) == []
    assert bins([], 10) == []


def test_bins_are_filled_best_fit_decreasing() -> None:
    # 7 | 6 | 5 fits nowhere | 3 goes to the 7 | 2 to the 6 | 2 to the 6
    assert bins([3, 7, 2, 6, 5, 2], 10) == [[1, 0], [3, 2, 5], [4]]


def test_a_trajectory_longer_than_the_budget_has_a_row_of_its_own() -> None:
    assert bins([4, 30, 4], 10) == [[1], [0, 2]]


def test_input_without_a_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="overhead_tokens must be >= 0, got -1"):
        rectangles([1], -1)
    with pytest.raises(ValueError, match="the shortest length must be >= 0, got -2"):
        rectangles([1, -2], 0)
