"""SingleModel: one model in one process. Padding is removed before the forward; results come back as [B, T].

Shapes: B trajectories, T tokens, N loss tokens, H hidden size. On the CPU, trajectories of similar length form
right-padded rectangles, or share the states of their prompt if that is cheaper; on other devices a microbatch is one
packed row with restarting positions, and on NVIDIA GPUs decoder layers are compiled. Logprobs come from the hidden
states at the N positions, so no [B, T, V] exists.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import (
    aligned_to_tokens,
    can_compile,
    hidden_logprobs,
    hidden_topk,
    on_host,
    predicted_token_ids,
    predicting_positions,
    rectangles,
    to_device,
    token_logprobs,
    token_topk,
)
from lightrl.models import (
    CONTEXT,
    Backward,
    Candidates,
    LossFunction,
    Outputs,
    context_tokens,
    scalar_head,
    teacher_candidates,
)
from lightrl.models.conversion import Names, exported_tensors
from lightrl.models.hybrids import keeps_states
from lightrl.models.images import ImageTable, image_inputs, image_kind, new_model
from lightrl.models.lora import Part, exported_parameters, held_tensors
from lightrl.models.model_spec import cache_argument
from lightrl.models.moe import moe_blocks
from lightrl.strategies.branches import branch_rows
from lightrl.strategies.halves import cut_in_halves, forward_backward_halves, halves_pay
from lightrl.strategies.model_inputs import ModelInputs, logprob_inputs
from lightrl.strategies.packed_attention import TOLERANCE, PackedRows, Total, arguments, is_flash, make_packable
from lightrl.strategies.precision import set_expert_precision
from lightrl.strategies.shared_prefix import (
    CALL_OVERHEAD_TOKENS,
    LAYOUTS,
    Layout,
    PackedTokens,
    Plan,
    Row,
    cost,
    each_alone,
    find_shared_prompts,
    new_cache,
    packed,
    shared_hidden,
    whole_rows,
)
from lightrl.weights import Bucket, bucketed

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

log = logging.getLogger(__name__)

# A run on a few tokens shows what a model supports: a plain head, shared prefixes, packed rows. Families differ, and a
# wrong guess would silently train on wrong logprobs, so nothing is assumed by name.

LAYER_DTYPE = "lightrl_layer_dtype"  # attribute of a model whose layers compute in less than hidden states have

# Kinds of rotary embedding whose angles depend on the number of tokens in a forward.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@torch.no_grad()
def head_is_plain(model: PreTrainedModel) -> bool:
    """Whether the logits are just the output head applied to the body's last hidden state."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    token_ids = _some_tokens(model, 4)
    calls: list[tuple[Tensor, Tensor]] = []

    def replace_output(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Large numbers, since a cap such as 30 · tanh(logits / 30) hardly changes logits near 0.
        large = torch.linspace(-100, 100, output.numel(), device=output.device).view_as(output).to(output.dtype)
        calls.append((inputs[0], large))
        return large

    hook = head.register_forward_hook(replace_output)
    try:
        logits = model(input_ids=token_ids, use_cache=False).logits
    finally:
        hook.remove()
    if len(calls) != 1:
        return False
    (read, large), hidden = calls[0], _hidden(model, token_ids)
    return read.shape == hidden.shape and _is_close(model, read, hidden) and _is_close(model, logits, large)


@torch.no_grad()
def exact_layouts(model: PreTrainedModel) -> dict[str, Layout]:
    """Layouts of shared_prefix.py whose forwards give the same as one over whole rows; only with full attention."""
    from transformers.cache_utils import DynamicLayer

    if not cache_argument(model.base_model) or rope_depends_on_length(model):
        return {}
    if not all(type(layer) is DynamicLayer for layer in new_cache(model).layers):
        return {}
    token_ids = torch.cat([_some_tokens(model, 4), _some_tokens(model, 6)[:, [0, 1, 4, 5]]])
    prompt = Row(num_prompt_tokens=2, members=[0, 1], sizes=[2, 2])
    predicting = torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([1, 2, 3, 1, 2, 3])
    whole, exact = _hidden(model, token_ids), {}
    for name, layout in LAYOUTS.items():
        try:
            parts = list(
                shared_hidden(model, token_ids, predicting, layout([prompt]), lambda _, ids: {"input_ids": ids})
            )
        except (RuntimeError, TypeError, ValueError):  # it takes another form of mask
            continue
        if all(_is_close(model, hidden, whole[rows, columns]) for rows, columns, hidden in parts):
            exact[name] = layout
    return exact


@torch.no_grad()
def can_pack(model: PreTrainedModel, *, shares_prompt: bool = False) -> bool:
    """Whether trajectories in one row do not see each other; gives the model an attention that keeps them apart.

    Args:
        shares_prompt: ask for two completions of one prompt, which stands in the row once.
    """
    if getattr(model.config.get_text_config(), "index_topk", None):
        return False  # sparse selection among a row's keys; these few tokens are below its size
    if not _takes(model, "position_ids") or rope_depends_on_length(model) or not make_packable(model):
        return False
    with_states = keeps_states(model.config)
    if shares_prompt and (with_states or is_flash(model)):  # transformers' flash attention cannot repeat keys
        return False
    # Longer than convolutions; the second crosses the borders of a scan's chunks, the third starts beyond them.
    lengths = [6, 262, 6] if with_states else [3, 1, 2]
    prompts = [-1, 0, 0] if shares_prompt else [-1, -1, -1]
    parts = torch.split(token_ids := _some_tokens(model, sum(lengths)), lengths, dim=1)
    trajectories = [
        part if prompt < 0 else torch.cat([parts[prompt], part], dim=1)
        for part, prompt in zip(parts, prompts, strict=True)
    ]
    positions = [torch.arange(trajectory.shape[1], device=model.device) for trajectory in trajectories]
    position_ids = torch.cat([row[-num:] for row, num in zip(positions, lengths, strict=True)])[None]
    # Layers of FSDP2 compute in bfloat16; where compilation is off, as here, a trial of flex attention would mislead.
    rows = PackedRows(lengths, model.device, dict.fromkeys((model.dtype, torch.bfloat16), "sdpa"), prompts)
    starts = arguments(model, rows, with_states=with_states)
    try:
        output = model.base_model(input_ids=token_ids, position_ids=position_ids, use_cache=False, **starts)
    except (TypeError, ValueError) as error:
        # Arguments that it does not take; NotPackable; or transformers' own error for a recurrence without kernels.
        log.info("%s: %s", "Packed rows repeat prompts" if shares_prompt else "Trajectories are padded", error)
        return False
    expected = [_hidden(model, row)[:, -num:] for row, num in zip(trajectories, lengths, strict=True)]
    return _is_close(model, output.last_hidden_state, torch.cat(expected, dim=1))


def may_be_cut(config: PretrainedConfig) -> bool:
    """Whether attention alone mixes tokens, by a model without memory; `can_pack` then tries a real one."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return False  # a state of its own, such as that of a convolution, or the index of sparse attention
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = new_model(config)
    return not rope_depends_on_length(model) and make_packable(model)


def _some_tokens(model: PreTrainedModel, num: int) -> Tensor:
    vocabulary: int = model.get_input_embeddings().weight.shape[0]
    return torch.arange(num, device=model.device)[None] % vocabulary


def _hidden(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return hidden


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in set(inspect.signature(model.base_model.forward).parameters)


def rope_depends_on_length(model: PreTrainedModel) -> bool:
    parameters: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE for kind in kinds)


def _is_close(model: PreTrainedModel, left: Tensor, right: Tensor) -> bool:
    dtype: torch.dtype = getattr(model, LAYER_DTYPE, left.dtype)
    tolerance = TOLERANCE.get(dtype, 1e-3) * max(1e-6, float(right.float().abs().max()))
    return torch.allclose(left.float(), right.float(), rtol=0, atol=tolerance)


# How padding is removed; all forms give the same numbers. Two are layouts of shared_prefix.py.
Form = Literal["rectangles", "shared_keys", "shared_rows", "packed"]

# A packed row shares prompts if it then has at most this fraction of its tokens: the attention copies their key-values.
_LARGEST_SHARED_FRACTION = 0.9

# Rows [N], columns [N] and hidden states [N, H] of predicting positions.
_Part = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class LogprobSettings:
    """The changes that the engine makes to logits before sampling, which the trainer's logprobs repeat."""

    temperature: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    entropy_needs_gradient: bool = True
    num_ids: int | None = None  # the top-k is among these first ids, the policy's vocabulary; None for all

    def masks(self, masked_rows: Tensor | None, device: torch.device) -> dict[str, Any]:
        """Return the mask arguments of the logprob functions, if stop tokens could not be sampled in these rows."""
        ids = None if masked_rows is None else to_device(torch.tensor(self.stop_token_ids, dtype=torch.int64), device)
        return {"masked_ids": ids, "masked_rows": masked_rows}


class SingleModel:
    """An unmodified Hugging Face causal language model as the ParallelModel of one process.

    Args:
        model: with a body (`base_model`) and an output head that is only a matrix product, which a probe checks; for
            other models the logits come from the model itself, one rectangle at a time.
        settings: what the engine does to the logits.
        value_head: a critic's head on this policy's body; a critic of its own has its head, `score`, in the model.
        form: how padding is removed; None picks, for each microbatch, the cheapest that is exact for this model.
        compile_layers: `torch.compile` each decoder layer; None does on NVIDIA GPUs for models without experts and
            states (models/hybrids.py). The first layer's code serves all layers of like shapes, and microbatches of
            any lengths.
        is_sampler: as of ModelInputs; False for models other than the policy.

    Raises:
        ValueError: if `form` is not exact for the model, or the model cannot have a head on its body.
    """

    context_group: dist.ProcessGroup | None = None  # ranks that share packed rows

    def __init__(
        self,
        model: PreTrainedModel,
        settings: LogprobSettings,
        *,
        value_head: torch.nn.Linear | None = None,
        form: Form | None = None,
        compile_layers: bool | None = None,
        is_sampler: bool = True,
    ) -> None:
        self.model = model
        self.settings = settings
        self.form = form
        self.num_cores = torch.get_num_threads()  # later the stage of a small model leaves its thread one
        set_expert_precision(model)
        own_head = scalar_head(model)
        self.value_head = value_head if own_head is None else own_head
        self.has_logprobs = own_head is None
        self.head_is_plain = not self.has_logprobs or head_is_plain(model)
        if self.value_head is not None and not self.head_is_plain:
            raise ValueError(
                f"A critic cannot share the body of {type(model).__name__}, whose output head is more than a matrix "
                "product. Set critic to a checkpoint."
            )
        self._max_row = context_tokens(model.config) if rope_depends_on_length(model) else None
        self.layouts = exact_layouts(model) if self.head_is_plain else {}
        self.keeps_states = keeps_states(model.config)
        packs = form == "packed" or self.context_group is not None or model.device.type != "cpu"
        self.can_pack = self.head_is_plain and packs and can_pack(model)
        self.shares_packed_prompts = self.can_pack and can_pack(model, shares_prompt=True)
        exact = ["rectangles", *self.layouts, *(["packed"] if self.can_pack else [])]
        if form not in (None, *exact):
            raise ValueError(f"form={form!r} is not exact for {type(model).__name__}. Use one of {exact}, or None.")
        is_compiled = compiles(model, model.device, compile_layers)
        self.inputs = ModelInputs(model, is_sampler=is_sampler, is_compiled=is_compiled)
        if is_compiled:
            for layer in decoder_layers(model):
                layer.compile(dynamic=True)

    @torch.no_grad()
    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> Iterator[Outputs]:
        """Logprobs and entropy of each microbatch, [B, T], 0 outside the loss mask; without gradient."""
        for microbatch in microbatches:
            yield self._outputs(microbatch, topk)

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        for microbatch in microbatches:
            halves = cut_in_halves(microbatch) if halves_pay(self.model, microbatch, self.num_cores) else None
            if halves is None:
                backward(loss_fn(microbatch, self._outputs(microbatch, teacher_candidates(microbatch))))
            else:
                forward_backward_halves(
                    halves,
                    lambda half: self._outputs(half, teacher_candidates(half)),
                    loss_fn,
                    backward,
                    self._trained_parameters(),
                )

    def measure(self, microbatch: Experience, *, topk: int = 0) -> Outputs:
        return self._outputs(microbatch, topk)

    def _trained_parameters(self) -> list[Tensor]:
        """Each once; a critic's own head is in its model, one on the policy's body is not."""
        heads = () if self.value_head is None else self.value_head.parameters()
        parameters = {id(parameter): parameter for parameter in (*self.model.parameters(), *heads)}
        return [parameter for parameter in parameters.values() if parameter.requires_grad]

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "merged", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        held = held_tensors(self.model)
        exported = (
            exported_tensors(self.model, names, name, [held[source] for source in sources])
            for name, sources in exported_parameters(self.model, part).items()
        )
        return bucketed((pair for tensors in exported for pair in tensors.items()), bucket_bytes)

    def move_to(self, device: torch.device) -> None:
        source = self.model.device
        self.model.to(device, non_blocking=True)  # torch takes pinned memory for copies to the host
        if source.type not in ("cpu", device.type):
            torch.get_device_module(source).synchronize(source)

    def _outputs(self, experience: Experience, candidates: Candidates = 0) -> Outputs:
        rows, join = branch_rows(experience)
        return join(self._row_outputs(rows, candidates if isinstance(candidates, int) else teacher_candidates(rows)))

    def _row_outputs(self, experience: Experience, candidates: Candidates) -> Outputs:
        if self._max_row is not None and (longest := int(on_host(experience.lengths).max())) > self._max_row:
            raise ValueError(
                f"A trajectory of {longest} tokens exceeds {CONTEXT}, {self._max_row} tokens. Leave it out."
            )
        if not self.head_is_plain:
            rows, columns, results = self._read_logits(experience, candidates)
        else:
            parts = list(self._hidden(experience))
            # A single part stays as it is: the host knows its rows and columns.
            rows, columns, hidden = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
            zeros = torch.zeros(len(rows), device=hidden.device)
            results = {"logprobs": zeros, "entropy": zeros}
            if self.has_logprobs:
                results = self._read_hidden(experience, rows, columns, hidden, candidates)
            if self.value_head is not None:
                # A token's value is that of the state before it was sampled.
                results["values"] = self.value_head(hidden.to(self.value_head.weight.dtype))[:, 0].float()
        shape = experience.token_ids.shape
        results = {name: aligned_to_tokens(value, rows, columns, shape) for name, value in results.items()}
        if self.context_group is not None and self._choose(experience)[0] == "packed":  # else each rank has all of it
            results = {name: Total.apply(value, self.context_group) for name, value in results.items()}  # type: ignore[no-untyped-call]
        return Outputs(**results)

    def _read_hidden(
        self, experience: Experience, rows: Tensor, columns: Tensor, hidden: Tensor, candidates: Candidates
    ) -> dict[str, Tensor]:
        """Fields of Outputs for the tokens that the positions (rows [N], columns [N]) predict."""
        head, settings = self.model.get_output_embeddings(), self.settings
        masked = stops_are_masked(experience.weight_versions, settings.min_new_tokens)
        masks = settings.masks(None if masked is None else predicted_token_ids(masked, rows, columns), hidden.device)
        inputs = {"hidden": hidden, "weight": head.weight, "bias": head.bias, **masks}
        ids = ids_to_read(
            predicted_token_ids(experience.token_ids, rows, columns),
            candidates if isinstance(candidates, int) else predicted_token_ids(candidates, rows, columns),
            lambda num: hidden_topk(num=num, num_ids=settings.num_ids, **inputs),
        )
        logprobs, entropy = hidden_logprobs(
            token_ids=ids,
            temperature=settings.temperature,
            entropy_gradient=settings.entropy_needs_gradient,
            **logprob_inputs(experience, rows, columns),
            **inputs,
        )
        return as_outputs(logprobs, entropy, ids, candidates)

    def _hidden(self, experience: Experience) -> Iterator[_Part]:
        """Rows [N], columns [N] and hidden states [N, H] of the predicting positions."""
        form, plan = self._choose(experience)
        if form == "packed":
            yield self._packed_hidden(experience)
        elif plan:
            predicting = predicting_positions(on_host(experience.loss_mask))
            layer_input = functools.partial(self._layer_input, experience)
            yield from shared_hidden(self.model, experience.token_ids, predicting, plan, layer_input)
        else:
            for picked, token_ids in self._token_rectangles(experience):
                inputs = self._layer_input(experience, picked, token_ids)
                with self.inputs.forward(experience, picked, slice(token_ids.shape[1])):
                    hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
                rows, columns = predicting_positions(experience.loss_mask[picked, : token_ids.shape[1] + 1])
                yield picked[rows], columns, hidden[rows, columns]

    def _layer_input(
        self, experience: Experience, rows: Tensor, token_ids: Tensor, positions: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, Any]:
        """The model's arguments for token ids [b, T] of these rows [b], or for those at `positions`, end to end."""
        if experience.pixel_values is None:
            return {"input_ids": token_ids if positions is None else token_ids[positions][None]}
        images = ImageTable(*(experience[name] for name in ImageTable._fields))
        images = images._replace(image_rows=on_host(images.image_rows)[on_host(rows)])
        return image_inputs(self.model, token_ids, images, positions=positions)

    def _choose(self, experience: Experience) -> tuple[str, Plan]:
        """The cheapest exact form for this microbatch, and its plan if prompts can be shared."""
        kind = None if experience.pixel_values is None else image_kind(self.model.config)
        if kind == "bidirectional":
            return "rectangles", []
        if self.form is None and self.can_pack and experience.token_ids.device.type != "cpu":
            return "packed", []
        # A cached prompt has no positions of a grid.
        if (
            self.form in ("packed", "rectangles")
            or not self.layouts
            or self.inputs.are_read(experience)
            or kind == "grid"
        ):
            return self.form or "rectangles", []
        prompts = find_shared_prompts(experience, getattr(self.model.config, "image_token_id", None))
        if self.form is not None:
            return self.form, self.layouts[self.form](prompts)
        plans = {name: layout(prompts) for name, layout in self.layouts.items()}
        return min({"rectangles": whole_rows(prompts), **plans}.items(), key=lambda plan: cost(plan[1]))

    def _token_rectangles(self, experience: Experience) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of similar length and their tokens, without the last column, which predicts nothing."""
        lengths = (on_host(experience.lengths) - 1).clamp(min=1).tolist()
        for members in rectangles(lengths, CALL_OVERHEAD_TOKENS):
            picked = to_device(torch.tensor(members), experience.token_ids.device)
            yield picked, experience.token_ids[picked, : max(lengths[row] for row in members)]

    def _packed_hidden(self, experience: Experience) -> _Part:
        """Run all trajectories end to end in one row, or this rank's part of it; attention gets their starts."""
        device, group = experience.token_ids.device, self.context_group
        index, num = (0, 1) if group is None else (group.rank(), group.size())
        layout = self._packed_tokens(experience)
        size = -(-len(layout.rows) // num)  # tokens of each rank's part; the first token of all fills up the last part
        padding = num * size - len(layout.rows)
        first = index * size
        filled = torch.nn.functional.pad(torch.stack([layout.rows, layout.columns]), (0, padding))
        tokens = to_device(filled[0, first : first + size], device), to_device(filled[1, first : first + size], device)
        packed_rows = PackedRows([*layout.lengths, padding], device, prompts=[*layout.prompts, -1], group=group)
        starts = arguments(self.model, packed_rows, with_states=self.keeps_states)
        inputs = self._layer_input(experience, torch.arange(len(experience)), experience.token_ids, tokens)
        inputs = {"position_ids": tokens[1][None], **inputs, **starts}
        with self.inputs.forward(experience, *tokens):
            output = self.model.base_model(**inputs, use_cache=False)
        rows, columns = predicting_positions(on_host(experience.loss_mask))
        indices = layout.flat_indices[rows, columns] - first
        is_here = (indices >= 0) & (indices < size)
        rows, columns, indices = (to_device(values[is_here], device) for values in (rows, columns, indices))
        return rows, columns, output.last_hidden_state[0][indices]

    def _packed_tokens(self, experience: Experience) -> PackedTokens:
        """The layout of the packed row, with each prompt once where that saves enough."""
        if self.shares_packed_prompts and not self.inputs.are_read(experience):
            prompts = find_shared_prompts(experience, getattr(self.model.config, "image_token_id", None))
            layout = packed(prompts, experience.token_ids.shape)
            if len(layout.rows) <= _LARGEST_SHARED_FRACTION * int((on_host(experience.lengths) - 1).sum()):
                return layout
        return packed(each_alone(experience), experience.token_ids.shape)

    def _read_logits(self, experience: Experience, candidates: Candidates) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Rows [N], columns [N] and fields of Outputs, from the model's logits: for heads that are not plain."""
        settings = self.settings
        masked = stops_are_masked(experience.weight_versions, settings.min_new_tokens)
        parts: list[tuple[Tensor, ...]] = []
        for picked, token_ids in self._token_rectangles(experience):
            width = token_ids.shape[1] + 1
            inputs = self._layer_input(experience, picked, token_ids)
            with self.inputs.forward(experience, picked, slice(width - 1)):
                logits = self.model(**inputs, use_cache=False).logits
            logits = torch.nn.functional.pad(logits, (0, 0, 0, 1))
            masks = settings.masks(None if masked is None else masked[picked, :width], logits.device)
            ids = ids_to_read(
                experience.token_ids[picked, :width],
                candidates if isinstance(candidates, int) else candidates[picked, :width],
                functools.partial(token_topk, logits, num_ids=settings.num_ids, **masks),
            )
            positions = torch.cartesian_prod(picked, torch.arange(width - 1, device=picked.device))
            further = logprob_inputs(experience, *positions.unbind(-1))
            logprobs, entropy = token_logprobs(logits, ids, settings.temperature, **further, **masks)
            rows, columns = predicting_positions(experience.loss_mask[picked, :width])
            results = (predicted_token_ids(values, rows, columns) for values in (logprobs, entropy, ids))
            parts.append((picked[rows], columns, *results))
        rows, columns, logprobs, entropy, ids = (torch.cat(values) for values in zip(*parts, strict=True))
        return rows, columns, as_outputs(logprobs, entropy, ids, candidates)


def compiles(model: torch.nn.Module, device: torch.device, compile_layers: bool | None) -> bool:
    """Whether to compile the decoder layers: as set; None compiles those without experts and states on NVIDIA GPUs."""
    if compile_layers is not None:
        return compile_layers
    return can_compile(device.type) and may_be_compiled(model)


def may_be_compiled(model: torch.nn.Module) -> bool:
    """Whether the decoder layers have neither experts nor states."""
    config = getattr(model, "config", None)
    return not moe_blocks(model) and (config is None or not keeps_states(config))


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated layers of a Hugging Face model, by `_no_split_modules`; none if it does not name them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def ids_to_read(token_ids: Tensor, candidates: Candidates, topk: Callable[[int], Tensor]) -> Tensor:
    """Return the predicted tokens [...], or [..., 1 + K] with K candidates at each position, given or by `topk`."""
    if isinstance(candidates, int):
        if candidates == 0:
            return token_ids
        candidates = topk(candidates)
    return torch.cat([token_ids[..., None], candidates], -1)


def as_outputs(logprobs: Tensor, entropy: Tensor, ids: Tensor, candidates: Candidates) -> dict[str, Tensor]:
    """The fields of Outputs, [N] or [N, K] each, from the logprobs of `ids_to_read`."""
    if logprobs.dim() == 1:
        return {"logprobs": logprobs, "entropy": entropy}
    outputs = {"logprobs": logprobs[:, 0], "entropy": entropy, "teacher_topk": logprobs[:, 1:]}
    return {**outputs, "teacher_topk_ids": ids[:, 1:]} if isinstance(candidates, int) else outputs


def stops_are_masked(weight_versions: Tensor, min_new_tokens: int) -> Tensor | None:
    """[B, T], True where the engine could not sample a stop token: the first `min_new_tokens` of each turn.

    The versions mark what the policy generated; a callback may have removed tokens from the loss mask since.
    """
    if min_new_tokens == 0:
        return None
    is_generated = weight_versions >= 0
    count = is_generated.long().cumsum(1)
    before_turn = torch.where(is_generated, 0, count).cummax(1).values
    return is_generated & (count - before_turn <= min_new_tokens)
