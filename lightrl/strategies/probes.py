"""What a model supports, found by running a few tokens: a plain head, shared prefixes, packed rows.

Model families differ, and a wrong guess would silently train on wrong logprobs; so nothing is assumed by name.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.strategies.packed_attention import NotPackable, PackedRows, arguments, make_packable
from lightrl.strategies.shared_prefix import LAYOUTS, Layout, Row, new_cache, shared_hidden

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Relative to the largest value: rounding errors are far smaller, a token that sees too much or too little far larger.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}

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
    return read.shape == hidden.shape and _is_close(read, hidden) and _is_close(logits, large)


@torch.no_grad()
def exact_layouts(model: PreTrainedModel) -> dict[str, Layout]:
    """Those of shared_prefix.py whose forwards give the same as one over whole rows; only with full attention."""
    from transformers.cache_utils import DynamicLayer

    if not _takes(model, "past_key_values") or _rope_depends_on_length(model):
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
        if all(_is_close(hidden, whole[rows, columns]) for rows, columns, hidden in parts):
            exact[name] = layout
    return exact


@torch.no_grad()
def can_pack(model: PreTrainedModel) -> bool:
    """Whether trajectories in one row do not see each other; gives the model an attention that keeps them apart."""
    if not _takes(model, "position_ids") or _rope_depends_on_length(model) or not make_packable(model):
        return False
    token_ids = _some_tokens(model, 6)
    position_ids = torch.arange(3, device=model.device).repeat(2)[None]
    told = arguments(model, PackedRows((3, 3), model.device))
    try:
        output = model.base_model(input_ids=token_ids, position_ids=position_ids, use_cache=False, **told)
    except (NotPackable, TypeError):  # TypeError: the model takes no further arguments
        return False
    return _is_close(output.last_hidden_state[:, 3:], _hidden(model, token_ids[:, 3:]))


def _some_tokens(model: PreTrainedModel, num: int) -> Tensor:
    vocabulary: int = model.get_input_embeddings().weight.shape[0]
    return torch.arange(num, device=model.device)[None] % vocabulary


def _hidden(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    hidden: Tensor = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    return hidden


def _takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in set(inspect.signature(model.base_model.forward).parameters)


def _rope_depends_on_length(model: PreTrainedModel) -> bool:
    parameters: dict[str, Any] = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return any(kind.get("rope_type") in _LENGTH_DEPENDENT_ROPE for kind in kinds)


def _is_close(left: Tensor, right: Tensor) -> bool:
    tolerance = _TOLERANCE.get(left.dtype, 1e-3) * max(1e-6, float(right.float().abs().max()))
    return torch.allclose(left.float(), right.float(), rtol=0, atol=tolerance)
