"""An iteration's Experience without padding, and between ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from tiny import random_experience
from torch import Tensor

from lightrl.experience import Experience
from lightrl.strategies import Microbatches, Ranks, SpreadExperience
from lightrl.strategies.row_exchange import owned, sent_to_work, work_of
from lightrl.strategies.row_plan import Send
from lightrl.strategies.spread_experience import elsewhere, table_of


def assert_same(found: Experience, expected: Experience) -> None:
    left, right = found.tensors(), expected.tensors()
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype
        assert torch.equal(left[name], right[name]), name


def test_it_reads_as_the_padded_experience() -> None:
    experience = random_experience(topk=3)
    spread = SpreadExperience.of(experience)
    assert_same(spread, experience)
    assert_same(spread.own, experience)
    assert_same(spread.dense([3, 1, 7]), experience.select([3, 1, 7]))
    assert torch.equal(spread.loss_token_counts, experience.loss_token_counts)
    assert all(map(torch.equal, spread.version_bounds, experience.version_bounds))


def test_microbatches_are_made_when_they_are_read() -> None:
    experience = random_experience()
    made: list[list[int]] = []

    class Watched(Microbatches):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            made.append(list(self.rows[index]))
            return super().__getitem__(index)

    parts = iter(Watched(SpreadExperience.of(experience), [[0], [1, 2], [3]], torch.device("cpu")))
    assert_same(next(parts), experience.select([0]))
    assert made == [[0], [1, 2]]  # one ahead
    assert_same(next(parts), experience.select([1, 2]))


# ---------------------------------------------------------------------- several ranks


class Wire:
    """What threads send each other, and how many bytes came to each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=30)
        self.sent: dict[tuple[int, int], Tensor] = {}
        self.received = [0] * size


class OneThread(Ranks):
    def __init__(self, rank: int, wire: Wire) -> None:
        self.rank = self.dp_rank = rank
        self.size = self.dp_size = wire.size
        self.dp_members = [[number] for number in range(wire.size)]
        self.wire = wire

    def exchange(
        self, sends: Sequence[Send], pack: Callable[[Send], Tensor], num_bytes: Callable[[Send], int]
    ) -> list[tuple[Send, Tensor]]:
        for send in (send for send in sends if send.source == self.rank):
            self.wire.sent[send.source, send.target] = pack(send)
        self.wire.barrier.wait()
        came = [(send, self.wire.sent[send.source, send.target]) for send in sends if send.target == self.rank]
        self.wire.received[self.rank] += sum(len(data) for _, data in came)
        assert all(len(data) == num_bytes(send) for send, data in came)
        self.wire.barrier.wait()
        return came


def on_ranks(size: int, play: Callable[[Ranks], SpreadExperience]) -> tuple[list[SpreadExperience], Wire]:
    wire, found = Wire(size), {}

    def run(rank: int) -> None:
        found[rank] = play(OneThread(rank, wire))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return [found[rank] for rank in range(size)], wire


def scattered(experience: Experience, ranks: Ranks, minibatches: list[list[int]]) -> SpreadExperience:
    """From rank 0 to the ranks that work on the rows."""
    whole = SpreadExperience.of(experience)
    here = whole if ranks.rank == 0 else elsewhere(table_of(whole), has_token_rewards=False)
    work = work_of(
        here, minibatches, trained=[ranks], scoring=[], num_first_pass=2, num_ranks=ranks.size, unit="trajectory"
    )
    has = torch.zeros_like(work.rows)
    has[0] = True
    return sent_to_work(here, work, has, work.rows, ranks)


@pytest.mark.parametrize("size", [2, 4])
def test_each_row_is_owned_once_and_every_rank_has_what_it_works_on(size: int) -> None:
    experience = random_experience(num_groups=8, is_scored=False)
    passes = list(experience.minibatch_rows(2, epochs=2, seed=5))
    found, wire = on_ranks(size, lambda ranks: scattered(experience, ranks, passes))
    assert sorted(row for part in found for row in part.own_rows.tolist()) == list(range(len(experience)))
    needed = 0
    for rank, part in enumerate(found):
        rows = part.rows_here
        assert part.work is not None
        assert rows == part.work[rank].nonzero()[:, 0].tolist()
        for minibatch in passes:
            ranks = OneThread(rank, wire)
            share = [minibatch[place] for place in ranks.shares(part.select(minibatch))[rank]]
            assert_same(part.dense(share), experience.select(share))
        assert torch.equal(part.rewards, experience.rewards)  # [B] of all
        assert part.num_loss_tokens == experience.num_loss_tokens
        held = sum(values.flat(values.here).nbytes for values in part.tokens.values())
        assert held == 13 * int(experience.lengths[rows].sum())
        assert wire.received[rank] == (held if rank else 0)
        needed += len(rows)
    assert needed < 2.01 * len(experience)


def test_rows_move_on_to_those_who_work_on_them_next() -> None:
    """A reward failed: without its row other minibatches follow, from what the ranks have, not from rank 0."""
    experience = random_experience(num_groups=8, is_scored=False)
    kept = [row for row in range(len(experience)) if row != 5]

    def play(ranks: Ranks) -> SpreadExperience:
        first = scattered(experience, ranks, list(experience.minibatch_rows(2, seed=5)))
        rest = first.select(kept)
        minibatches = list(rest.minibatch_rows(2, seed=5))
        work = work_of(
            rest, minibatches, trained=[ranks], scoring=[], num_first_pass=2, num_ranks=ranks.size, unit="trajectory"
        )
        assert rest.work is not None
        return sent_to_work(rest, work, rest.work, work.rows, ranks)

    found, _ = on_ranks(3, play)
    for rank, part in enumerate(found):
        assert torch.equal(owned(part)[rank].nonzero()[:, 0], part.own_rows)
        assert_same(part.own, experience.select(kept).select(part.own_rows))


def test_a_field_per_token_of_rows_elsewhere_says_what_to_read_instead() -> None:
    experience = random_experience(is_scored=False)
    (_, other), _ = on_ranks(2, lambda ranks: scattered(experience, ranks, [list(range(9))]))
    with pytest.raises(ValueError, match=r"has the tokens of \d of these 9 .*experience.own\['loss_mask'\].*inputs"):
        other.loss_mask  # noqa: B018
