"""FSDP2Model: a sharded model as a ParallelModel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightrl.experience import Experience
from lightrl.functional import rectangles
from lightrl.models import Backward, Candidates, LossFunction, Outputs
from lightrl.models.conversion import Names
from lightrl.models.tuning import Part, held_tensors
from lightrl.strategies.head import LogprobSettings, topk_candidates
from lightrl.strategies.layouts.probes import may_be_cut
from lightrl.strategies.layouts.shared_prefix import CALL_OVERHEAD_TOKENS
from lightrl.strategies.ranks.planned_gather import PlannedGather
from lightrl.strategies.ranks.processes import ProcessRanks, Ranks
from lightrl.strategies.sharded_experience.placement import lengths_of
from lightrl.strategies.single import SingleModel
from lightrl.weights import Bucket


class FSDP2Model(SingleModel):
    """Runs SingleModel's computation on a sharded model. Code that reads parameters runs inside the root's forward.

    All ranks must call the model equally often, so a rank with fewer rectangles adds calls with one dummy token.

    Args:
        model: sharded by FSDP2Strategy.
        ranks: the ranks that share the model. All must pass the same number of microbatches.
        value_head: a critic's head, also sharded.
        reduce_every_microbatch: reduce gradients after each microbatch instead of after the last.
        is_offloaded: whether the strategy keeps all shards in CPU memory.
        is_policy: as in SingleModel.
        context_group: the ranks that share packed rows; they must pass the same microbatches.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        ranks: Ranks,
        value_head: torch.nn.Linear | None = None,
        reduce_every_microbatch: bool = False,
        is_offloaded: bool = False,
        is_policy: bool = True,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.ranks = ranks
        self.reduce_every_microbatch = reduce_every_microbatch
        self.is_offloaded = is_offloaded
        self.is_last = True  # whether the microbatch is the update's last, as each is without `forward_backward`
        self.is_trained = any(parameter.requires_grad for parameter in model.parameters())
        self._root = model
        self._gather: PlannedGather | None = None
        # FSDP gathers the root's parameters for this call.
        self._root.run_inside = lambda function, *args, **kwargs: function(*args, **kwargs)
        register_fsdp_forward_method(model, "run_inside")
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # a probe's few tokens are not worth compiling
            # No compile_layers, because the strategy has compiled the layers before sharding them.
            self._root.run_inside(
                super().__init__,
                model,
                settings,
                value_head=value_head,
                compile_layers=False,
                is_policy=is_policy,
                context_group=context_group,
            )
        reshard(self._root)
        wants_packed = context_group is not None or model.device.type != "cpu"
        if context_group is not None and not (self.can_pack and may_be_cut(model.config)):
            raise cp_refused(context_group.size(), model.config.model_type)
        # A packed row needs one call on every rank. Rows with masks could need a different number on each rank.
        self.form = "packed" if self.can_pack and wants_packed else "rectangles"

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterator[Outputs]:
        for microbatch, calls in zip(microbatches, self._calls(microbatches), strict=True):
            self.num_calls = calls
            yield self._outputs(microbatch, topk or topk_candidates(microbatch))
            self.ranks.step()
        reshard(self._root)
        if self.value_head is not None:
            reshard(self.value_head)

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for index, (microbatch, calls) in enumerate(zip(microbatches, self._calls(microbatches), strict=True)):
            self.num_calls = calls
            self.is_last = is_last = index == len(microbatches) - 1
            for module in (self._root, self.value_head):
                if isinstance(module, FSDPModule):
                    module.set_requires_gradient_sync(is_last or self.reduce_every_microbatch)
            backward(loss_fn(microbatch, self._outputs(microbatch, topk_candidates(microbatch))))
            self.ranks.step()

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        (self.num_calls,) = self._calls([microbatch])
        outputs = self._outputs(microbatch, topk)
        self.ranks.step()
        if not torch.is_grad_enabled():
            reshard(self._root)
        return outputs

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        reshard(self._root)
        held = held_tensors(self.model)
        if self._gather is None:
            assert isinstance(self.ranks, ProcessRanks)
            self._gather = PlannedGather(self.model, held, group=self.ranks.control_group)
        for bucket in self._gather.buckets(held, bucket_bytes, part=part, names=names, is_spread=is_spread):
            self.ranks.step()  # each bucket counts as progress for the watch
            yield bucket

    def move_to(self, device: torch.device) -> None:
        if not self.is_offloaded:
            super().move_to(device)

    def _calls(self, microbatches: Sequence[Experience]) -> list[int]:
        """Returns the number of model calls per microbatch: the largest number of rectangles on any rank."""
        if self.packs_all(microbatches):
            return [1] * len(microbatches)
        lengths = [[max(1, tokens - 1) for tokens in rows] for rows in lengths_of(microbatches)]
        return self.ranks.max_each([len(rectangles(rows, CALL_OVERHEAD_TOKENS)) for rows in lengths])

    def _outputs(self, experience: Experience, candidates: Candidates = 0) -> Outputs:
        # A tuple, because FSDP searches only tensors, tuples and dicts for the start of the backward, not Outputs.
        return Outputs(*self._root.run_inside(self._tensors, experience, candidates))

    def _tensors(self, experience: Experience, candidates: Candidates) -> tuple[Tensor | None, ...]:
        outputs = super()._outputs(experience, candidates)
        return tuple(getattr(outputs, field.name) for field in fields(outputs))


def cp_refused(cp: int, model_type: str) -> ValueError:
    return ValueError(
        f"cp={cp} cuts packed rows, but a model of type {model_type!r} does not allow it: its tokens interact beyond "
        "causal SDPA attention (a state, sparse attention, sinks), or it changes logits. Set cp to 1."
    )


def whole(value: Tensor) -> Tensor:
    """Gathers a sharded tensor on all ranks, without gradient; collective. Other tensors are only detached."""
    plain: Tensor = value.detach()
    return plain.full_tensor() if isinstance(plain, DTensor) else plain


def reshard(model: torch.nn.Module) -> None:
    """Frees gathered parameters, which otherwise stay in memory after a forward pass without a backward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
