"""Partitions against exhaustive search; pack then unpack is the identity; a real model sees the same trajectories."""

import random
from collections.abc import Iterator

import pytest
import torch

from lightrl.functional import bins, pack, rectangles, unpack


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


def test_packing_worked_by_hand() -> None:
    packed = pack(torch.tensor([[5, 6, 7], [8, 9, 0]]), [3, 2])
    assert packed.token_ids.tolist() == [[5, 6, 7, 8, 9]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert packed.rows.tolist() == [0, 0, 0, 1, 1]
    assert packed.columns.tolist() == [0, 1, 2, 0, 1]


def test_parts_of_a_row_are_of_one_size_and_the_first_token_fills_up_the_last() -> None:
    token_ids = torch.tensor([[5, 6, 7], [8, 9, 0]])
    first, second = (pack(token_ids, [3, 2], (index, 2)) for index in range(2))
    assert first.token_ids.tolist() == [[5, 6, 7]]
    assert second.token_ids.tolist() == [[8, 9, 5]]
    assert second.position_ids.tolist() == [[0, 1, 0]]
    assert [first.starts.tolist(), second.starts.tolist()] == [[0, 3], [-3, 0]]


@pytest.mark.parametrize("lengths", [[4, 1, 3], [4, 4, 4], [0, 4, 2], [0, 0, 0]], ids=str)
def test_pack_then_unpack_is_the_identity(lengths: list[int]) -> None:
    is_token = torch.arange(4) < torch.tensor(lengths)[:, None]
    token_ids = torch.where(is_token, torch.randint(1, 50, (3, 4)), 0)
    packed = pack(token_ids, lengths)
    assert packed.token_ids.shape == packed.position_ids.shape == (1, sum(lengths))
    assert unpack(packed.token_ids[0], packed, (3, 4)).equal(token_ids)


def test_unpacked_values_carry_the_gradient_and_may_be_vectors() -> None:
    packed = pack(torch.tensor([[5, 6], [7, 0]]), [2, 1])
    values = torch.randn(3, 4, requires_grad=True)
    unpacked = unpack(values, packed, (2, 2))
    unpacked.sum().backward()
    assert unpacked.shape == (2, 2, 4)
    assert unpacked[1, 1].eq(0).all()
    assert values.grad.eq(1).all()


def test_input_without_a_meaning_is_refused() -> None:
    packed = pack(torch.tensor([[5, 6]]), [2])
    with pytest.raises(ValueError, match="overhead_tokens=-1"):
        rectangles([1], -1)
    with pytest.raises(ValueError, match="a least length of -2"):
        rectangles([1, -2], 0)
    with pytest.raises(ValueError, match=r"got shape \(1, 2\) and 2 lengths"):
        pack(torch.tensor([[5, 6]]), [2, 2])
    with pytest.raises(ValueError, match="from 0 to T = 2, got 3 to 3"):
        pack(torch.tensor([[5, 6]]), [3])
    with pytest.raises(ValueError, match=r"each of the 2 packed tokens, got shape \(1, 2\)"):
        unpack(packed.token_ids, packed, (1, 2))
