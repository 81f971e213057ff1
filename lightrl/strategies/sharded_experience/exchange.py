"""Sends rows from the rank that ran the rollout, and between ranks that work on the same rows.

    row          0  1  2  3      rank 0 rolled out and has all rows; ranks 1 to 3 need two each
    needed by    1  1  2  2      round 1    rank 0 sends rows 0, 1 to rank 1 and rows 2, 3 to rank 2
                       3  3      round 2    rank 2 sends rows 2, 3 to rank 3: rank 0 sends no row twice

Every rank computes the same plan, so no requests are needed. No rank receives a row twice, or a row that it already
has, so every plan sends the minimum number of bytes. Shapes: W ranks in the run, B rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from lightrl.experience import is_on_host
from lightrl.strategies.ranks.processes import Send
from lightrl.strategies.sharded_experience.experience import ShardedExperience, TokenRows, sizes_name
from lightrl.trace import span


def plan_sends(has: Tensor, needs: Tensor, sizes: Sequence[int]) -> list[list[Send]]:
    """Plans the sends of consecutive rounds, after which every rank has the rows that it needs.

    If only one rank has a row, it sends the row once, and the receiver helps to forward it. If several ranks have a
    row, the rank that has sent the fewest bytes so far sends it. Needs no process group.

    Args:
        has: bool [W, B], the rows that each rank has.
        needs: bool [W, B], the rows that each rank needs.
        sizes: number of bytes of each row, [B].
    """
    absent = (needs.any(0) & ~has.any(0)).nonzero()[:, 0].tolist()
    if absent:
        raise ValueError(
            f"Row {absent[0]} is needed, but no rank has it. Pass `has` and `needs` for the same rows on every rank."
        )
    has = has.clone()
    sent: Counter[int] = Counter()
    rounds: list[list[Send]] = []
    while True:
        missing = needs & ~has
        rows: dict[tuple[int, int], list[int]] = {}  # (source, target) → rows to send in this round
        for row in missing.any(0).nonzero()[:, 0].tolist():
            sources = has[:, row].nonzero()[:, 0].tolist()
            targets = missing[:, row].nonzero()[:, 0].tolist()
            for target in targets[:1] if len(sources) == 1 and not rounds else targets:
                source = min(sources, key=lambda rank: (sent[rank], rank))
                sent[source] += sizes[row]
                rows.setdefault((source, target), []).append(row)
        if not rows:
            return rounds
        for (_, target), moved in rows.items():
            has[target, moved] = True
        rounds.append([Send(*ends, tuple(moved)) for ends, moved in sorted(rows.items())])


def exchange(
    experience: ShardedExperience, tokens: Mapping[str, TokenRows], has: Tensor, needs: Tensor
) -> dict[str, TokenRows]:
    """Returns these fields for exactly the rows that this rank needs. Collective over all ranks in the run.

    Args:
        experience: contains the rows; only their lengths are read.
        tokens: the fields to exchange. Every rank passes the same fields, even if it has none of their rows.
        has, needs: as in `plan_sends`.
    """
    ranks, lengths = experience.ranks, experience.lengths
    # Widest dtypes first: received bytes are read in place, where each field must start at a multiple of its item size.
    fields = {name: tokens[name] for name in sorted(tokens, key=lambda name: (-tokens[name].empty.itemsize, name))}
    lengths_of = {name: experience.rows[sizes_name(name)] if is_on_host(name) else lengths for name in fields}
    row_bytes = torch.zeros_like(lengths)
    for name, values in fields.items():
        row_bytes = row_bytes + lengths_of[name] * values.token_bytes
    sizes = row_bytes.tolist()

    def pack(send: Send) -> Tensor:
        return torch.from_numpy(
            np.concatenate([values.flat(send.rows).reshape(-1).view(np.uint8) for values in fields.values()])
        )

    for sends in plan_sends(has, needs, sizes) if fields else []:
        with span("exchange of rows", "collective", sends=len(sends)):
            received = ranks.exchange(sends, pack, lambda send: sum(sizes[row] for row in send.rows))
        for send, data in received:
            start = 0
            for name, values in fields.items():
                num = int(lengths_of[name][list(send.rows)].sum())
                end = start + num * values.token_bytes
                flat = data.numpy()[start:end].view(values.empty.dtype).reshape(num, *values.empty.shape[1:])
                fields[name] = values.with_flat(flat, lengths_of[name], send.rows)
                start = end
    needed = set(needs[ranks.rank].nonzero()[:, 0].tolist())
    return {name: values.only(needed) for name, values in fields.items()}
