"""Which rank needs which trajectories, and who sends them to whom. Pure; no process group.

    row          0  1  2  3      rank 0 rolled out and has all rows; ranks 1 to 3 need two each
    needed by    1  1  2  2      round 1    rank 0 sends rows 0, 1 to rank 1 and rows 2, 3 to rank 2
                       3  3      round 2    rank 2 sends rows 2, 3 to rank 3: rank 0 sends no row twice

Nothing is received twice and nobody receives what it has, so every plan reaches the lower bound of bytes.

Shapes: W ranks of the run, B rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Send:
    """Rows on their way from one rank to another."""

    source: int
    target: int
    rows: tuple[int, ...]  # ascending


def plan_sends(has: Tensor, needs: Tensor, sizes: Sequence[int]) -> list[list[Send]]:
    """The sends of each round, after which every rank has the rows that it needs; rounds follow one another.

    A row that is on one rank alone leaves it once; its receivers pass it on. Of several ranks that have a row, the one
    that has sent the fewest bytes sends it.

    Args:
        has: bool [W, B], who has which rows.
        needs: bool [W, B].
        sizes: bytes of each row, [B].

    Raises:
        ValueError: if a row is needed that no rank has.
    """
    lost = (needs.any(0) & ~has.any(0)).nonzero()[:, 0].tolist()
    if lost:
        raise ValueError(
            f"Row {lost[0]} is needed, but no rank has it: `has` and `needs` must be of the same rows on every rank."
        )
    has = has.clone()
    sent: Counter[int] = Counter()
    rounds: list[list[Send]] = []
    while True:
        missing = needs & ~has
        rows: dict[tuple[int, int], list[int]] = {}
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


def received_bytes(rounds: Iterable[Iterable[Send]], sizes: Sequence[int]) -> Counter[int]:
    """By rank, what a plan sends it."""
    total: Counter[int] = Counter()
    for send in (send for sends in rounds for send in sends):
        total[send.target] += sum(sizes[row] for row in send.rows)
    return total
