"""GatherPlan: says which rank gathers each parameter, and who sends which part. Pure functions, no process group.

    parameter   held by                          owner   sent
    q_proj      ranks 0, 1, 2, 3, a quarter each     2   ranks 0, 1 and 3 send their quarters to rank 2
    norm        ranks 0 to 3, each all of it         1   nothing

An owner receives only parts that it lacks, and each of them once. Parameters that a server fuses, like q, k and v, have
the same owner, which can therefore compute the digest of the fused tensor.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one of each per dimension


@dataclass(frozen=True)
class Layout:
    """A parameter: its full shape, and the part that each rank holds.

    Example:
        Layout("lm_head.weight", (100, 8), 4, {0: ((0, 0), (50, 8)), 1: ((50, 0), (50, 8))})
    """

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    boxes: Mapping[int, Box]  # rank → its part; two parts are either equal or disjoint

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True)
class Send:
    """The transfer of one part of a parameter to the owner."""

    name: str
    source: int
    owner: int
    box: Box
    num_bytes: int


@dataclass(frozen=True)
class GatherPlan:
    """The owners, sends and rounds of an export; the same on every rank.

    In a round each owner gathers at most one bucket, or one larger tensor; all ranks finish a round before the next
    starts.
    """

    owners: Mapping[str, int]  # exported tensor → rank
    sends: Mapping[str, Sequence[Send]]  # exported tensor → sends of all its parameters
    rounds: Sequence[Sequence[str]]  # exported tensors of each round


def make_plan(
    layouts: Iterable[Layout], sources: Mapping[str, Sequence[str]], *, ranks: Sequence[int], bucket_bytes: int
) -> GatherPlan:
    """Assigns each exported tensor to an owner, balanced by bytes, and lists what other ranks send to it.

    Args:
        layouts: the parameters.
        sources: exported tensor → the parameters that it is computed from, in order, for example a weight and its
            trained update.
        ranks: the ranks that may own tensors; [0] gathers everything on rank 0.
        bucket_bytes: the maximum number of bytes that a rank gathers in a round.

    Raises:
        ValueError: if the parts of a parameter overlap or leave a gap.
    """
    by_name = {layout.name: layout for layout in layouts}
    owner_of_unit = _owners(by_name, sources, ranks)
    owners = {name: owner_of_unit[_unit(name)] for name in sources}
    sent: Counter[int] = Counter()
    sends = {
        name: [send for parameter in parameters for send in _sends_of(by_name[parameter], owners[name], sent)]
        for name, parameters in sources.items()
    }
    sizes = {name: sum(by_name[each].num_bytes for each in parameters) for name, parameters in sources.items()}
    return GatherPlan(owners, sends, _rounds(owners, sizes, bucket_bytes))


def _unit(name: str) -> str:
    """Returns the prefix of all parameters that must have the same owner: those of a layer's attention or MLP."""
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return name if index is None else ".".join(parts[: index + 2])


def _owners(
    layouts: Mapping[str, Layout], sources: Mapping[str, Sequence[str]], ranks: Sequence[int]
) -> dict[str, int]:
    """Assigns units, largest first, each to the least loaded of the ranks that hold much of it."""
    held_bytes: dict[str, Counter[int]] = {}
    unit_bytes: Counter[str] = Counter()
    for name, parameters in sources.items():
        unit = _unit(name)
        for layout in (layouts[parameter] for parameter in parameters):
            unit_bytes[unit] += layout.num_bytes
            for rank, (_, sizes) in layout.boxes.items():
                held_bytes.setdefault(unit, Counter())[rank] += math.prod(sizes) * layout.item_bytes
    load = dict.fromkeys(ranks, 0)
    owners: dict[str, int] = {}
    for unit in sorted(unit_bytes, key=lambda unit: (-unit_bytes[unit], unit)):
        largest_share = max(held_bytes[unit][rank] for rank in ranks)
        # Half as much as the largest share is enough, to balance the load; other pipeline stages hold nothing.
        candidates = [rank for rank in ranks if 2 * held_bytes[unit][rank] >= largest_share]
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        owners[unit] = owner
        load[owner] += unit_bytes[unit]
    return owners


def _sends_of(layout: Layout, owner: int, sent: Counter[int]) -> list[Send]:
    """Plans who sends the owner each part it lacks: the holder with the fewest bytes in `sent`, which is updated."""
    holders: dict[Box, list[int]] = {}
    for rank, box in sorted(layout.boxes.items()):
        if math.prod(box[1]):
            holders.setdefault(box, []).append(rank)
    if sum(math.prod(sizes) for _, sizes in holders) != math.prod(layout.shape):
        raise ValueError(
            f"The parts of {layout.name} {list(layout.shape)} overlap or leave a gap: {dict(layout.boxes)}. Each "
            "element must be on one rank, or on several that hold the same part."
        )
    sends = []
    for box, ranks in holders.items():
        if owner in ranks:
            continue
        num_bytes = math.prod(box[1]) * layout.item_bytes
        source = min(ranks, key=lambda rank: (sent[rank], rank))
        sent[source] += num_bytes
        sends.append(Send(layout.name, source, owner, box, num_bytes))
    return sends


def _rounds(owners: Mapping[str, int], sizes: Mapping[str, int], bucket_bytes: int) -> list[list[str]]:
    """Cuts each owner's tensors, in order, into buckets; round i has bucket i of every owner."""
    rounds: list[list[str]] = []
    index: Counter[int] = Counter()
    filled: Counter[int] = Counter()
    for name, owner in owners.items():
        if filled[owner] and filled[owner] + sizes[name] > bucket_bytes:
            index[owner] += 1
            filled[owner] = 0
        filled[owner] += sizes[name]
        while len(rounds) <= index[owner]:
            rounds.append([])
        rounds[index[owner]].append(name)
    return rounds
