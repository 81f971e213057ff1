"""Reduces a Hugging Face model to this rank's part: its pipeline stages, tensor slices and data shards.

The model object is kept, without other ranks' layers, so parameters keep their Hugging Face names. A Stage runs
consecutive layers; the last stage turns hidden states into logprobs, entropies and values.

Shapes: B trajectories, T tokens; R rows and W columns of a rank's forward, W a multiple of tp; N predicting positions,
K teacher tokens at each; H hidden size. Stages send each other [R, W / tp, H].
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightrl.columns import NATIVE
from lightrl.experience import Experience
from lightrl.functional import on_host, predicting_positions, to_device
from lightrl.models import Candidates, Role, recompute_contexts, scalar_head, wrap_blocks
from lightrl.models.conversion import checkpoint_files, load_parts, semi_private
from lightrl.models.expert_parallel import shard_experts, split_experts
from lightrl.models.model_spec import check_files
from lightrl.models.moe import moe_blocks
from lightrl.models.routes import replaying
from lightrl.models.tuning import held_tensors, tuning_of
from lightrl.strategies.empty_model import allocate, take_role
from lightrl.strategies.fsdp2_model import reshard
from lightrl.strategies.head import Logprobs, LogprobSettings, Targets, TopK, read_head, whole_head
from lightrl.strategies.layouts.packed_attention import PackedRows, Total, no_mask
from lightrl.strategies.layouts.shared_prefix import each_alone, packed
from lightrl.strategies.parallel_3d.pipeline import Pipeline
from lightrl.strategies.parallel_3d.tensor_parallel import (
    first_row,
    part_of_sequence,
    share_parameters,
    split_parameters,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
    whole_sequence,
)
from lightrl.strategies.parallel_3d.tensor_plans import (
    LogitTransform,
    check_model,
    check_sizes,
    split_layers,
    tensor_plan,
)
from lightrl.strategies.ranks.processes import local
from lightrl.strategies.ranks.role_mesh import empty_out

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Feed:
    """A microbatch as input for the stages, equal on all its ranks, but each cp rank has part of a packed row."""

    token_ids: Tensor  # int64 [R, W]
    position_ids: Tensor | None  # int64 [1, W], restart at each trajectory; None if not packed
    packed_rows: PackedRows | None  # for the attention; None if not packed
    routes: Tensor | None  # uint8 [R, W, w], the experts to replay
    rows: Tensor  # [n], rows in [R, W] of the predicting positions that this rank holds; n = N without cp
    columns: Tensor  # [n], their columns
    here: Tensor | None  # [n], indices of these positions among all N; None for all
    positions: tuple[Tensor, Tensor]  # [N] each, the rows and columns of all predicting positions in the Experience
    targets: Targets  # the tokens to compute logprobs for at this rank's positions

    @classmethod
    def of(
        cls,
        experience: Experience,
        settings: LogprobSettings,
        candidates: Candidates,
        *,
        multiple: int,
        is_packed: bool,
        replays: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> Feed:
        """Builds a microbatch's feed; W is a multiple of `multiple`.

        Args:
            replays: whether to replay the experience's routes, if it has any.
            group: the ranks that divide the packed row; each gets a part of equal size.
        """
        rows, columns = positions = predicting_positions(experience.loss_mask)
        device = experience.token_ids.device
        packed_rows = position_ids = routes = here = None
        token_routes = experience.routes if replays else None
        if is_packed:
            layout = packed(each_alone(experience), experience.token_ids.shape, group, multiple=multiple)
            packed_rows = PackedRows(layout.lengths, device, group=group)
            tokens = to_device(torch.stack([layout.rows, layout.columns]), device)  # [2, P]
            token_ids, position_ids = experience.token_ids[tokens[0], tokens[1]][None], tokens[1][None]
            routes = None if token_routes is None else token_routes[tokens[0], tokens[1]][None]
            if group is None:
                columns = to_device(layout.flat_indices, device)[rows, columns]
            else:
                indices = layout.flat_indices[predicting_positions(on_host(experience.loss_mask))]
                on_rank = (indices >= 0).nonzero()[:, 0]
                here, columns = to_device(on_rank, device), to_device(indices[on_rank], device)
            rows = torch.zeros_like(columns)
        else:  # no token attends to padding at a row's end, and a row's last token predicts nothing
            width = max(1, int(on_host(experience.lengths).max()) - 1)
            width += -width % multiple
            token_ids = experience.token_ids[:, :width]
            token_ids = nn.functional.pad(token_ids, (0, width - token_ids.shape[1]))
            if token_routes is not None:
                token_routes = token_routes[:, :width]
                routes = nn.functional.pad(token_routes, (0, 0, 0, width - token_routes.shape[1]), value=NATIVE)
        predicted_rows, predicted_columns = (each if here is None else each[here] for each in positions)
        return cls(
            token_ids=token_ids,
            position_ids=position_ids,
            packed_rows=packed_rows,
            routes=routes,
            rows=rows,
            columns=columns,
            here=here,
            positions=positions,
            targets=Targets.at(experience, predicted_rows, predicted_columns, candidates, settings),
        )

    @property
    def num_candidates(self) -> int:
        """K, the number of additional tokens at each position."""
        candidates = self.targets.candidates
        return candidates if isinstance(candidates, int) else candidates.shape[1]

    @property
    def width(self) -> int:
        """Number of values that the last stage returns per position."""
        return 3 + self.num_candidates * (2 if isinstance(self.targets.candidates, int) else 1)


class Stage(nn.Module):
    """Runs consecutive layers: the model's body, whose modules it shares, with identities for other stages' layers.

    Args:
        model: the Hugging Face model, already without the parts of other ranks.
        layers: indices of the stage's layers; the stage with the first layer reads token ids instead of hidden states.
        is_last: return results instead of hidden states: each predicted token's logprob, entropy and value, [N, 3] (0
            if the model has no head for it), the logprobs of K additional tokens and, for a top-k, these tokens' ids.
        value_head: the critic's head on this policy's body; a separate critic contains its head, `score`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        *,
        is_last: bool,
        tp: DeviceMesh,
        logits: LogitTransform,
        value_head: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.is_last, self.tp, self.logits = is_last, tp, logits
        self.body = copy.copy(model.base_model)
        self.body._modules = dict(self.body._modules)  # a copy, so that the model keeps its children
        layer_by_index = dict(self.body.layers.named_children())
        indices, identity = range(model.config.num_hidden_layers), semi_private("PipelineIdentityLayer")
        all_layers = [layer_by_index[str(index)] if index in layers else identity() for index in indices]
        self.body.layers = nn.ModuleList(all_layers)
        if layers.start > 0:
            self.body.embed_tokens = None  # because FSDP shards a parameter in only one stage
        if not is_last:
            self.body.norm = identity()
        self.head = model.get_output_embeddings() if is_last else None
        own_head = scalar_head(model)
        self.value_head = (value_head if own_head is None else own_head) if is_last else None
        self._received: Tensor | None = None
        # Must run before FSDP's hook, which reads the inputs.
        all_layers[layers.start].register_forward_pre_hook(self._enter, prepend=True)

    def forward(self, hidden: Tensor | None, feed: Feed, settings: LogprobSettings) -> Tensor:
        """Maps the previous stage's hidden states (or None) to [R, W / tp, H]; the last stage returns [N, width]."""
        is_cached = torch.is_autocast_cache_enabled()
        # FSDP replaces parameters, but autocast's cached casts would still refer to the old parameters.
        torch.set_autocast_cache_enabled(is_cached and not isinstance(self, FSDPModule))
        try:
            return self._run(hidden, feed, settings)
        finally:
            torch.set_autocast_cache_enabled(is_cached)

    def _run(self, hidden: Tensor | None, feed: Feed, settings: LogprobSettings) -> Tensor:
        self._received = hidden
        inputs: dict[str, Any] = {"input_ids": feed.token_ids}
        if hidden is not None:  # a placeholder for shape, dtype, device; `_enter` passes `hidden` to the first layer
            inputs = {"inputs_embeds": hidden.new_empty(1).expand(*feed.token_ids.shape, hidden.shape[-1])}
        if feed.packed_rows is not None:
            inputs |= {"position_ids": feed.position_ids, "packed_rows": feed.packed_rows}
            inputs["attention_mask"] = no_mask(feed.token_ids.device)
        routes = feed.routes
        if routes is not None:
            routes = routes.chunk(self.tp.size(), 1)[self.tp.get_local_rank()].flatten(0, 1)
        with replaying(routes):
            hidden = self.body(**inputs, use_cache=False).last_hidden_state
        return self._results(hidden, feed, settings) if self.is_last else hidden

    def _enter(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Sets the first layer's input: this rank's part of the sequence, or the previous stage's hidden states."""
        hidden, self._received = self._received, None
        if hidden is None:
            hidden = part_of_sequence(args[0], self.tp) if self.tp.size() > 1 else args[0]
        return (hidden, *args[1:])

    def _results(self, hidden: Tensor, feed: Feed, settings: LogprobSettings) -> Tensor:
        """Computes the last stage's results for the predicted tokens, [N, width], from the hidden states."""
        is_split = self.tp.size() > 1
        zeros = torch.zeros(len(feed.rows), dtype=torch.float32, device=hidden.device)
        results, values = {"logprobs": zeros, "entropy": zeros}, zeros
        if self.value_head is not None:
            scalars = self.value_head(hidden.to(self.value_head.weight.dtype))
            scalars = whole_sequence(scalars, self.tp, gradients_add_up=False) if is_split else scalars
            values = scalars[feed.rows, feed.columns, 0].float()
        if self.head is not None:
            whole = whole_sequence(hidden, self.tp, gradients_add_up=True) if is_split else hidden
            functions = self._head_functions(whole[feed.rows, feed.columns])
            results = read_head(*functions, feed.targets, settings, logit_scale=self.logits.scale)
        columns = [results["logprobs"][:, None], results["entropy"][:, None], values[:, None]]
        # float32 is exact for ids up to 2^24, which no vocabulary reaches.
        columns += [results[name].float() for name in ("teacher_topk", "teacher_topk_ids") if name in results]
        result = torch.cat(columns, 1)
        if feed.here is None:
            return result
        result = result.new_zeros(len(feed.positions[0]), result.shape[1]).index_copy(0, feed.here, result)
        assert feed.packed_rows is not None
        total: Tensor = Total.apply(result, feed.packed_rows.group)  # type: ignore[no-untyped-call]
        return total

    def _head_functions(self, hidden: Tensor) -> tuple[TopK, Logprobs]:
        """Returns the functions that `read_head` needs, for hidden states [N, H]."""
        head: Any = self.head
        if self.tp.size() == 1 and self.logits.cap is None:
            return whole_head(head, hidden)
        group = self.tp.get_group() if self.tp.size() > 1 else None
        inputs: dict[str, Any] = {
            "hidden": hidden,
            "weight": local(head.weight),
            "group": group,
            "first_id": first_row(head.weight, self.tp),
            "cap": self.logits.cap,
        }
        return functools.partial(vocab_parallel_topk, **inputs), functools.partial(vocab_parallel_logprobs, **inputs)


@dataclass
class SplitModel:
    """A model that is split over ranks; this rank holds one part."""

    model: PreTrainedModel
    whole: PreTrainedModel  # the modules of all ranks, on the meta device
    mesh: DeviceMesh
    pipeline: Pipeline
    stages: dict[int, Stage]
    stage_of: dict[str, int]  # name in the whole model's `held_tensors` → stage
    has_values: bool  # whether the model has a scalar head, or a critic's head on its body
    tied: Tensor | None  # this rank's embedding or output head, if tied to one on a different rank
    tied_group: dist.ProcessGroup | None
    divides_experts: bool  # whether ranks exchange tokens, so that all must run the same forwards

    def set_last_backward(self, stage: int, is_last: bool) -> None:
        """Sets whether the next backward pass is the stage's last, which reduces gradients over dp."""
        module = self.stages[stage]
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(is_last)
            module.set_requires_gradient_sync(is_last)

    def reshard(self) -> None:
        for stage in self.stages.values():
            reshard(stage)

    def finish_gradients(self) -> None:
        """Completes gradients after the last backward pass: sums over tp, and over both ranks of a tied embedding."""
        for parameter in (parameter for stage in self.stages.values() for parameter in stage.parameters()):
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.tied is not None and self.tied.requires_grad:
            if self.tied.grad is None:
                self.tied.grad = torch.zeros_like(self.tied)
            dist.all_reduce(local(self.tied.grad), group=self.tied_group)

    @property
    def copy(self) -> Tensor | None:
        """This rank's copy of a tied parameter, which another rank counts in gradient norms; None if it has none."""
        return self.tied if self.pipeline.rank != 0 else None

    def held_tensors(self) -> dict[str, Tensor]:
        """Returns this rank's part of the parameters and buffers by name, without the copy of a tied embedding."""
        mine, here = held_tensors(self.model), self.pipeline.rank
        return {name: mine[name] for name, stage in self.stage_of.items() if stage % self.pipeline.num_ranks == here}


def split_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    ends: dist.ProcessGroup | None,
    experts: DeviceMesh | None = None,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    device: torch.device | None = None,
    checkpoint_activations: bool = False,
    is_mixed: bool = False,
    value_head: nn.Linear | None = None,
) -> SplitModel:
    """Reduces a model to this rank's part, in place. Collective; all ranks must pass the same model.

    Args:
        model: has a vocabulary head, a scalar head or both.
        mesh, ends: a mesh with the axes pp, dp and tp, and the mesh's `ends_group`.
        experts: the mesh that divides each stage's experts; None to leave them whole.
        schedule, stages_per_rank, checkpoint_activations: Parallel3DStrategy's settings.
        device: where to put the part; None for the CPU.
        is_mixed: whether the model runs in bf16-mixed, so that divided experts are gathered in bfloat16.
        value_head: the critic's head on this model's body; only the last stage's ranks keep its parameters.

    Raises:
        ValueError: if the model cannot be split this way; raised before anything changes.
    """
    pp, tp = mesh["pp"], mesh["tp"]
    check_sizes(model.config, pp.size(), tp.size(), schedule, stages_per_rank)
    logits = check_model(model.config, tp.size())
    device = torch.device("cpu") if device is None else device
    memo = {id(value): nn.Parameter(value.detach().to("meta"), value.requires_grad) for value in model.parameters()}
    whole = copy.deepcopy(model, memo)  # on the meta device
    pipeline = Pipeline(pp.get_group() if pp.size() > 1 else None, pp.size(), stages_per_rank, device)
    last = pipeline.num_stages - 1
    in_layers = sum(parameter.numel() for parameter in model.base_model.layers.parameters())
    ranges = split_layers(model.config, pipeline.num_stages, in_layers / model.config.num_hidden_layers)
    stage_of = {name: _stage_of(name, ranges) for name in held_tensors(model)}
    body = model.base_model
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is body.embed_tokens.weight
    has_values = value_head is not None or scalar_head(model) is not None
    wrap_blocks(model)  # while it has all blocks, because routes are in their order

    held = {stage: layers for stage, layers in enumerate(ranges) if stage % pp.size() == pp.get_local_rank()}
    _drop_other_stages(model, value_head, held, last)
    if value_head is not None:
        value_head.to(device=device)
    role = take_role(model)
    if role is None:
        model.to(device=device)
    else:
        _load_held(model, role, device, is_tied=is_tied)
    if experts is not None and moe_blocks(model):
        split_experts(model, experts)
    if tp.size() > 1:
        _split_over_tp(model, value_head if last in held else None, tp)
    if checkpoint_activations:
        for layer in body.layers.children():
            checkpointed = functools.partial(checkpoint, layer.forward, use_reentrant=False)
            layer.forward = functools.partial(checkpointed, context_fn=recompute_contexts)
    is_sharded = mesh["dp"].size() > 1 or experts is not None
    # Autocast would call the experts a second time to cast them, with FSDP's hooks.
    mixed = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    policy = mixed if is_mixed else MixedPrecisionPolicy()
    # A pipeline does not reshard, since it would gather again for each microbatch.
    for layer in body.layers.children() if is_sharded else ():
        if experts is not None:
            for block in moe_blocks(layer).values():
                options = {"reshard_after_forward": pp.size() == 1, "mp_policy": policy}
                shard_experts(block, experts, num_ranks=mesh["dp"].size(), **options)
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=pp.size() == 1)
    stages = {
        stage: Stage(model, layers, is_last=stage == last, tp=tp, logits=logits, value_head=value_head)
        for stage, layers in held.items()
    }
    for stage in stages.values() if is_sharded else ():
        fully_shard(stage, mesh=mesh["dp"], reshard_after_forward=False)
    tied: Tensor | None = None
    if is_tied and pp.size() > 1 and (0 in held or last in held):
        tied = body.embed_tokens.weight if 0 in held else model.get_output_embeddings().weight
    return SplitModel(
        model, whole, mesh, pipeline, stages, stage_of, has_values, tied, ends, divides_experts=experts is not None
    )


def _drop_other_stages(
    model: PreTrainedModel, value_head: nn.Linear | None, held: Mapping[int, range], last: int
) -> None:
    body = model.base_model
    held_layers = {str(index) for layers in held.values() for index in layers}
    for name in [name for name, _ in body.layers.named_children() if name not in held_layers]:
        delattr(body.layers, name)
    if 0 not in held:
        body.embed_tokens = None
    if last not in held:
        body.norm = None
        for name in ("lm_head", "score"):
            if getattr(model, name, None) is not None:
                setattr(model, name, None)
        if value_head is not None:
            empty_out(value_head)


def _split_over_tp(model: PreTrainedModel, value_head: nn.Linear | None, tp: DeviceMesh) -> None:
    """Splits this rank's part of the model, and its value head if there is one, over the tp axis."""
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    plan = tensor_plan(model.config)
    split_parameters(model.base_model, model.get_output_embeddings(), plan, tp, tuning_of(model))
    for scalar in (scalar_head(model), value_head):
        if scalar is not None:
            share_parameters(scalar, tp)
    for name, parameter in model.named_parameters():  # parallelize_module makes parameters trainable
        parameter.requires_grad_(name not in frozen)


def _load_held(model: PreTrainedModel, role: Role, device: torch.device, *, is_tied: bool) -> None:
    """Allocates this rank's part of a model on the meta device, and loads its weights."""
    spec = role.spec
    allocate(model, device)
    if spec.path is not None:
        check_files(Path(spec.path))
    head, embed_tokens = model.get_output_embeddings(), model.base_model.embed_tokens
    loaded: dict[str, Tensor] = {}
    if checkpoint_files(spec):
        renamed = {"lm_head.weight": "embed_tokens.weight"} if is_tied and head is not None else {}
        load_parts(model, spec, device=device, renamed=renamed, is_whole=False)
    else:
        loaded = spec.load_model().state_dict()
    added = role.tuning.added_values(spec.random_seed)
    with torch.no_grad():
        for name, tensor in held_tensors(model).items():
            if role.tuning.adds(name):
                tensor.copy_(added(name, tensor.shape))
            elif loaded:
                tensor.copy_(loaded[role.tuning.base_name(name)])
    if is_tied and head is not None and embed_tokens is not None:
        head.weight = embed_tokens.weight


def _stage_of(name: str, ranges: list[range]) -> int:
    parts = name.split(".")
    if "layers" in parts:
        index = int(parts[parts.index("layers") + 1])
        return next(stage for stage, layers in enumerate(ranges) if index in layers)
    return 0 if "embed_tokens" in parts else len(ranges) - 1


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Creates the group of a pipeline's first and last ranks; returns None on other ranks. Collective over the run."""
    own_group: dist.ProcessGroup | None = None
    for ranks in mesh.mesh.flatten(1).T.tolist() if mesh.mesh.shape[0] > 1 else []:
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            own_group = group
    return own_group
