"""An iteration's rows on their way: from the rank that rolled out, and between the ranks that work on the same ones.

Every rank computes the same plan from the lengths and groups of all rows, so nobody asks anybody what to send. B
trajectories, W ranks of the run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.experience import Experience, LossUnit
from lightrl.strategies.ranks import Ranks
from lightrl.strategies.row_plan import Send, plan_sends
from lightrl.strategies.spread_experience import Ragged, SpreadExperience


@dataclass(frozen=True)
class Work:
    """Which rows each rank works on in an iteration, the same on every rank."""

    rows: Tensor  # bool [W, B], in any of its minibatches or score calls
    owners: Tensor  # int64 [B], the one rank that answers for a row
    first_pass: list[list[int]]  # the rows of the first epoch's minibatches: score calls take the same shares


def work_of(
    experience: Experience,
    minibatches: Sequence[list[int]],
    *,
    trained: Sequence[Ranks],
    scoring: Iterable[Ranks],
    num_first_pass: int,
    num_ranks: int,
    unit: LossUnit,
) -> Work:
    """The rows of each rank, from the minibatches: each is balanced over the dp ranks of each role.

    Args:
        experience: all rows, on each rank; only lengths and groups are read.
        minibatches: the rows of all minibatches of all epochs.
        trained: the ranks of the roles that the updates train; the first one's own the rows.
        scoring: the ranks of roles that only infer.
        num_first_pass: minibatches of the first epoch.
        num_ranks: W.
        unit: rows that stay together.
    """
    work = torch.zeros(num_ranks, len(experience), dtype=torch.bool)
    owners = torch.zeros(len(experience), dtype=torch.int64)
    for index, rows in enumerate(minibatches):
        part = experience if len(rows) == len(experience) else experience.select(rows)
        infers = list(scoring) if index < num_first_pass else []
        for number, role in enumerate([*trained, *infers]):
            for members, share in zip(role.dp_members, role.shares(part, unit), strict=True):
                taken = [rows[place] for place in share]
                for rank in members:
                    work[rank, taken] = True
                if number == 0 and index < num_first_pass:
                    owners[taken] = members[0]
    return Work(work, owners, list(minibatches[:num_first_pass]))


def with_work(experience: SpreadExperience, work: Work, ranks: Ranks) -> SpreadExperience:
    """The same rows, still where they are; `exchange` brings them to those who work on them."""
    made = experience.with_tensors({"_owner": work.owners, "_work": work.rows.T})
    vars(made).update(first_pass=work.first_pass, _ranks=ranks)
    return made


def owned(experience: SpreadExperience) -> Tensor:
    """Bool [W, B], the rows that each rank answers for."""
    assert experience.work is not None
    return torch.arange(len(experience.work))[:, None] == experience.owners


def recounted(experience: SpreadExperience) -> SpreadExperience:
    """With the number of loss tokens of each row as its mask is now. Collective."""
    counts = torch.zeros(len(experience), dtype=torch.int64)
    counts[experience.own_rows] = experience.own.loss_mask.sum(1)
    return experience.with_tensors({"_loss_tokens": experience.total(counts)})


def scoring_shares(experience: SpreadExperience, ranks: Ranks, unit: LossUnit) -> list[list[int]]:
    """The rows of each dp rank of a role that infers: those of its shares of the first epoch's minibatches."""
    whole: list[list[int]] = [[] for _ in range(ranks.dp_size)]
    for rows in experience.first_pass:
        for mine, share in zip(whole, ranks.shares(experience.select(rows), unit), strict=True):
            mine += [rows[place] for place in share]
    return [sorted(rows) for rows in whole]


def held_by(shares: Sequence[Sequence[int]], members: Sequence[Sequence[int]], shape: Sequence[int]) -> Tensor:
    """Bool [W, B] of the rows of each dp rank, which all its members have."""
    has = torch.zeros(*shape, dtype=torch.bool)
    for ranks, rows in zip(members, shares, strict=True):
        for rank in ranks:
            has[rank, list(rows)] = True
    return has


def exchange(
    experience: SpreadExperience, names: Collection[str], has: Tensor, needs: Tensor, ranks: Ranks
) -> SpreadExperience:
    """With these fields per token of the rows that this rank needs, and of no others. Collective over the run.

    Args:
        experience: has the fields on every rank, of no row perhaps.
        names: of the fields.
        has: bool [W, B], the rows of these fields on each rank.
        needs: bool [W, B].
        ranks: all of the run.
    """
    lengths = experience.lengths
    # Widest numbers first: received bytes are read in place, where each field must start at a multiple of its width.
    order = sorted(names, key=lambda name: (-experience.tokens[name].values.element_size(), name))
    tokens = {name: experience.tokens[name] for name in order}
    token_bytes = {name: tokens[name].token_bytes for name in order}
    sizes = (lengths * sum(token_bytes.values())).tolist()

    def pack(send: Send) -> Tensor:
        rows = torch.tensor(send.rows)
        return torch.cat([tokens[name].flat(lengths, rows).view(-1).view(torch.uint8) for name in order])

    for sends in plan_sends(has, needs, sizes):
        came = ranks.exchange(sends, pack, lambda send: sum(sizes[row] for row in send.rows))
        if not came:
            continue
        rows = torch.cat([torch.tensor(send.rows) for send, _ in came])
        parts: dict[str, list[Tensor]] = {name: [] for name in order}
        for send, data in came:
            num, start = int(lengths[list(send.rows)].sum()), 0
            for name in order:
                end = start + num * token_bytes[name]
                parts[name].append(data[start:end].view(tokens[name].values.dtype))
                start = end
        tokens = {name: tokens[name].joined(torch.cat(parts[name]), lengths, rows) for name in order}
    kept = needs[ranks.rank].nonzero()[:, 0]
    return experience.with_tensors({name: _only(tokens[name], lengths, kept) for name in order})


def _only(ragged: Ragged, lengths: Tensor, rows: Tensor) -> Ragged:
    """Without the values of other rows."""
    if len(ragged.values) == int(lengths[rows].sum()):
        return ragged
    return Ragged.of_rows(ragged.flat(lengths, rows), lengths, rows)
