from collections import Counter

import pytest
import torch
from torch import Tensor

from lightrl.strategies.ranks.processes import Send
from lightrl.strategies.sharded_experience.exchange import plan_sends


def holding(*rows: list[int], num: int) -> Tensor:
    """Bool [W, B] from the rows of each rank."""
    has = torch.zeros(len(rows), num, dtype=torch.bool)
    for rank, own in enumerate(rows):
        has[rank, own] = True
    return has


def after(has: Tensor, rounds: list[list[Send]]) -> Tensor:
    """Who has what after all sends; fails if a rank sends what it does not have yet, or receives what it has."""
    has = has.clone()
    for sends in rounds:
        before = has.clone()
        for send in sends:
            assert before[send.source, list(send.rows)].all()
            assert not has[send.target, list(send.rows)].any()
            has[send.target, list(send.rows)] = True
    return has


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_gets_what_it_needs_and_nothing_twice(seed: int) -> None:
    torch.manual_seed(seed)
    num_ranks, num_rows = int(torch.randint(1, 9, ())), int(torch.randint(1, 40, ()))
    has, needs = torch.rand(num_ranks, num_rows) < 0.3, torch.rand(num_ranks, num_rows) < 0.4
    has[0] |= ~has.any(0)
    sizes = torch.randint(1, 100, (num_rows,)).tolist()
    rounds = plan_sends(has, needs, sizes)
    assert torch.equal(after(has, rounds), has | needs)
    received: Counter[int] = Counter()
    for send in (send for sends in rounds for send in sends):
        received[send.target] += sum(sizes[row] for row in send.rows)
    missing = (needs & ~has).long() @ torch.tensor(sizes)
    assert received == Counter(dict(enumerate(missing.tolist())))


def test_the_rank_that_rolled_out_sends_each_row_once_whoever_needs_it() -> None:
    """Eight pairs of tensor-parallel ranks: the second of each pair gets its rows from the first."""
    has, needs = holding(list(range(64)), *[[]] * 15, num=64), torch.zeros(16, 64, dtype=torch.bool)
    for rank in range(16):
        needs[rank, rank // 2 :: 8] = True
    rounds = plan_sends(has, needs, [10] * 64)
    rows = [row for sends in rounds for send in sends if send.source == 0 for row in send.rows]
    assert len(rows) == len(set(rows)) == 64


def test_a_row_that_no_rank_has_is_named() -> None:
    with pytest.raises(ValueError, match="Row 2 is needed, but no rank has it"):
        plan_sends(holding([0], [1], num=3), holding([2], [], num=3), [1, 1, 1])
