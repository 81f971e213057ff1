"""An iteration's Experience without padding, and between ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
from tiny import random_experience
from torch import Tensor

from lightrl.experience import Experience
from lightrl.strategies import Microbatches, Ranks, SpreadExperience
from lightrl.strategies.row_exchange import sent_to_work, work_of
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
