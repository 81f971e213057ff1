"""A group's prompt goes through the model once: its trajectories share the prompt's key-values.

G trajectories that differ only after a prompt of L tokens cost L + Σ completion tokens instead of G·L + Σ. It is exact,
including the gradient: in a causal model the prompt's states do not depend on what follows. Shapes: B trajectories, U
distinct prompts, L prompt tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import on_host, predicting_positions, rectangles, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SharedPrompt:
    """Trajectories whose prompts have the same length, with one representative per distinct prompt."""

    num_tokens: int  # L
    first_rows: list[int]  # [U], the representatives
    rows: list[int]  # the trajectories
    prompt_of_row: list[int]  # index into first_rows


def find_shared_prompts(experience: Experience) -> list[SharedPrompt]:
    """Trajectories grouped by prompt length, each distinct prompt once.

    The prompt is what precedes the first loss token; prompts are the same if group and tokens are. The last token of a
    trajectory predicts nothing, so a trajectory without loss tokens counts as a prompt without its last token.
    """
    token_ids, loss_mask = on_host(experience.token_ids), on_host(experience.loss_mask)
    columns = torch.arange(token_ids.shape[1])
    starts = torch.where(loss_mask.any(1), loss_mask.int().argmax(1), on_host(experience.lengths) - 1).clamp(min=1)
    prompts = torch.where(columns < starts[:, None], token_ids, -1).tolist()
    parts: dict[int, tuple[list[int], list[int], list[int]]] = {}
    index_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for row, (group, start) in enumerate(zip(on_host(experience.group_ids).tolist(), starts.tolist(), strict=True)):
        first_rows, rows, prompt_of_row = parts.setdefault(start, ([], [], []))
        key = (group, tuple(prompts[row][:start]))
        if key not in index_of:
            index_of[key] = len(first_rows)
            first_rows.append(row)
        rows.append(row)
        prompt_of_row.append(index_of[key])
    return [SharedPrompt(start, *lists) for start, lists in sorted(parts.items())]


def sharing_costs(shared: list[SharedPrompt], lengths: list[int], overhead_tokens: int) -> tuple[int, int]:
    """The forward's cost in tokens with shared prompts, and in plain rectangles; a call costs `overhead_tokens`."""
    cost = 0
    for part in shared:
        rests = [lengths[row] - 1 - part.num_tokens for row in part.rows if lengths[row] - 1 > part.num_tokens]
        cost += overhead_tokens + part.num_tokens * len(part.first_rows)
        cost += rectangles_cost(rests, overhead_tokens)
    return cost, rectangles_cost([max(1, length - 1) for length in lengths], overhead_tokens)


def rectangles_cost(lengths: list[int], overhead_tokens: int) -> int:
    """Tokens of the best rectangles, with padding and `overhead_tokens` per call."""
    parts = rectangles(lengths, overhead_tokens)
    return sum(overhead_tokens + len(part) * max(lengths[row] for row in part) for part in parts)


def shared_prefix_hidden(
    model: PreTrainedModel,
    experience: Experience,
    shared: list[SharedPrompt],
    overhead_tokens: int,
    layer_input: Callable[[Experience, Tensor, Tensor], dict[str, Tensor]],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows [N], columns [N] and hidden states [N, H] of the predicting positions, part by part.

    `layer_input` turns the prompts' rows and tokens, which may contain pictures, into the model's arguments.
    """
    device = experience.token_ids.device
    for part in shared:
        cache = new_cache(model)
        first_rows = to_device(torch.tensor(part.first_rows), device)
        inputs = layer_input(experience, first_rows, experience.token_ids[first_rows, : part.num_tokens])
        hidden = model.base_model(**inputs, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        rows = to_device(torch.tensor(part.rows), device)
        prompt_of_row = to_device(torch.tensor(part.prompt_of_row), device)
        columns = torch.full_like(rows, part.num_tokens - 1)
        # The prompt's last position predicts each trajectory's first loss token.
        starts = to_device(on_host(experience.loss_mask)[part.rows].any(1).nonzero()[:, 0], device)
        yield rows[starts], columns[starts], hidden.index_select(0, prompt_of_row[starts])

        rests = on_host(experience.lengths)[part.rows] - 1 - part.num_tokens
        longer = (rests > 0).nonzero()[:, 0]
        for members in rectangles(rests[longer].tolist(), overhead_tokens):
            end = part.num_tokens + int(rests[longer[members]].max())
            picked = to_device(longer[members], device)
            token_ids = experience.token_ids[rows[picked], part.num_tokens : end]
            hidden = model.base_model(
                input_ids=token_ids, past_key_values=repeated_cache(model, cache, prompt_of_row[picked]), use_cache=True
            ).last_hidden_state
            # Column 0 of this part is token L, the first of the completion, which predicts the one after it.
            of_rows = torch.tensor(part.rows)[longer[members]]
            at, offsets = predicting_positions(on_host(experience.loss_mask)[of_rows, part.num_tokens : end + 1])
            at, offsets = to_device(at, device), to_device(offsets, device)
            yield rows[picked][at], offsets + part.num_tokens, hidden[at, offsets]


def new_cache(model: PreTrainedModel) -> Any:
    """An empty key-value cache of the model's kind."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def repeated_cache(model: PreTrainedModel, cache: Any, prompt_of_row: Tensor) -> Any:
    """The key-values of each row's prompt as a new cache; gradients flow back to the prompt's."""
    repeated = new_cache(model)
    for index, layer in enumerate(cache.layers):
        repeated.update(layer.keys.index_select(0, prompt_of_row), layer.values.index_select(0, prompt_of_row), index)
    return repeated
