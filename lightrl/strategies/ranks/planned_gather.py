"""PlannedGather: gathers each parameter of a sharded model on one rank, its owner, with point-to-point sends.

    parameter   held by                          owner   sent
    q_proj      ranks 0, 1, 2, 3, a quarter each     2   ranks 0, 1 and 3 send their quarters to rank 2
    norm        ranks 0 to 3, each a whole copy      1   nothing

An owner receives only parts that it lacks, each once; `full_tensor` would gather every parameter on all ranks.
Parameters that a server fuses, like q, k and v, have the same owner, so that the owner can compute the digest of the
fused tensor. The plan is made by pure functions, without a process group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightrl.models.conversion import Names, as_in_checkpoint
from lightrl.models.tuning import Part, held_tensors, tuning_of
from lightrl.strategies.ranks.processes import local
from lightrl.weights import Bucket

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes, one of each per dimension


@dataclass(frozen=True)
class Layout:
    """A parameter's full shape, and the part that each rank holds.

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
    """The transfer of one part of a parameter to its owner."""

    name: str
    source: int
    owner: int
    box: Box
    num_bytes: int


@dataclass(frozen=True)
class GatherPlan:
    """The owners, sends and rounds of an export; every rank has the same plan.

    In a round, each owner gathers at most one bucket, or one larger tensor. All ranks finish it before the next round.
    """

    owners: Mapping[str, int]  # exported tensor → rank
    sends: Mapping[str, Sequence[Send]]  # exported tensor → sends of all its parameters
    rounds: Sequence[Sequence[str]]  # exported tensors of each round


def make_plan(
    layouts: Iterable[Layout], sources: Mapping[str, Sequence[str]], *, ranks: Sequence[int], bucket_bytes: int
) -> GatherPlan:
    """Assigns each exported tensor to an owner, balanced by bytes, and lists what other ranks send to the owner.

    Args:
        sources: exported tensor → the parameters that it is computed from, for example a weight and its update.
        ranks: the ranks that may own tensors; [0] gathers everything on rank 0.
        bucket_bytes: the maximum number of bytes that a rank gathers in a round.

    Raises:
        ValueError: if the parts of a parameter overlap or leave a gap.
    """
    by_name = {layout.name: layout for layout in layouts}
    owner_of_unit = _owners(by_name, sources, ranks)  # a unit is a name prefix, see `_unit`
    owners = {name: owner_of_unit[_unit(name)] for name in sources}
    sent: Counter[int] = Counter()  # rank → bytes that it sends; `_sends_of` updates this
    sends = {
        name: [send for parameter in parameters for send in _sends_of(by_name[parameter], owners[name], sent)]
        for name, parameters in sources.items()
    }
    sizes = {name: sum(by_name[each].num_bytes for each in parameters) for name, parameters in sources.items()}
    return GatherPlan(owners, sends, _rounds(owners, sizes, bucket_bytes))


def _unit(name: str) -> str:
    """Returns the prefix of parameters that must have the same owner, such as a layer's attention or MLP parameters."""
    parts = name.split(".")
    index = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return name if index is None else ".".join(parts[: index + 2])


def _owners(
    layouts: Mapping[str, Layout], sources: Mapping[str, Sequence[str]], ranks: Sequence[int]
) -> dict[str, int]:
    """Assigns each unit, largest first, to the least loaded of the ranks that hold much of the unit."""
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
        # For balance, half of the largest share is enough. Ranks of other pipeline stages hold no part of the unit.
        candidates = [rank for rank in ranks if 2 * held_bytes[unit][rank] >= largest_share]
        owner = min(candidates, key=lambda rank: (load[rank], rank))
        owners[unit] = owner
        load[owner] += unit_bytes[unit]
    return owners


def _sends_of(layout: Layout, owner: int, sent: Counter[int]) -> list[Send]:
    """Plans the sends of the parts that the owner lacks, each from the holder with the fewest bytes in `sent`."""
    holders: dict[Box, list[int]] = {}
    for rank, box in sorted(layout.boxes.items()):
        if math.prod(box[1]):
            holders.setdefault(box, []).append(rank)
    if sum(math.prod(sizes) for _, sizes in holders) != math.prod(layout.shape):
        raise ValueError(
            f"The parts of {layout.name} {list(layout.shape)} overlap or leave a gap: {dict(layout.boxes)}. Each "
            "element must be on one rank, or on several ranks that hold the same part."
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
    """Cuts each owner's tensors, in order, into buckets; round i consists of bucket i of every owner."""
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


class PlannedGather:
    """Gathers the parameters of a sharded model whose layout never changes. Every call is collective over `group`.

    A rank holds at most one bucket in addition to its part of the model. With NCCL, the first transfer creates
    connections, which works only after a collective of the run's default group; Lightning's setup runs one.

    Args:
        model: the sharded model or, if this rank holds only some of its modules, the whole model on the meta device.
        held: this rank's parts of the model, DTensors or whole tensors.
        group: the ranks that share the model; None for all ranks of the run.
    """

    def __init__(
        self, model: PreTrainedModel, held: Mapping[str, Tensor], *, group: dist.ProcessGroup | None = None
    ) -> None:
        self._model = model
        whole_of = {name: (value.shape, value.dtype) for name, value in held_tensors(model).items()}
        self._dtypes = {name: dtype for name, (_, dtype) in whole_of.items()}
        self._shapes = {name: shape for name, (shape, _) in whole_of.items()}
        self._group = group
        self._rank = dist.get_rank(group)
        self._device = next((value.device for value in held.values()), torch.device("cpu"))
        boxes: list[dict[str, Box]] = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(boxes, {name: box_of(held[name]) for name in whole_of if name in held}, group=group)
        self._layouts = [
            Layout(
                name,
                tuple(shape),
                8 if dtype == torch.uint8 else dtype.itemsize,  # two values of at most 4 bytes after `merge`
                {rank: boxes[rank][name] for rank in range(len(boxes)) if name in boxes[rank]},
            )
            for name, (shape, dtype) in whole_of.items()
        ]
        self._plans: dict[tuple[str, int, bool], GatherPlan] = {}

    def buckets(
        self, held: Mapping[str, Tensor], bucket_bytes: int, *, part: Part, names: Names, is_spread: bool
    ) -> Iterator[Bucket]:
        """Yields the exported tensors that this rank owns. Rank 0 owns all; with `is_spread`, each rank owns a share.

        `held` has this rank's parts with current values; the other arguments are as in ParallelModel.full_parameters.
        """
        sources = tuning_of(self._model).sources(self._model, part)  # exported name → its parameters
        key = (repr(tuple(sources.items())), bucket_bytes, is_spread)
        if key not in self._plans:
            ranks = list(range(dist.get_world_size(self._group))) if is_spread else [0]
            self._plans[key] = make_plan(self._layouts, sources, ranks=ranks, bucket_bytes=bucket_bytes)
        plan = self._plans[key]
        if not plan.rounds:
            yield Bucket({}, is_last=True)
        for index, exported in enumerate(plan.rounds):
            with torch.no_grad():
                tensors = self._round(plan, exported, held, sources, names)
            is_last = index + 1 == len(plan.rounds)
            if tensors or is_last:
                yield Bucket(tensors, is_last=is_last)
            tensors.clear()

    def _round(
        self,
        plan: GatherPlan,
        exported: Sequence[str],
        held: Mapping[str, Tensor],
        sources: Mapping[str, Sequence[str]],
        names: Names,
    ) -> dict[str, Tensor]:
        """Sends and receives the parts of this round; returns the exported tensors that this rank owns."""
        owned = [name for name in exported if plan.owners[name] == self._rank]
        whole = {source: self._start_whole(source, held.get(source)) for name in owned for source in sources[name]}
        operations: list[dist.P2POp] = []
        unpacked: list[tuple[Tensor, Tensor]] = []  # (part, where it belongs)
        for send in (send for name in exported for send in plan.sends[name]):
            if send.source == self._rank:
                operations.append(self._operation(dist.isend, local(held[send.name].detach()).contiguous(), send.owner))
            elif send.owner == self._rank:
                place = part_at(whole[send.name], send.box)
                part = place
                if not place.is_contiguous():
                    part = torch.empty_like(place, memory_format=torch.contiguous_format)
                    unpacked.append((part, place))
                operations.append(self._operation(dist.irecv, part, send.source))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for part, place in unpacked:
            place.copy_(part)
        tuning = tuning_of(self._model)
        pairs = ((name, tuning.merge(self._model, name, [whole[source] for source in sources[name]])) for name in owned)
        return dict(pairs if names == "module" else as_in_checkpoint(self._model, pairs))

    def _start_whole(self, name: str, held: Tensor | None) -> Tensor:
        """Returns the held parameter if it is whole, otherwise a new whole tensor that contains this rank's part."""
        shape = self._shapes[name]
        if held is None:
            return torch.empty(shape, dtype=self._dtypes[name], device=self._device)
        part = local(held.detach())
        if part.shape == shape:
            return part
        whole = torch.empty(shape, dtype=part.dtype, device=part.device)
        part_at(whole, box_of(held)).copy_(part)
        return whole

    def _operation(self, kind: Callable[..., dist.Work | None], tensor: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, peer if self._group is None else dist.get_global_rank(self._group, peer))


def box_of(tensor: Tensor) -> Box:
    """Returns the position of this rank's part in the whole parameter."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tuple(tensor.shape)
    sharded: Any = tensor
    (chunk,) = sharded.__create_chunk_list__()  # torch's distributed checkpoints also call this
    return tuple(chunk.offsets), tuple(chunk.sizes)


def part_at(whole: Tensor, box: Box) -> Tensor:
    for axis, (start, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole
