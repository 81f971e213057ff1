"""An iteration's rows on their way: from the rank that rolled out, and between the ranks that work on the same ones.

Every rank computes the same plan from the lengths and groups of all rows, so nobody asks anybody what to send. B
trajectories, W ranks of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightrl.experience import Experience, LossUnit
from lightrl.strategies.ranks import Ranks
from lightrl.strategies.row_plan import Send, plan_sends
from lightrl.strategies.spread_experience import SpreadExperience
from lightrl.strategies.token_rows import TokenRows
from lightrl.trace import span


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


def sent_to_work(
    experience: SpreadExperience, work: Work, has: Tensor, needs: Tensor, ranks: Ranks
) -> SpreadExperience:
    """With the tokens of the rows that this rank needs; `has` and `needs` as `exchange` has them. Collective."""
    tokens = exchange(experience.tokens, experience.lengths, has, needs, ranks, experience.support_bytes)
    made = experience.with_tensors({**tokens, "_owner": work.owners, "_work": work.rows.T})
    vars(made).update(first_pass=work.first_pass, _ranks=ranks)
    return made


def owned(experience: SpreadExperience) -> Tensor:
    """Bool [W, B], the rows that each rank answers for."""
    assert experience.work is not None
    return torch.arange(len(experience.work))[:, None] == experience.owners


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
    tokens: Mapping[str, TokenRows],
    lengths: Tensor,
    has: Tensor,
    needs: Tensor,
    ranks: Ranks,
    support_bytes: Tensor | None = None,
) -> dict[str, TokenRows]:
    """These fields of the rows that this rank needs, and of no others. Collective over the run.

    Args:
        tokens: the fields, the same on every rank, of no row perhaps.
        lengths: [B].
        has: bool [W, B], the rows of these fields on each rank.
        needs: bool [W, B].
        ranks: all of the run.
        support_bytes: [B], lengths of the field `supports` if it is among them.
    """
    # Widest numbers first: received bytes are read in place, where each field must start at a multiple of its width.
    held = {name: tokens[name] for name in sorted(tokens, key=lambda name: (-tokens[name].empty.itemsize, name))}
    lengths_of = dict.fromkeys(held, lengths) | ({} if support_bytes is None else {"supports": support_bytes})
    row_bytes = torch.zeros_like(lengths)
    for name, values in held.items():
        row_bytes = row_bytes + lengths_of[name] * values.token_bytes
    sizes = row_bytes.tolist()

    def pack(send: Send) -> Tensor:
        return torch.from_numpy(
            np.concatenate([values.flat(send.rows).reshape(-1).view(np.uint8) for values in held.values()])
        )

    for sends in plan_sends(has, needs, sizes) if held else []:
        with span("exchange of rows", "collective", sends=len(sends)):
            received = ranks.exchange(sends, pack, lambda send: sum(sizes[row] for row in send.rows))
        for send, data in received:
            start = 0
            for name, values in held.items():
                num = int(lengths_of[name][list(send.rows)].sum())
                end = start + num * values.token_bytes
                flat = data.numpy()[start:end].view(values.empty.dtype).reshape(num, *values.empty.shape[1:])
                held[name] = values.with_flat(flat, lengths_of[name], send.rows)
                start = end
    kept = needs[ranks.rank].nonzero()[:, 0].tolist()
    return {name: values.only(kept) for name, values in held.items()}
