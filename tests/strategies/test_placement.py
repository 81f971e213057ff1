import itertools
import random
from typing import Any

import pytest
import torch
from tiny import random_experience

from lightrl.experience import Experience
from lightrl.functional import bins
from lightrl.strategies import Microbatches, ShardedExperience
from lightrl.strategies.ranks.processes import Ranks
from lightrl.strategies.sharded_experience.placement import (
    balanced_shares,
    microbatch_rows,
    minibatches,
    place_rows,
    shares,
    token_imbalance,
)


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
    assert sorted(map(len, balanced_shares([3, 4], 4))) == [0, 0, 1, 1]
    assert balanced_shares([], 2) == [[], []]


def test_imbalance_is_the_fullest_share_over_the_mean() -> None:
    assert token_imbalance([6, 2], [[0], [1]]) == pytest.approx(1.5)


def test_things_of_like_size_stay_together_where_it_costs_nothing() -> None:
    assert bins([4, 1, 4, 1], 8) == [[0, 2], [1, 3]]


class OneOfSeveral(Ranks):
    """Decides as a rank of several does; nothing is sent."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self.rank = self.dp_rank = dp_rank
        self.size = self.dp_size = dp_size
        self.dp_members = [[rank] for rank in range(dp_size)]


def placed(experience: Experience, dp_size: int = 1, **settings: Any) -> ShardedExperience:
    ranks = OneOfSeveral(0, dp_size)
    settings = {"num_minibatches": 1, "seed": 0, "unit": "trajectory", **settings}
    return place_rows(ShardedExperience.of(experience), roles=[ranks], ranks=ranks, **settings)


def rows_of_ranks(experience: ShardedExperience, dp_size: int, max_tokens: int) -> list[list[list[int]]]:
    return [microbatch_rows(experience, OneOfSeveral(rank, dp_size), max_tokens) for rank in range(dp_size)]


@pytest.mark.parametrize("max_tokens", [8, 20, 10_000])
def test_every_rank_has_the_same_number_of_microbatches(max_tokens: int) -> None:
    rows = rows_of_ranks(placed(random_experience(), 3), 3, max_tokens)
    assert len({len(rank) for rank in rows}) == 1


def test_a_rank_without_rows_gets_a_microbatch_without_loss_tokens() -> None:
    experience = random_experience().select([0])
    assert sorted(rows_of_ranks(placed(experience, 2), 2, 100)) == [[[]], [[0]]]
    (part,) = Microbatches(ShardedExperience.of(experience), [[]], torch.device("cpu"))
    assert len(part) == 1
    assert part.num_loss_tokens == 0
    assert part.tensors().keys() == experience.tensors().keys()


def test_groups_stay_on_one_rank_where_the_loss_reads_them_whole() -> None:
    experience = random_experience(group_size=3)
    parts = shares(placed(experience, 2, unit="group"), OneOfSeveral(0, 2))
    assert sorted(row for share in parts for row in share) == list(range(len(experience)))
    for share in parts:
        groups = experience.group_ids[share].tolist()
        assert all(groups.count(group) == 3 for group in groups)


def cut(num: int, unit: str = "trajectory", seed: int = 5) -> list[list[int]]:
    """Cuts 4 groups of 3 or, in pairs, of 4 into minibatches for 3 epochs."""
    experience = random_experience(num_groups=4, group_size=4 if unit == "pair" else 3)
    return minibatches(placed(experience, num_minibatches=num, seed=seed, unit=unit), epochs=3, seed=seed)


@pytest.mark.parametrize("num", [1, 2, 5, 12])
def test_each_epoch_trains_each_trajectory_exactly_once(num: int) -> None:
    assert len(cut(num)) == 3 * num
    for epoch in range(3):
        parts = cut(num)[epoch * num : (epoch + 1) * num]
        assert sorted(itertools.chain(*parts)) == list(range(12))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_minibatches_follow_the_seed_and_change_their_order_with_the_epoch() -> None:
    assert cut(3) == cut(3)
    assert cut(3) != cut(3, seed=6)
    first, *later = (cut(3)[start : start + 3] for start in range(0, 9, 3))
    assert all(sorted(epoch) == sorted(first) for epoch in later)
    assert any(epoch != first for epoch in later)


@pytest.mark.parametrize(("unit", "size"), [("group", 3), ("pair", 2)])
@pytest.mark.parametrize("num", [2, 3])
def test_minibatches_never_split_a_unit(unit: str, size: int, num: int) -> None:
    for rows in cut(num, unit):
        assert all({row // size * size + other for other in range(size)} <= set(rows) for row in rows)


def test_no_minibatch_is_empty_when_drops_left_too_few_trajectories() -> None:
    assert [len(rows) for rows in cut(20)] == [1] * 36


def test_each_minibatch_is_balanced_over_the_ranks_of_a_role() -> None:
    experience = placed(random_experience(num_groups=8, group_size=4), 2, num_minibatches=2)
    for rows in minibatches(experience, epochs=1, seed=0):
        part = experience.select(rows)
        assert token_imbalance(part.lengths.tolist(), shares(part, OneOfSeveral(0, 2))) < 1.1


def test_rows_that_drop_out_leave_the_others_where_they_are() -> None:
    experience = placed(random_experience(), 2, num_minibatches=3)
    before = minibatches(experience, epochs=2, seed=0)
    emptied = before[1]
    kept = [row for row in range(9) if row not in emptied]
    rest = experience.select(kept)
    after = [[kept[row] for row in rows] for rows in minibatches(rest, epochs=2, seed=0)]
    assert after == [rows for rows in before if rows != emptied]
    for left, right in zip(shares(rest, OneOfSeveral(0, 2)), shares(experience, OneOfSeveral(0, 2)), strict=True):
        assert [kept[row] for row in left] == [row for row in right if row in kept]
