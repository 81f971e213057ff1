"""Probes that find out whether a model's head is plain, which layouts are exact, and whether layers can be compiled.

Most probes run the model on a few tokens. Model families differ, and a wrong guess would silently train on wrong
logprobs, so these probes infer nothing from names.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from lightrl.functional import can_compile
from lightrl.models import new_model
from lightrl.models.hybrids import keeps_states
from lightrl.models.moe import moe_blocks
from lightrl.models.trials import once_per_config
from lightrl.strategies.layouts.packed_attention import TOLERANCE, PackedRows, arguments, is_flash, make_packable
from lightrl.strategies.layouts.shared_prefix import Prefixes, shared_hidden

log = logging.getLogger(__name__)

LAYER_DTYPE = "lightrl_layer_dtype"  # attribute of a model: the dtype of its layers, if smaller than the model's

# Rotary embeddings whose angles depend on the number of tokens in a forward.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


@torch.no_grad()
def head_is_plain(model: PreTrainedModel) -> bool:
    """Whether the logits are only the output head applied to the body's last hidden state."""
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        return False
    token_ids = _some_tokens(model, 4)
    calls: list[tuple[Tensor, Tensor]] = []

    def replace_output(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        # Large numbers, since a cap like 30 · tanh(logits / 30) hardly changes logits near 0.
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
def can_mask(model: PreTrainedModel) -> bool:
    """Whether a row with a mask can contain a tree, as in `shared_rows` of shared_prefix.py."""
    layers = DynamicCache(config=model.config).layers  # a different kind for layers that do not attend to all tokens
    if rope_depends_on_length(model) or not all(type(layer) is DynamicLayer for layer in layers):
        return False
    token_ids = torch.cat([_some_tokens(model, 5)[:, [0, 1, 2, *more]] for more in ([3, 4], [4, 3], [3, 3])])
    tree = Prefixes(order=[0, 2, 1], shared=[0, 4, 3], ends=[5, 5, 5]).tree()
    predicting = torch.arange(3).repeat_interleave(5), torch.arange(5).repeat(3)
    try:
        parts = list(shared_hidden(model, token_ids, predicting, [[tree]], lambda _, ids: {"input_ids": ids}))
    except (RuntimeError, TypeError, ValueError):  # the model needs a different kind of mask
        return False
    whole = _hidden(model, token_ids)
    return all(_is_close(model, hidden, whole[rows, columns]) for rows, columns, hidden in parts)


@torch.no_grad()
def can_pack(model: PreTrainedModel, *, shares_prefixes: bool = False) -> bool:
    """Whether a packed row's trajectories do not affect each other; installs an attention that separates them.

    With `shares_prefixes`, tests a tree whose shared tokens the row contains only once.
    """
    if getattr(model.config.get_text_config(), "index_topk", None):
        return False  # sparse attention, which has no effect on the probe's few tokens
    takes_positions = "position_ids" in inspect.signature(model.base_model.forward).parameters
    if not takes_positions or rope_depends_on_length(model) or not make_packable(model):
        return False
    with_states = keeps_states(model.config)
    if shares_prefixes and (with_states or is_flash(model)):  # transformers' flash attention cannot repeat keys
        return False
    # All exceed convolution kernels; the second crosses a boundary between a scan's chunks, the third starts after it.
    lengths = [6, 262, 6] if with_states else [3, 1, 2, 2]
    parents = [-1, 0, 0, 2] if shares_prefixes else [-1] * len(lengths)
    token_ids, trajectories = _some_tokens(model, sum(lengths)), list[Tensor]()
    for part, parent in zip(torch.split(token_ids, lengths, dim=1), parents, strict=True):
        trajectories.append(part if parent < 0 else torch.cat([trajectories[parent], part], dim=1))
    positions = [torch.arange(trajectory.shape[1], device=model.device) for trajectory in trajectories]
    position_ids = torch.cat([row[-num:] for row, num in zip(positions, lengths, strict=True)])[None]
    # FSDP2's layers compute in bfloat16. A trial of flex attention would mislead while compilation is off.
    rows = PackedRows(lengths, model.device, dict.fromkeys((model.dtype, torch.bfloat16), "sdpa"), parents)
    starts = arguments(model, rows, with_states=with_states)
    try:
        output = model.base_model(input_ids=token_ids, position_ids=position_ids, use_cache=False, **starts)
    except (TypeError, ValueError) as error:
        # Unknown arguments, NotPackable, or transformers' error for a recurrence without kernels.
        log.info("%s: %s", "Packed rows repeat prefixes" if shares_prefixes else "Trajectories are padded", error)
        return False
    expected = [_hidden(model, row)[:, -num:] for row, num in zip(trajectories, lengths, strict=True)]
    return _is_close(model, output.last_hidden_state, torch.cat(expected, dim=1))


@once_per_config
def may_be_cut(config: PretrainedConfig) -> bool:
    """Whether only attention mixes tokens, judging by a model on the meta device; `can_pack` tests the real model."""
    if {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer, DynamicSlidingWindowLayer}:
        return False  # the model keeps other states: a convolution's, or the index of sparse attention
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = new_model(config)
    return not rope_depends_on_length(model) and make_packable(model)


def _some_tokens(model: PreTrainedModel, num: int) -> Tensor:
    vocabulary: int = model.get_input_embeddings().weight.shape[0]
    return torch.arange(num, device=model.device)[None] % vocabulary


def _hidden(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return hidden


def rope_depends_on_length(model: PreTrainedModel) -> bool:
    parameters: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE for kind in kinds)


def _is_close(model: PreTrainedModel, left: Tensor, right: Tensor) -> bool:
    dtype: torch.dtype = getattr(model, LAYER_DTYPE, left.dtype)
    tolerance = TOLERANCE.get(dtype, 1e-3) * max(1e-6, float(right.float().abs().max()))
    return torch.allclose(left.float(), right.float(), rtol=0, atol=tolerance)


def compiles(model: torch.nn.Module, device: torch.device, compile_layers: bool | None) -> bool:
    """Whether to compile the decoder layers; None compiles on NVIDIA GPUs if they have no experts and no states."""
    if compile_layers is not None:
        return compile_layers
    return can_compile(device.type) and may_be_compiled(model)


def may_be_compiled(model: torch.nn.Module) -> bool:
    config = getattr(model, "config", None)
    return not moe_blocks(model) and (config is None or not keeps_states(config))


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a Hugging Face model's repeated layers, from `_no_split_modules`; empty if it does not list them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
