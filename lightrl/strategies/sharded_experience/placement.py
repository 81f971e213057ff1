"""Placement of rows: assigns each row to one minibatch and, for each role, to one data-parallel (dp) rank.

Every rank computes the same placement from the lengths and groups of all rows. If rows are dropped later, the others
stay where they are. Microbatches copies a rank's rows to its device. Shapes: B trajectories, W ranks in the run.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from lightrl.experience import Experience, LossUnit
from lightrl.functional import row_lengths
from lightrl.functional.packing import microbatch_bins
from lightrl.strategies.ranks.processes import Ranks
from lightrl.strategies.sharded_experience.experience import ShardedExperience


def balanced_shares(lengths: Sequence[int], num: int) -> list[list[int]]:
    """Divides rows among `num` ranks so that the largest sum of lengths is small; every row is in exactly one share.

    Uses largest differencing: repeatedly combines the two partial partitions whose parts are most unequal, the largest
    parts of one with the smallest parts of the other. The result depends only on the lengths, not on the process.

    Source: Karmarkar and Karp, https://www2.eecs.berkeley.edu/Pubs/TechRpts/1983/6353.html; for more than two parts
    Michiels et al., https://doi.org/10.1007/978-3-540-39763-2_31.

    Returns:
        The rows of each share, in ascending order; some shares are empty if there are fewer rows than shares.
    """
    if num < 1:
        raise ValueError(f"num must be at least 1, got {num}.")
    # Partial partitions: (minus the difference between the largest and the smallest part, a tie-breaker, the parts).
    # The parts are (tokens, rows), largest first.
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
        merged = sorted(((a + b, rows + others) for (a, rows), (b, others) in pairs), key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first_row, second_row), merged))
    return [sorted(rows) for _, rows in heap[0][2]]


def token_imbalance(lengths: Sequence[int], shares: Sequence[Sequence[int]]) -> float:
    """Returns the largest share's tokens divided by the mean share's: 1 is perfect balance, 2 takes twice as long."""
    tokens = [sum(lengths[row] for row in share) for share in shares]
    return max(tokens) * len(tokens) / max(1, sum(tokens))


def place_rows(
    experience: ShardedExperience,
    *,
    num_minibatches: int,
    seed: int,
    unit: LossUnit,
    roles: Sequence[Ranks],
    ranks: Ranks,
) -> ShardedExperience:
    """Assigns each row to a minibatch and to ranks; tokens stay where they are.

    Args:
        experience: all rows, on each rank; only lengths and groups are read.
        num_minibatches: maximum number of minibatches; each is balanced over the dp ranks of each role.
        seed: for the random assignment of units to minibatches.
        unit: the loss unit, whose rows stay together.
        roles: the ranks of each role; the first role's ranks own the rows.
        ranks: all ranks of the run.
    """
    minibatch = torch.zeros(len(experience), dtype=torch.int64)
    units = experience.units(unit)
    parts, num = [units], min(num_minibatches, len(units))
    if num > 1:  # within each minibatch, units are ordered by their first rows
        order = torch.randperm(len(units), generator=torch.Generator().manual_seed(seed))
        parts = [sorted(units[number] for number in numbers.tolist()) for numbers in order.tensor_split(num)]
    for index, part in enumerate(parts):
        minibatch[[row for rows in part for row in rows]] = index
    placed = replace(experience.with_tensors({"_minibatch": minibatch}), ranks=ranks)
    return placed if ranks.size == 1 else _place_on_ranks(placed, parts, roles)


def _place_on_ranks(
    experience: ShardedExperience, parts: Sequence[Sequence[Sequence[int]]], roles: Sequence[Ranks]
) -> ShardedExperience:
    """Assigns the rows of each minibatch, given as units, to the dp ranks of each role, and so to ranks of the run.

    Sets `_dp_rank_<dp size>` [B], shared by roles of that size; `_work` [B, W], True where a rank works on a row for
    any role; and `_owner` [B], the one rank whose `local` contains a row.
    """
    num_tokens = experience.forward_tokens.tolist()
    dp_ranks = {role.dp_size: torch.zeros(len(experience), dtype=torch.int64) for role in roles}  # dp size → [B]
    for units in parts:
        sizes = [sum(num_tokens[row] for row in rows) for rows in units]
        for dp_size, dp_rank_of in dp_ranks.items():
            for dp_rank, share in enumerate(balanced_shares(sizes, dp_size) if dp_size > 1 else ()):
                rows_of_share = [row for index in share for row in units[index]]
                dp_rank_of[rows_of_share] = dp_rank
    placed = experience.with_tensors({f"_dp_rank_{dp_size}": value for dp_size, value in dp_ranks.items()})
    works = functools.reduce(torch.logical_or, [rows_by_rank(placed, role) for role in roles])  # [W, B]
    first_members = torch.tensor([members[0] for members in roles[0].dp_members])
    return placed.with_tensors({"_work": works.T, "_owner": first_members[dp_ranks[roles[0].dp_size]]})


def rows_by_rank(experience: ShardedExperience, role: Ranks) -> Tensor:
    """Returns which rows each rank works on for a role, bool [W, B]."""
    has = torch.zeros(experience.ranks.size, len(experience), dtype=torch.bool)
    dp_rank_of = experience.rows[f"_dp_rank_{role.dp_size}"]
    for dp_rank, members in enumerate(role.dp_members):
        has[list(members)] = dp_rank_of == dp_rank
    return has


def shares(experience: ShardedExperience, ranks: Ranks) -> list[list[int]]:
    if ranks.dp_size == 1:
        return [list(range(len(experience)))]
    dp_rank_of = experience.rows[f"_dp_rank_{ranks.dp_size}"]
    return [(dp_rank_of == dp_rank).nonzero()[:, 0].tolist() for dp_rank in range(ranks.dp_size)]


def minibatches(experience: ShardedExperience, *, epochs: int, seed: int) -> list[list[int]]:
    """Returns the rows in each minibatch of each epoch, without minibatches whose rows were all dropped.

    Minibatches are in ascending order in the first epoch, and in random order in later epochs.
    """
    rows: dict[int, list[int]] = {}
    for row, index in enumerate(experience.rows["_minibatch"].tolist()):
        rows.setdefault(index, []).append(row)
    num, generator = max(rows) + 1, torch.Generator().manual_seed(seed)
    later = [torch.randperm(num, generator=generator).tolist() for _ in range(epochs - 1)]
    return [rows[index] for index in chain(range(num), *later) if index in rows]


def microbatch_rows(
    experience: ShardedExperience, ranks: Ranks, max_tokens: int, *, unit: LossUnit = "trajectory"
) -> list[list[int]]:
    """Returns the rows of each of this rank's microbatches; a unit over `max_tokens` tokens gets its own microbatch.

    Every rank gets the same number of them, because all ranks of a sharded model run together; some may be empty.
    """
    num_tokens, units = experience.forward_tokens.tolist(), experience.units(unit)
    parts = []
    for share in shares(experience, ranks):
        here = set(share)
        local = [rows for rows in units if rows[0] in here]
        parts.append(microbatch_bins(num_tokens, local, max_tokens) if local else [])
    own, num = parts[ranks.dp_rank], max(map(len, parts))
    return [*own, *([] for _ in range(num - len(own)))]


class Microbatches(Sequence[Experience]):
    """Parts of an experience; while one is computed, the next is copied to the device on a separate stream.

    Args:
        experience: on the host; this rank must have the tokens of the rows.
        rows: the rows of each microbatch; an empty microbatch becomes a blank row.
    """

    def __init__(self, experience: ShardedExperience, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        self.experience = experience
        self.rows = rows
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Experience:  # type: ignore[override]  # nobody reads slices
        rows = self.rows[index]
        return self.experience.dense(rows, self.device) if rows else self.experience.blank_row(self.device)

    def __iter__(self) -> Iterator[Experience]:
        ahead = self._copied(0) if self.rows else None
        for index in range(len(self)):
            part = ahead
            assert part is not None
            if self._stream is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_stream(self._stream)
                for value in part.tensors().values():
                    if value.device == self.device:
                        value.record_stream(current)
            ahead = self._copied(index + 1) if index + 1 < len(self) else None
            yield part

    def _copied(self, index: int) -> Experience:
        if self._stream is None:
            return self[index]
        with torch.cuda.stream(self._stream):
            return self[index]


def lengths_of(microbatches: Sequence[Experience]) -> list[list[int]]:
    """Returns, for each microbatch, the lengths of the rows that a model reads, without copying to the device."""
    if not isinstance(microbatches, Microbatches):
        return [list(chain(*microbatch.row_lengths())) for microbatch in microbatches]
    lengths, gaps = microbatches.experience.lengths.tolist(), microbatches.experience.tokens.get("gaps")
    rows_of = {row: row_lengths(gaps.rows[row]) if gaps else [lengths[row]] for row in chain(*microbatches.rows)}
    return [list(chain(*(rows_of[row] for row in rows))) or [2] for rows in microbatches.rows]  # 2: a blank row
