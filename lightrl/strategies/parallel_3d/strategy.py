"""Parallel3DStrategy: pipeline, data, context, expert and tensor parallelism, from transformers' plans for each family.

World rank = ((pp · dp_size + dp) · cp_size + cp) · tp_size + tp, so the tp ranks, which communicate most, are
neighbors. The ranks with the same dp index hold one copy of the model and process the same rows. The last stage
computes the loss that is minimized; other stages recompute it from the same outputs, without gradient, for the metrics.

With ep, adjacent ranks of a stage divide the experts of its layers, across dp, cp and tp. As tp ranks hold different
tokens between projections, a MoE block treats them as it treats dp ranks:

    pp 2, dp 2, tp 2, ep 2   stage 0: ranks 0 2 share the first half of each layer's experts, ranks 1 3 the second
                             stage 1: ranks 4 6 and 5 7, likewise
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightrl.experience import Experience
from lightrl.functional import aligned_to_tokens, predicting_positions
from lightrl.models import Backward, Candidates, LossFunction, Outputs, RoleMesh
from lightrl.models.conversion import Names
from lightrl.models.expert_parallel import expert_mesh
from lightrl.models.tuning import Part
from lightrl.strategies.empty_model import empty_model
from lightrl.strategies.fsdp2 import FSDP2Strategy
from lightrl.strategies.fsdp2_model import cp_refused
from lightrl.strategies.head import LogprobSettings, topk_candidates
from lightrl.strategies.layouts.branches import branch_rows
from lightrl.strategies.layouts.packed_attention import make_packable
from lightrl.strategies.layouts.probes import may_be_cut
from lightrl.strategies.parallel_3d.pipeline import HeldActivations
from lightrl.strategies.parallel_3d.stages import Feed, SplitModel, ends_group, split_model
from lightrl.strategies.parallel_3d.tensor_plans import (
    check_model,
    check_schedule,
    check_sizes,
    check_world,
    tensor_plan,
)
from lightrl.strategies.precision import set_expert_precision
from lightrl.strategies.ranks.planned_gather import PlannedGather
from lightrl.strategies.ranks.processes import ProcessRanks
from lightrl.strategies.ranks.role_mesh import OtherRanksModel, Place, check_meshes, make_place, planned_roles
from lightrl.weights import Bucket

if TYPE_CHECKING:
    import lightning as L
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


AXES = ("pp", "dp", "tp")  # cp is part of dp, since its ranks also shard the parameters


class Parallel3DStrategy(FSDP2Strategy):
    """Pipeline, data, context, expert and tensor parallelism: `Parallel3DStrategy(pp=2, tp=2)` on 8 devices has dp 2.

    Splits models of families that have plans in transformers; see docs/models.md. All roles, trained or not, are split
    the same way, unless they have a `Role.mesh`. Each stage shards its parameters over dp, as in FSDP2Strategy.

    Args:
        pp: number of pipeline ranks. Each holds a similar number of parameters, including the embedding and the head.
        dp: number of ranks with different trajectories. None means the world size divided by pp · cp · tp.
        tp: number of ranks that share each layer and the vocabulary. Must divide the number of key-value heads, but
            not the vocabulary. MoE blocks are not split; their tokens are.
        ep, cp: as in FSDP2Strategy, within a stage. ep must divide dp · cp · tp, and cp must divide the attention heads
            of a tp rank.
        schedule: `1F1B`, or `Interleaved1F1B` with several stages per rank, which idles less but sends more. The idle
            fraction is about (pp - 1) / (stages per rank · microbatches + pp - 1); a smaller `microbatch_tokens` makes
            more microbatches.
        stages_per_rank: number of stages per rank. None means 2 for `Interleaved1F1B`, otherwise 1.
        activation_checkpointing: keep only each layer's input, and recompute the layer in the backward pass.
        hang_timeout_s, save_async: as in FSDP2Strategy.
    """

    def __init__(
        self,
        *,
        pp: int = 1,
        dp: int | None = None,
        tp: int = 1,
        ep: int = 1,
        cp: int = 1,
        schedule: Literal["1F1B", "Interleaved1F1B"] = "1F1B",
        stages_per_rank: int | None = None,
        activation_checkpointing: bool = False,
        hang_timeout_s: float = 600.0,
        save_async: bool = False,
    ) -> None:
        super().__init__(
            ep=ep,
            cp=cp,
            activation_checkpointing=activation_checkpointing,
            hang_timeout_s=hang_timeout_s,
            save_async=save_async,
        )
        self.pp, self.dp, self.tp = pp, dp, tp
        self.schedule = schedule
        self.stages_per_rank = stages_per_rank or (1 if schedule == "1F1B" else 2)
        check_schedule(schedule, self.stages_per_rank)
        self._splits: dict[torch.nn.Module, SplitModel] = {}
        self._ends: dict[DeviceMesh, dist.ProcessGroup | None] = {}  # mesh → its `ends_group`, for tied embeddings

    @property
    def dp_size(self) -> int:
        """The number of ranks with different trajectories, known before any process starts."""
        if self.dp is not None:
            return self.dp
        return max(1, self.num_processes * self.num_nodes // max(1, self.pp * self.cp * self.tp))

    def check_sizes(self, module: L.LightningModule | None = None) -> None:
        """Raises ValueError if the sizes do not fit the world size or one of the module's models."""
        world = self.num_processes * self.num_nodes
        check_world({"pp": self.pp, "dp": self.dp_size, "cp": self.cp, "tp": self.tp}, world)
        if self.precision_plugin.precision == "16-mixed":
            raise ValueError(
                "Parallel3DStrategy does not support precision='16-mixed', which scales a loss that only the last "
                "stage computes. Set trainer.precision to bf16-mixed."
            )
        module = self.lightning_module if module is None else module
        if getattr(module, "optimizer", None) == "muon":
            raise ValueError(
                "optimizer='muon' needs whole matrices or FSDP2's shards, which Parallel3DStrategy does not have. Use "
                "FSDP2Strategy, or set optimizer to adamw."
            )
        check_meshes(module, world)
        for planned in planned_roles(module).values():
            if planned.spec.quantization is not None:
                raise ValueError(
                    f"Parallel3DStrategy cannot split a model with quantization={planned.spec.quantization!r}. Use "
                    "FSDP2Strategy, or remove quantization."
                )
        if self.ep > 1:
            self._check_ep(module, {"ranks of a stage": world // self.pp})
        if self.cp > 1:
            self._check_cp(module, {}, self.tp)
        for name, role in planned_roles(module).items():
            if role.spec.url is not None:
                continue
            pp, tp = (self.pp, self.tp) if role.mesh is None else (role.mesh.pp, role.mesh.tp)
            if pp > 1 and self.precision_plugin.precision == "bf16-true":
                raise ValueError(
                    f"precision='bf16-true' does not support a pipeline yet, got pp={pp} for the {name}. Its stages "
                    "would send activations of different dtypes. Set trainer.precision to bf16-mixed."
                )
            config = role.spec.load_config()
            check_sizes(config, pp, tp, *self._schedule_at(pp))
            check_model(config, tp)
            if role.tuning.keeps_base:
                role.tuning.check_split(name, empty_model(role), tensor_plan(config) if tp > 1 else None)

    def _make_mesh(self) -> dist.ProcessGroup:
        sizes = (self.pp, self.dp_size * self.cp, self.tp)
        mesh = self._mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=AXES)
        self._ends[mesh] = ends_group(mesh)
        if self.ep > 1:
            self._expert_mesh = expert_mesh(self.root_device.type, num_stages=self.pp, ep=self.ep)
        if self.cp > 1:
            sizes_by_cp = (self.pp, self.dp_size, self.cp, self.tp)
            by_cp = init_device_mesh(self.root_device.type, sizes_by_cp, mesh_dim_names=("pp", "dp", "cp", "tp"))
            self._context_group = by_cp["cp"].get_group()
            return by_cp["dp"].get_group()  # the axis dp of `mesh` includes the cp ranks
        return mesh["dp"].get_group()

    @property
    def device_mesh(self) -> DeviceMesh:
        return super().device_mesh if self._mesh is None else self._mesh

    @property
    def _value_head(self) -> torch.nn.Linear | None:
        """The critic's head on the policy's body, which is split together with the policy."""
        return getattr(self.lightning_module, "value_head", None)

    def _needs_split(self, model: torch.nn.Module) -> bool:
        return model not in self._splits and model is not self._value_head

    def _split_models(self) -> None:
        super()._split_models()
        assert isinstance(self.ranks, ProcessRanks)
        self.ranks.copies += [split.copy for split in self._splits.values() if split.copy is not None]

    def _make_place(self, mesh: RoleMesh) -> Place:
        members = mesh.ranks(self.world_size)
        sizes = (mesh.pp, len(members) // (mesh.pp * mesh.tp), mesh.tp)
        assert isinstance(self.ranks, ProcessRanks)
        place = make_place(self.ranks, members, sizes, AXES, self.root_device)
        self._ends[place.mesh] = ends_group(place.mesh)
        return place

    def shard(self, model: torch.nn.Module, place: Place | None = None) -> None:
        """Splits a model in place, with a critic's head on its body if there is one. Collective over its ranks."""
        mesh = self.device_mesh if place is None else place.mesh
        schedule, stages_per_rank = self._schedule_at(mesh["pp"].size())
        split = split_model(
            cast("PreTrainedModel", model),
            mesh,
            ends=self._ends[mesh],
            experts=self._expert_mesh,
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            device=self.root_device,
            checkpoint_activations=self.activation_checkpointing,
            is_mixed=self.precision_plugin.precision == "bf16-mixed",
            value_head=self._value_head if model is getattr(self.lightning_module, "policy", None) else None,
        )
        self._splits[model] = split

    def _schedule_at(self, pp: int) -> tuple[str, int]:
        """Returns the schedule and stages per rank for `pp` ranks, since a role's mesh may have no pipeline."""
        return (self.schedule, self.stages_per_rank) if pp > 1 or pp == self.pp else ("1F1B", 1)

    def parallel_model(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        role: str = "policy",
        value_head: torch.nn.Linear | None = None,
    ) -> Parallel3DModel | OtherRanksModel:
        ranks = self.ranks.of_role(role)
        if not isinstance(ranks, ProcessRanks):
            return OtherRanksModel()
        return Parallel3DModel(
            self._splits[model],
            settings,
            group=ranks.control_group,
            is_policy=role == "policy",
            context_group=self._context_group,
        )


class Parallel3DModel:
    """A split model as a ParallelModel. Every call is collective over the ranks with the same dp index.

    Args:
        is_packed: pack each microbatch into one row, if the model has plain causal attention. None packs with a
            `context_group`, and on all devices except the CPU, where separate rows are faster.
        group: all ranks that share the model; None for all ranks of the run.
        is_policy, context_group: as in FSDP2Model.
    """

    def __init__(
        self,
        split: SplitModel,
        settings: LogprobSettings,
        *,
        is_packed: bool | None = None,
        group: dist.ProcessGroup | None = None,
        is_policy: bool = True,
        context_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.split = split
        self.group = group
        self.is_policy, self.context_group = is_policy, context_group
        set_expert_precision(split.model)
        self._gather: PlannedGather | None = None
        self.settings = settings
        on_gpu = split.pipeline.device.type != "cpu"
        wants_packed = context_group is not None or (on_gpu if is_packed is None else is_packed)
        config = split.model.config
        caps_attention = getattr(config, "attn_logit_softcapping", None) is not None
        self.is_packed = wants_packed and not caps_attention and may_be_cut(config) and make_packable(split.model)
        if context_group is not None and not self.is_packed:
            raise cp_refused(context_group.size(), config.model_type)

    def shares_prefixes(self, experience: Experience) -> bool:
        return False

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
        """Returns each microbatch's outputs, on every rank, without gradient."""
        parts = [branch_rows(microbatch) for microbatch in microbatches]
        feeds = self._feeds([rows for rows, _ in parts], [topk or topk_candidates(rows) for rows, _ in parts])
        results = self._results(feeds, None)
        self.split.reshard()
        return [
            join(self._outputs(result, feed, rows))
            for result, feed, (rows, join) in zip(results, feeds, parts, strict=True)
        ]

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        """Computes one microbatch's outputs, cutting it into parts so that the stages can work at the same time.

        Ranks that exchange tokens for experts do not cut it, since all need the same number of parts. The outputs'
        backward pass runs every stage's backward pass, so all ranks must run it.
        """
        cuts = self.split.pipeline.num_ranks > 1 and not self.split.divides_experts
        num = 2 * self.split.pipeline.num_stages if cuts else 1
        size = -(-len(microbatch) // num)
        starts = range(0, len(microbatch), size)
        parts = [microbatch.select(range(start, min(start + size, len(microbatch)))) for start in starts]
        feeds, held = self._feeds(parts, [topk] * len(parts)), HeldActivations() if torch.is_grad_enabled() else None
        # Listed before the forwards, which replace parameters with gathered ones that have no gradients.
        parameters: list[Tensor] = [value for stage in self.split.stages.values() for value in stage.parameters()]
        result = torch.cat(self._results(feeds, held))
        if held is None:
            self.split.reshard()
        else:
            run_backward = functools.partial(self._backward, feeds, held, parameters)
            start = torch.zeros((), requires_grad=True)  # makes autograd call `run_backward`
            result = _Results.apply(run_backward, start, result)  # type: ignore[no-untyped-call]
        whole_feed = replace(feeds[0], positions=predicting_positions(microbatch.loss_mask))  # in the order of `result`
        return self._outputs(result, whole_feed, microbatch)

    def _backward(self, feeds: list[Feed], held: HeldActivations, parameters: list[Tensor], gradient: Tensor) -> None:
        """Backpropagates the gradient of all results, [N, width], and adds to the parameters' gradients."""
        gradients = torch.split(gradient, [len(feed.positions[0]) for feed in feeds])
        earlier = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in earlier:  # their gradients are complete, and must not be summed over ranks again
            parameter.grad = None

        def run(stage: int, index: int, output: Tensor, gradient: Tensor | None, is_last: bool) -> None:
            self.split.set_last_backward(stage, is_last)
            with torch.autocast(self.split.pipeline.device.type, enabled=False):
                torch.autograd.backward(output, gradients[index] if gradient is None else gradient)

        self.split.pipeline.run(len(feeds), None, run, lambda index: self._activation(feeds[index]), held=held)
        self.split.finish_gradients()
        for parameter, gradient in earlier:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _results(self, feeds: list[Feed], held: HeldActivations | None) -> list[Tensor]:
        """Returns the last stage's results [N, width] for each feed, on every pipeline rank, without gradient."""
        results: dict[int, Tensor] = {}

        def forward(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            output: Tensor = self.split.stages[stage](hidden, feeds[index], self.settings)
            if self.split.stages[stage].is_last:
                results[index] = output.detach()
            return output

        self.split.pipeline.run(len(feeds), forward, None, lambda index: self._activation(feeds[index]), held=held)
        return [self._from_last(results.get(index), feed) for index, feed in enumerate(feeds)]

    @torch.enable_grad()
    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        """Computes the same gradients as one process. Calls `loss_fn` on all ranks, `backward` on the last stage's.

        Gradients must be None or zero before; afterwards they are averaged over dp, and complete over pp and tp.
        """
        microbatches = list(microbatches)  # each is read several times
        parts = [branch_rows(microbatch) for microbatch in microbatches]
        feeds = self._feeds([rows for rows, _ in parts], [topk_candidates(rows) for rows, _ in parts])
        results: dict[int, Tensor] = {}

        def loss_of(index: int, result: Tensor) -> Tensor:
            rows, join = parts[index]
            return loss_fn(microbatches[index], join(self._outputs(result, feeds[index], rows)))

        def run_forward(stage: int, index: int, hidden: Tensor | None) -> Tensor:
            output: Tensor = self.split.stages[stage](hidden, feeds[index], self.settings)
            if not self.split.stages[stage].is_last:
                return output
            results[index] = output.detach()
            return loss_of(index, output)

        def run_backward(stage: int, index: int, output: Tensor, gradient: Tensor | None, is_last: bool) -> None:
            self.split.set_last_backward(stage, is_last)
            if gradient is None:
                backward(output)
                return
            with torch.autocast(self.split.pipeline.device.type, enabled=False):
                torch.autograd.backward(output, gradient)

        self.split.pipeline.run(len(feeds), run_forward, run_backward, lambda index: self._activation(feeds[index]))
        self.split.finish_gradients()
        has_last = any(stage.is_last for stage in self.split.stages.values())
        with torch.no_grad():
            for index, feed in enumerate(feeds):
                result = self._from_last(results.get(index), feed)
                if not has_last:
                    loss_of(index, result)

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        self.split.reshard()
        held = self.split.held_tensors()
        if self._gather is None:
            self._gather = PlannedGather(self.split.whole, held, group=self.group)
        return self._gather.buckets(held, bucket_bytes, part=part, names=names, is_spread=is_spread)

    def move_to(self, device: torch.device) -> None:
        for stage in self.split.stages.values():  # not the model, because FSDP shards each stage
            stage.to(device)

    def _feeds(self, microbatches: Sequence[Experience], candidates: Sequence[Candidates]) -> list[Feed]:
        size = self.split.mesh["tp"].size()  # W must be a multiple: tp ranks divide the tokens
        options: dict[str, Any] = {"is_packed": self.is_packed, "replays": self.is_policy, "group": self.context_group}
        has_logprobs = self.split.whole.get_output_embeddings() is not None  # a critic has none
        return [
            Feed.of(part, self.settings, num if has_logprobs else 0, multiple=size, **options)
            for part, num in zip(microbatches, candidates, strict=True)
        ]

    def _activation(self, feed: Feed) -> tuple[torch.Size, torch.dtype]:
        rows, width = feed.token_ids.shape
        shape = (rows, width // self.split.mesh["tp"].size(), self.split.model.config.hidden_size)
        return torch.Size(shape), next(self.split.whole.parameters()).dtype

    def _from_last(self, result: Tensor | None, feed: Feed) -> Tensor:
        """Sends the last stage's result [N, width] to all ranks of the pipeline."""
        pipeline = self.split.pipeline
        if result is None:
            result = torch.empty(len(feed.positions[0]), feed.width, device=pipeline.device)
        if pipeline.num_ranks > 1:
            dist.broadcast(result, group=pipeline.group, group_src=pipeline.num_ranks - 1)
        return result

    def _outputs(self, result: Tensor, feed: Feed, rows: Experience) -> Outputs:
        """Turns the last stage's results [N, width] into Outputs aligned to tokens, 0 outside the loss mask."""
        shape = rows.token_ids.shape
        logprobs, entropy, values = (aligned_to_tokens(result[:, index], *feed.positions, shape) for index in range(3))
        outputs = Outputs(logprobs=logprobs, entropy=entropy, values=values if self.split.has_values else None)
        num = feed.num_candidates
        if num == 0:
            return outputs
        topk = aligned_to_tokens(result[:, 3 : 3 + num], *feed.positions, shape)
        has_ids = isinstance(feed.targets.candidates, int)
        ids = aligned_to_tokens(result[:, 3 + num :].long(), *feed.positions, shape) if has_ids else None
        return replace(outputs, teacher_topk=topk, teacher_topk_ids=ids)


class _Results(torch.autograd.Function):
    """Makes a pipeline's results [N, width] differentiable: `run_backward` passes their gradient to the stages."""

    @staticmethod
    def forward(ctx: Any, run_backward: Callable[[Tensor], None], _: Tensor, results: Tensor) -> Tensor:
        ctx.run_backward = run_backward
        return results.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.run_backward(gradient)
        return None, None, None
