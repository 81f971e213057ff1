"""Stages: a Hugging Face model cut into this rank's part of it, by pipeline stage, tensor slice and data shard.

The model object stays what it was, less the layers of other ranks, so every parameter keeps its global Hugging Face
name. A Stage runs some of its layers in order; the last one turns hidden states into logprobs, entropies and values.

Shapes: B trajectories, T tokens; R rows and W columns of a forward, W a multiple of tp; N predicting positions, K
tokens of a teacher at each; H hidden size. Between stages goes [R, W / tp, H].
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from lightrl.experience import Experience
from lightrl.functional import hidden_logprobs, hidden_topk, pack, predicted_token_ids, predicting_positions
from lightrl.models import ModelSpec, More, scalar_head
from lightrl.strategies.empty_model import forget_role, parameter_reader, role_of
from lightrl.strategies.inside import reshard
from lightrl.strategies.pipeline import Pipeline
from lightrl.strategies.single import LogprobSettings, asked_ids, stops_are_masked
from lightrl.strategies.tensor_parallel import (
    embed,
    local,
    split_parameters,
    vocab_parallel_logprobs,
    vocab_parallel_topk,
    whole_sequence,
)
from lightrl.strategies.tensor_plans import Family, check_sizes, family_of, layer_kinds, logit_cap, split_layers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Feed:
    """One microbatch as the stages take it: without the padding of other microbatches, the same on all its ranks."""

    token_ids: Tensor  # int64 [R, W]
    position_ids: Tensor  # int64 [R, W] or [1, W]; in a packed row they restart
    is_packed: bool
    rows: Tensor  # [N], where in [R, W] the predicting positions are
    columns: Tensor
    places: tuple[Tensor, Tensor]  # [N] each, row and column of the same positions in the Experience
    targets: Tensor  # int64 [N], the tokens predicted there
    masked_rows: Tensor | None  # bool [N], where stop tokens could not be drawn
    more: More  # [N, K], whose logprobs are asked for too, or K of the likeliest

    @classmethod
    def of(
        cls, experience: Experience, settings: LogprobSettings, more: More, *, multiple: int, is_packed: bool
    ) -> Feed:
        """Of a microbatch; W is a multiple of `multiple`."""
        rows, columns = places = predicting_positions(experience.loss_mask)
        device = experience.token_ids.device
        if is_packed:
            packed = pack(experience.token_ids, experience.lengths)
            place = torch.zeros_like(experience.token_ids)
            place[packed.rows, packed.columns] = torch.arange(len(packed.rows), device=device)
            rows, columns = torch.zeros_like(rows), place[rows, columns]
            extra = -len(packed.rows) % multiple
            token_ids = nn.functional.pad(packed.token_ids, (0, extra))
            position_ids = torch.cat([packed.position_ids, torch.arange(extra, device=device)[None]], 1)
        else:  # rows end in padding, which nothing before it sees; a row's last token predicts nothing
            width = max(1, int(experience.lengths.max()) - 1)
            width += -width % multiple
            token_ids = experience.token_ids[:, :width]
            token_ids = nn.functional.pad(token_ids, (0, width - token_ids.shape[1]))
            position_ids = torch.arange(width, device=device)[None]
        masked = stops_are_masked(experience.weight_versions, settings.min_new_tokens)
        return cls(
            token_ids=token_ids,
            position_ids=position_ids,
            is_packed=is_packed,
            rows=rows,
            columns=columns,
            places=places,
            targets=predicted_token_ids(experience.token_ids, *places),
            masked_rows=None if masked is None else predicted_token_ids(masked, *places),
            more=more if isinstance(more, int) else predicted_token_ids(more, *places),
        )

    @property
    def num_more(self) -> int:
        """K."""
        return self.more if isinstance(self.more, int) else self.more.shape[1]

    @property
    def width(self) -> int:
        """How many numbers the last stage says about each position."""
        return 3 + self.num_more * (2 if isinstance(self.more, int) else 1)


class Stage(nn.Module):
    """Some consecutive layers of a model; shares its modules with the model, which keeps their names.

    Args:
        model: the Hugging Face model, already without what other ranks hold.
        layers: which of its layers.
        is_first: takes token ids instead of hidden states.
        is_last: gives [N, 3] instead of hidden states: logprob, entropy and value of each predicted token, 0 for what
            the model has no head for; behind them the logprobs of the K more tokens, and the ids of the likeliest.
        tp: mesh of the tp axis.
        value_head: a critic's, on the body of this policy; a critic of its own has its head, `score`, in the model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        layers: range,
        *,
        is_first: bool,
        is_last: bool,
        tp: DeviceMesh,
        value_head: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        body: Any = model.base_model
        self.is_first, self.is_last, self.tp = is_first, is_last, tp
        self.config: PretrainedConfig = model.config
        self.family: Family = family_of(model.config)
        kinds = layer_kinds(model.config)
        self.kinds = [kinds[index] for index in layers]
        self.cap = logit_cap(model.config)
        self.layers = nn.ModuleList([body.layers._modules[str(index)] for index in layers])
        self.rotary = body.rotary_emb
        self.embedding = body.embed_tokens if is_first else None
        self.norm = body.norm if is_last else None
        self.head = model.get_output_embeddings() if is_last else None
        own_head = scalar_head(model)
        self.value_head = (value_head if own_head is None else own_head) if is_last else None

    def forward(self, given: Tensor | None, feed: Feed, settings: LogprobSettings) -> Tensor:
        """Hidden states [R, W / tp, H] from those of the stage before (None for the first); at the end [N, width]."""
        hidden = self._embed(feed.token_ids) if self.is_first else given
        assert hidden is not None
        masks = self._masks(feed, hidden)
        ropes = self._ropes(feed, hidden)
        for layer, kind in zip(self.layers, self.kinds, strict=True):
            hidden = layer(
                hidden,
                attention_mask=masks[kind],
                position_embeddings=ropes[kind],
                position_ids=feed.position_ids,
                past_key_values=None,
            )
        return self._say(hidden, feed, settings) if self.is_last else hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        embedding: Any = self.embedding
        if self.tp.size() > 1:
            return embed(embedding, token_ids, self.tp)
        embedded: Tensor = embedding(token_ids)
        return embedded

    def _masks(self, feed: Feed, hidden: Tensor) -> dict[str, Any]:
        from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

        make = {"full_attention": create_causal_mask, "sliding_attention": create_sliding_window_causal_mask}
        # Only its shape, dtype and device are read: here the whole width, of which `hidden` may be a part.
        like = hidden.new_empty(1).expand(*feed.token_ids.shape, self.config.hidden_size)
        return {
            kind: make[kind](
                config=self.config,
                inputs_embeds=like,
                attention_mask=None,
                past_key_values=None,
                position_ids=feed.position_ids if feed.is_packed else None,
            )
            for kind in set(self.kinds)
        }

    def _ropes(self, feed: Feed, hidden: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        if self.family.ropes_by_kind:
            return {kind: self.rotary(hidden, feed.position_ids, kind) for kind in set(self.kinds)}
        return dict.fromkeys(self.kinds, self.rotary(hidden, feed.position_ids))

    def _say(self, hidden: Tensor, feed: Feed, settings: LogprobSettings) -> Tensor:
        assert self.norm is not None
        hidden = self.norm(hidden)
        is_split = self.tp.size() > 1
        zeros = torch.zeros(len(feed.rows), 1, dtype=torch.float32, device=hidden.device)
        logprobs, entropy, values = zeros, zeros, zeros
        more = zeros.expand(-1, feed.width - 3)
        if self.value_head is not None:
            found = self.value_head(hidden)
            found = whole_sequence(found, self.tp, gradients_add_up=False) if is_split else found
            values = found[feed.rows, feed.columns].float()
        if self.head is not None:
            whole = whole_sequence(hidden, self.tp, gradients_add_up=True) if is_split else hidden
            logprobs, entropy, more = self._logprobs(whole[feed.rows, feed.columns], feed, settings)
        return torch.cat([logprobs, entropy, values, more], 1)

    def _logprobs(self, hidden: Tensor, feed: Feed, settings: LogprobSettings) -> tuple[Tensor, Tensor, Tensor]:
        """Of the predicted tokens [N, 1], entropies [N, 1], and what else is asked [N, width - 3]."""
        masked_ids = None
        if feed.masked_rows is not None:
            masked_ids = torch.tensor(settings.stop_token_ids, dtype=torch.int64, device=hidden.device)
        masks: dict[str, Any] = {"masked_ids": masked_ids, "masked_rows": feed.masked_rows}
        topk, read = self._readers(hidden, masks)
        ids = asked_ids(feed.targets, feed.more, lambda num: topk(num=num, num_ids=settings.num_ids))
        logprobs, entropy = read(
            token_ids=ids, temperature=settings.temperature, entropy_gradient=settings.entropy_needs_gradient
        )
        if ids.dim() == 1:
            return logprobs[:, None], entropy[:, None], logprobs.new_empty(len(ids), 0)
        more = logprobs[:, 1:]
        if isinstance(feed.more, int):
            more = torch.cat([more, ids[:, 1:].float()], 1)  # exact up to 2^24, which no vocabulary reaches
        return logprobs[:, :1], entropy[:, None], more

    def _readers(self, hidden: Tensor, masks: dict[str, Any]) -> tuple[Callable[..., Tensor], Callable[..., Any]]:
        """What finds the likeliest tokens, and what reads logprobs, at these positions."""
        head: Any = self.head
        if self.tp.size() == 1 and self.cap is None:
            given = {"hidden": hidden, "weight": head.weight, "bias": head.bias, **masks}
            return functools.partial(hidden_topk, **given), functools.partial(hidden_logprobs, **given)
        group = self.tp.get_group() if self.tp.size() > 1 else None
        split = {"hidden": hidden, "weight": local(head.weight), "group": group, "cap": self.cap, **masks}
        return functools.partial(vocab_parallel_topk, **split), functools.partial(vocab_parallel_logprobs, **split)


@dataclass
class SplitModel:
    """A model of which this rank holds a part."""

    model: PreTrainedModel
    mesh: DeviceMesh
    pipeline: Pipeline
    stages: dict[int, Stage]
    parameters: list[tuple[str, torch.Size, torch.dtype, int]]  # of the whole model: name, shape, dtype, stage
    has_logprobs: bool  # whether the model has a vocabulary head
    has_values: bool  # whether it has a scalar head, or bears one
    tied: Tensor | None  # this rank's copy of an embedding that is the output head of another rank too, or the reverse
    tied_group: dist.ProcessGroup | None

    def set_last_backward(self, stage: int, is_last: bool) -> None:
        """Gradients are reduced over dp after a stage's last backward only."""
        module = self.stages[stage]
        if isinstance(module, FSDPModule):
            module.set_is_last_backward(is_last)
            module.set_reshard_after_backward(is_last)
            module.set_requires_gradient_sync(is_last)

    def reshard(self) -> None:
        """After forwards without a backward, which leave the parameters whole."""
        for stage in self.stages.values():
            reshard(stage)

    def finish_gradients(self) -> None:
        """After the last backward: what tp ranks hold as summands is summed, and so are the two ends of a tie."""
        for parameter in self.own_parameters():
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        if self.tied is not None and self.tied.requires_grad:
            if self.tied.grad is None:
                self.tied.grad = torch.zeros_like(self.tied)
            dist.all_reduce(local(self.tied.grad), group=self.tied_group)

    def own_parameters(self) -> Iterator[Tensor]:
        """This rank's part of the model, and of a head on its body."""
        return (parameter for stage in self.stages.values() for parameter in stage.parameters())

    @property
    def copy(self) -> Tensor | None:
        """The parameter of this rank that is another rank's too, which counts it in norms."""
        return self.tied if self.pipeline.rank != 0 else None

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model under its name, whole, on every rank; collective, one at a time."""
        mine = dict(self.model.named_parameters())
        group = self.mesh["pp"].get_group()
        for name, shape, dtype, stage in self.parameters:
            owner = stage % self.pipeline.num_ranks
            if owner == self.pipeline.rank:
                value = mine[name].detach()
                value = _whole(value) if isinstance(value, DTensor) else value
            else:
                value = torch.empty(shape, dtype=dtype, device=self.pipeline.device)
            if self.pipeline.num_ranks > 1:
                value = value.contiguous()
                dist.broadcast(value, group=group, group_src=owner)
            yield name, value


def split_model(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    *,
    ends: dist.ProcessGroup | None,
    schedule: str = "1F1B",
    stages_per_rank: int = 1,
    device: torch.device | None = None,
    checkpoint_activations: bool = False,
    value_head: nn.Linear | None = None,
) -> SplitModel:
    """Cuts a whole model, the same on all ranks, to this rank's part of it, in place; collective.

    Args:
        model: of one of the families in tensor_plans.py, with a vocabulary head, a scalar head or both.
        mesh: with the axes pp, dp, tp.
        ends: the `ends_group` of the mesh.
        schedule: `1F1B` or `Interleaved1F1B`.
        stages_per_rank: 1, or more with `Interleaved1F1B`.
        device: where the part goes; the CPU if None.
        checkpoint_activations: keep each layer's input only and compute the layer again in the backward pass.
        value_head: a critic's, on the body of this model; only the last stage's ranks keep its parameters.

    Raises:
        ValueError: if the sizes do not fit, before anything is changed.
    """
    pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
    check_sizes(model.config, pp.size(), tp.size(), schedule, stages_per_rank)
    device = torch.device("cpu") if device is None else device
    group = pp.get_group() if pp.size() > 1 else None
    pipeline = Pipeline(group, pp.size(), stages_per_rank, device)
    last = pipeline.num_stages - 1
    ranges = split_layers(model.config, pipeline.num_stages)
    parameters = [(name, value.shape, value.dtype, _stage_of(name, ranges)) for name, value in model.named_parameters()]
    held = [stage for stage in range(pipeline.num_stages) if stage % pp.size() == pp.get_local_rank()]
    body: Any = model.base_model
    head = model.get_output_embeddings()
    is_tied = head is not None and head.weight is body.embed_tokens.weight
    has_values = value_head is not None or scalar_head(model) is not None
    kept = {str(index) for stage in held for index in ranges[stage]}
    for name in [name for name in body.layers._modules if name not in kept]:
        del body.layers._modules[name]
    if 0 not in held:
        body.embed_tokens = None
    if last not in held:
        body.norm = None
        for name in ("lm_head", "score"):
            if getattr(model, name, None) is not None:
                setattr(model, name, None)
    if value_head is not None:
        value_head.to(device=device)
        for name in list(value_head._parameters) if last not in held else ():
            value_head.register_parameter(name, None)
    role = role_of(model)
    if role is None:
        model.to(device=device)
    else:
        _load_held(model, role.spec, device, is_tied=is_tied)

    if tp.size() > 1:
        frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        split_parameters(body, model.get_output_embeddings() if last in held else None, family_of(model.config), tp)
        for scalar in (scalar_head(model), value_head) if last in held else ():
            if scalar is not None:
                parallelize_module(scalar, tp, SequenceParallel(use_local_output=True))
        for name, parameter in model.named_parameters():  # SequenceParallel makes a trained one of any
            parameter.requires_grad_(name not in frozen)
    if checkpoint_activations:
        for layer in body.layers.children():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    stages = {
        stage: Stage(model, ranges[stage], is_first=stage == 0, is_last=stage == last, tp=tp, value_head=value_head)
        for stage in held
    }
    if dp.size() > 1:
        # With several stages each microbatch would gather the parameters again: they stay whole within an update.
        for module in stages.values():
            for layer in module.layers:
                fully_shard(layer, mesh=dp, reshard_after_forward=pp.size() == 1)
            fully_shard(module, mesh=dp, reshard_after_forward=False)
    tied_group = ends if is_tied and pp.size() > 1 else None
    tied: Tensor | None = None
    if is_tied and pp.size() > 1 and 0 in held:
        tied = body.embed_tokens.weight
    elif is_tied and pp.size() > 1 and last in held:
        tied = model.get_output_embeddings().weight
    return SplitModel(model, mesh, pipeline, stages, parameters, head is not None, has_values, tied, tied_group)


def _whole(value: DTensor) -> Tensor:
    """Gathered over dp, then over tp: each in one collective, whichever way the parameter is split."""
    for axis in range(len(value.placements)):
        placements = list(value.placements)
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def _load_held(model: PreTrainedModel, spec: ModelSpec, device: torch.device, *, is_tied: bool) -> None:
    """Gives a model without memory the weights of the part that this rank holds, read by the rank itself."""
    buffers = [
        (module, name, buffer.to(device))
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    model.to_empty(device=device)
    for module, name, buffer in buffers:
        setattr(module, name, buffer)
    body: Any = model.base_model
    head = model.get_output_embeddings()
    if is_tied and head is not None and body.embed_tokens is not None:
        head.weight = body.embed_tokens.weight
    sources = {name: name for name, _ in model.named_parameters()}
    if is_tied and "lm_head.weight" in sources:
        sources["lm_head.weight"] = f"{model.base_model_prefix}.embed_tokens.weight"
    read = parameter_reader(spec, list(sources.values()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(sources[name]))
    forget_role(model)


def _stage_of(name: str, ranges: list[range]) -> int:
    parts = name.split(".")
    if "layers" in parts:
        index = int(parts[parts.index("layers") + 1])
        return next(stage for stage, layers in enumerate(ranges) if index in layers)
    return 0 if "embed_tokens" in parts else len(ranges) - 1


def ends_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The first and the last rank of this rank's pipeline; None on other ranks. Collective over the run's ranks."""
    found: dist.ProcessGroup | None = None
    for ranks in mesh.mesh.flatten(1).T.tolist() if mesh.mesh.shape[0] > 1 else []:
        ends = [ranks[0], ranks[-1]]
        group = dist.new_group(ends)
        if dist.get_rank() in ends:
            found = group
    return found
