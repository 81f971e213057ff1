import itertools
import random

import pytest

from lightrl.functional import bins
from lightrl.strategies.ranks import balanced_shares, token_imbalance


def sums(lengths: list[int], shares: list[list[int]]) -> list[int]:
    return [sum(lengths[row] for row in share) for share in shares]


def best_difference(lengths: list[int], num: int) -> int:
    """Of the fullest part to the mean, by trying all partitions."""
    least = sum(lengths)
    for places in itertools.product(range(num), repeat=len(lengths)):
        parts = [0] * num
        for length, place in zip(lengths, places, strict=True):
            parts[place] += length
        least = min(least, max(parts))
    return least


@pytest.mark.parametrize("num", [2, 3])
def test_shares_are_close_to_the_best_of_all_partitions(num: int) -> None:
    generator = random.Random(0)
    for _ in range(20):
        lengths = [generator.randint(1, 50) for _ in range(8)]
        assert max(sums(lengths, balanced_shares(lengths, num))) <= 1.2 * best_difference(lengths, num)


def test_skewed_lengths_on_many_ranks_are_balanced_within_two_percent() -> None:
    generator = random.Random(1)
    lengths = [min(8192, int(generator.lognormvariate(6.5, 0.9))) for _ in range(512)]
    assert token_imbalance(lengths, balanced_shares(lengths, 8)) < 1.02


def test_fewer_rows_than_ranks_leave_shares_empty() -> None:
    shares = balanced_shares([3, 4], 4)
    assert sorted(map(len, shares)) == [0, 0, 1, 1]
    assert balanced_shares([], 2) == [[], []]


def test_imbalance_is_the_fullest_share_over_the_mean() -> None:
    assert token_imbalance([6, 2], [[0], [1]]) == pytest.approx(1.5)


def test_things_of_like_size_stay_together_where_it_costs_nothing() -> None:
    assert bins([4, 1, 4, 1], 8) == [[0, 2], [1, 3]]
