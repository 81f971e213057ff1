"""Trajectories split over data-parallel ranks by their tokens, computed alike on all ranks from the lengths.

A rank with more tokens than the others makes all of them wait at each update.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_shares(lengths: Sequence[int], num: int) -> list[list[int]]:
    """The rows of each of `num` ranks, so that the largest sum of lengths is small; every row is in exactly one share.

    Largest differencing: combine the two partial partitions that differ most, the largest parts of one with the
    smallest of the other, until one is left. Equal lengths give the same result in every process.

    Source: Karmarkar and Karp, https://www2.eecs.berkeley.edu/Pubs/TechRpts/1983/6353.html; for more than two parts
    Michiels et al., https://doi.org/10.1007/978-3-540-39763-2_31.

    Args:
        lengths: tokens of each trajectory.
        num: data-parallel ranks.

    Returns:
        Rows in ascending order within a share; shares are empty if there are fewer rows than ranks.

    Raises:
        ValueError: if `num` is not positive.
    """
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}.")
    if num == 1:
        return [list(range(len(lengths)))]
    # Partial partitions: minus the parts' difference, a tie breaker, the parts as (tokens, rows), largest first.
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for row, length in enumerate(lengths):
        parts: list[tuple[int, list[int]]] = [(length, [row])]
        parts += [(0, []) for _ in range(num - 1)]
        heap.append((-length, row, parts))
    if not heap:
        return [[] for _ in range(num)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first_row, first = heapq.heappop(heap)
        _, second_row, second = heapq.heappop(heap)
        pairs = zip(first, reversed(second), strict=True)
        merged = sorted(((a + b, rows + more) for (a, rows), (b, more) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first_row, second_row), merged))
    return [sorted(rows) for _, rows in heap[0][2]]


def token_imbalance(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    """The largest share's tokens over the mean: 1 is perfect balance, 2 takes twice the time."""
    tokens = [sum(lengths[row] for row in share) for share in shares]
    return max(tokens) * len(tokens) / max(1, sum(tokens))
