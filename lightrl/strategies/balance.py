"""Trajectories shared out over data-parallel ranks by their tokens. Pure: all ranks compute the same from the lengths.

A rank that gets more tokens than the others makes all of them wait, at each update.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced_shares(lengths: Sequence[int], num: int) -> list[list[int]]:
    """The rows of each of `num` ranks, so that the largest sum of lengths is small; every row is in exactly one.

    Largest differencing: the two partial partitions that differ most are laid over each other, the full parts of one on
    the empty parts of the other, until one is left. Equal lengths give the same result in every process.

    Source: Karmarkar and Karp, https://www2.eecs.berkeley.edu/Pubs/TechRpts/1983/6353.html; for more than two parts
    Michiels et al., https://doi.org/10.1007/978-3-540-39763-2_31.

    Args:
        lengths: tokens of each trajectory.
        num: of data-parallel ranks.

    Returns:
        Rows in ascending order within a share; some shares are empty where there are fewer rows than ranks.

    Raises:
        ValueError: if `num` is not positive.
    """
    if num < 1:
        raise ValueError(f"num={num}, expected at least 1 rank. Raise it.")
    if num == 1:
        return [list(range(len(lengths)))]
    # A partial partition: how much its parts differ, a number to settle ties, its parts as (tokens, rows), fullest
    # first.
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
    """The tokens of the fullest share over their mean: 1 is perfect balance, 2 twice the time."""
    tokens = [sum(lengths[row] for row in share) for share in shares]
    return max(tokens) * len(tokens) / max(1, sum(tokens))
