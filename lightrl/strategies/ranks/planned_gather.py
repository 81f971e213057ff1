"""PlannedGather: executes a GatherPlan between the ranks that share a model, point to point.

Only parts that an owner lacks are sent, and only to the owner; `full_tensor` would gather every parameter on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightrl.models.conversion import Names, exported_tensors
from lightrl.models.tuning import Part, held_tensors, tuning_of
from lightrl.strategies.tensor_parallel import local
from lightrl.weights import Bucket
from lightrl.weights.gather_plan import Box, GatherPlan, Layout, make_plan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PlannedGather:
    """Gathers the parameters of one sharded model; its layout must not change. Every call is collective over `group`.

    A rank holds at most one bucket besides its own part of the model. With NCCL the first transfer creates connections,
    which requires that the run's default group was used before; Lightning's setup does that.

    Args:
        model: the sharded model; if this rank holds only some modules, the whole model without memory.
        held: this rank's parts of it, DTensors or whole tensors.
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
                dtype.itemsize,
                {rank: boxes[rank][name] for rank in range(len(boxes)) if name in boxes[rank]},
            )
            for name, (shape, dtype) in whole_of.items()
        ]
        self._plans: dict[tuple[str, int, bool], GatherPlan] = {}

    def buckets(
        self, held: Mapping[str, Tensor], bucket_bytes: int, *, part: Part, names: Names, is_spread: bool
    ) -> Iterator[Bucket]:
        """Yields the exported tensors that this rank owns: all on rank 0, or with `is_spread` a share on each rank.

        Args:
            held: this rank's parts, as they are now.
            bucket_bytes, part, names, is_spread: as in ParallelModel.full_parameters.
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
        own = [name for name in exported if plan.owners[name] == self._rank]
        whole = {source: self._start_whole(source, held.get(source)) for name in own for source in sources[name]}
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
        tensors: dict[str, Tensor] = {}
        for name in own:
            tensors.update(exported_tensors(self._model, names, name, [whole[source] for source in sources[name]]))
        return tensors

    def _start_whole(self, name: str, held: Tensor | None) -> Tensor:
        """Allocates the whole parameter and fills in this rank's part; if this rank has all of it, returns that."""
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
    (chunk,) = sharded.__create_chunk_list__()  # torch's distributed checkpoints use it too
    return tuple(chunk.offsets), tuple(chunk.sizes)


def part_at(whole: Tensor, box: Box) -> Tensor:
    """Returns a view of this box of the whole parameter."""
    for axis, (start, size) in enumerate(zip(*box, strict=True)):
        whole = whole.narrow(axis, start, size)
    return whole
