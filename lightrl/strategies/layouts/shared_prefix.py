"""Shared prefixes: trajectories with the same prompt share its states, so the prompt is computed less often.

In a causal model a prompt's states do not depend on what follows, so sharing is exact, including the gradient. A plan
lists the forward passes of a microbatch and their rows. Two layouts make plans, and the cheapest plan is used:

    shared_keys   first  prompt      then  completion a      each completion follows a copy of the prompt's key-values;
                                           completion b ·    works for any lengths, needs at least two forwards
    shared_rows   prompt │ completion a │ b │ c              each completion sees the prompt and itself, because of a
                  prompt │ completion d │ e   ·              T × T mask; suits short rows

On a GPU a microbatch is one packed row: `packed` includes each prompt once, and the attention repeats its keys.

Shapes: B trajectories, L prompt tokens, R rows, T tokens of a row, N positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import bins, on_host, rectangles, to_device
from lightrl.models.model_spec import cache_argument

if TYPE_CHECKING:
    from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

# Cost of one more forward, in tokens. Fewer tokens of padding are cheaper than calling every layer again.
CALL_OVERHEAD_TOKENS = 256
MAX_ROW_TOKENS = 128  # with a mask; longer rows have less padding but a larger mask
# Number of keys whose multiplications cost as much as one more token: a layer's parameters / (2 · heads · head size),
# here for a policy with 0.8 M parameters. Larger models have a larger number, so they prefer plans without masks.
_KEYS_OF_A_TOKEN = 768


class Row(NamedTuple):
    """A prompt and its completions, each without its last token, which predicts nothing."""

    num_prompt_tokens: int  # L
    members: list[int]  # trajectories that begin with the prompt
    sizes: list[int]  # number of tokens of their completions
    stored: int | None = None  # the row of an earlier forward whose key-values replace the prompt

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes) + (self.num_prompt_tokens if self.stored is None else 0)

    @property
    def needs_mask(self) -> bool:
        return len(self.sizes) > 1 and sum(map(bool, self.sizes)) > 1


Plan = list[list[Row]]  # the rows of each forward
Layout = Callable[[Sequence[Row]], Plan]  # makes a plan from distinct prompts with their completions


def find_shared_prompts(experience: Experience, config: PretrainedConfig | None = None) -> list[Row]:
    """Returns each distinct prompt with all its trajectories, shortest prompt first.

    The prompt is everything before the first loss token. Prompts are equal if group, tokens and images are equal. A
    trajectory without loss tokens counts as a prompt, except for its last token. So does a trajectory with image tokens
    after its first loss token; it shares its prompt with no other trajectory.
    """
    token_ids, loss_mask = on_host(experience.token_ids).numpy(), on_host(experience.loss_mask)
    images = token_ids[:, :0] if experience.image_rows is None else on_host(experience.image_rows).numpy()
    ends = on_host(experience.lengths) - 1
    starts = torch.where(loss_mask.any(1), loss_mask.int().argmax(1), ends).clamp(min=1)
    groups = on_host(experience.group_ids)
    if experience.image_rows is not None:
        is_read = ~loss_mask & (torch.arange(token_ids.shape[1]) >= starts[:, None])  # but not part of the prompt
        is_alone = (is_read & (on_host(experience.token_ids) == getattr(config, "image_token_id", None))).any(1)
        starts = torch.where(is_alone, ends, starts)
        groups = torch.where(is_alone, -1 - torch.arange(len(ends)), groups)
    prompts: dict[tuple[int, int, bytes, bytes], Row] = {}
    numbers = zip(starts.tolist(), groups.tolist(), ends.tolist(), strict=True)
    for row, (start, group, end) in enumerate(numbers):
        key = (start, group, token_ids[row, :start].tobytes(), images[row].tobytes())
        prompt = prompts.setdefault(key, Row(start, [], []))
        prompt.members.append(row)
        prompt.sizes.append(max(0, end - start))
    return sorted(prompts.values(), key=lambda prompt: prompt.num_prompt_tokens)


def shared_keys(prompts: Sequence[Row]) -> Plan:
    """Plans, for each prompt length, a forward over the prompts, then rectangles of completions that continue them."""
    plan: Plan = []
    for num_tokens, same_length in groupby(prompts, key=lambda prompt: prompt.num_prompt_tokens):
        plan.append([])
        completions = []
        for stored, prompt in enumerate(same_length):
            plan[-1].append(prompt._replace(sizes=[0] * len(prompt.members)))
            pairs = zip(prompt.members, prompt.sizes, strict=True)
            completions += [Row(num_tokens, [member], [size], stored) for member, size in pairs if size]
        plan += _in_rectangles(completions)
    return plan


def shared_rows(prompts: Sequence[Row]) -> Plan:
    """Plans rows that contain a prompt and completions, with at most MAX_ROW_TOKENS tokens if possible."""
    rows = []
    for prompt in prompts:
        for picked in bins(prompt.sizes, max(0, MAX_ROW_TOKENS - prompt.num_prompt_tokens)):
            members, sizes = ([values[index] for index in picked] for values in (prompt.members, prompt.sizes))
            rows.append(prompt._replace(members=members, sizes=sizes))
    return _in_rectangles(rows)


def whole_rows(prompts: Sequence[Row]) -> Plan:
    """Plans one row per trajectory, without sharing prompts."""
    rows = [
        Row(prompt.num_prompt_tokens + size, [member], [0])
        for prompt in prompts
        for member, size in zip(prompt.members, prompt.sizes, strict=True)
    ]
    return _in_rectangles(rows)


def _in_rectangles(rows: Sequence[Row]) -> Plan:
    parts = rectangles([row.num_tokens for row in rows], CALL_OVERHEAD_TOKENS)
    return [[rows[index] for index in part] for part in parts]


LAYOUTS: dict[str, Layout] = {"shared_keys": shared_keys, "shared_rows": shared_rows}


class PackedTokens(NamedTuple):
    """The layout of a packed row of P tokens; on the host."""

    rows: Tensor  # int64 [P], the trajectory of each token
    columns: Tensor  # int64 [P], the position of each token in its trajectory
    lengths: list[int]  # number of tokens of each part of the row: a prompt, a completion, or a trajectory
    prompts: list[int]  # index of the prompt's part that each part follows, or -1
    flat_indices: Tensor  # int64 [B, T], index of each trajectory position's state, or -1 without a state


def each_alone(experience: Experience) -> list[Row]:
    """Returns each trajectory as a prompt that no other trajectory shares."""
    lengths = (on_host(experience.lengths) - 1).clamp(min=1).tolist()  # the last token predicts nothing
    return [Row(length, [row], [0]) for row, length in enumerate(lengths)]


def packed(prompts: Sequence[Row], shape: Sequence[int]) -> PackedTokens:
    """Lays out each prompt followed by its completions; a prompt and its only completion form one part.

    Args:
        prompts: from `find_shared_prompts` or `each_alone`.
        shape: (B, T) of the trajectories.
    """
    parts: list[tuple[int, int, int, int]] = []  # trajectory, first position, tokens, index of the prompt's part
    for prompt in prompts:
        shared, num = len(parts), prompt.num_prompt_tokens
        if len(prompt.members) == 1:
            parts.append((prompt.members[0], 0, num + prompt.sizes[0], -1))
            continue
        parts.append((prompt.members[0], 0, num, -1))
        parts += [(member, num, size, shared) for member, size in zip(prompt.members, prompt.sizes, strict=True)]
    members, positions, sizes, shared_parts = torch.tensor(parts).unbind(1)
    part_of_token = torch.arange(len(parts)).repeat_interleave(sizes)
    part_starts = sizes.cumsum(0) - sizes
    offset = torch.arange(len(part_of_token)) - part_starts[part_of_token]
    rows, columns = members[part_of_token], positions[part_of_token] + offset
    flat_indices = torch.full(tuple(shape), -1)
    flat_indices[rows, columns] = torch.arange(len(part_of_token))
    for prompt in prompts:  # a prompt's last position predicts each completion's first token
        last = prompt.num_prompt_tokens - 1
        flat_indices[prompt.members, last] = flat_indices[prompt.members[0], last].clone()
    return PackedTokens(rows, columns, sizes.tolist(), shared_parts.tolist(), flat_indices)


def cost(plan: Plan) -> float:
    """Returns a plan's cost in tokens, including padding, masked attention and the overhead of each model call."""
    total = 0.0
    for rows in plan:
        longest = max(row.num_tokens for row in rows)
        masked_keys = longest if any(row.needs_mask for row in rows) else 0
        total += CALL_OVERHEAD_TOKENS + len(rows) * longest * (1 + masked_keys / _KEYS_OF_A_TOKEN)
    return total


def shared_hidden(
    model: PreTrainedModel,
    token_ids: Tensor,
    predicting: tuple[Tensor, Tensor],
    plan: Plan,
    layer_input: Callable[[Tensor, Tensor], dict[str, Tensor]],
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields, for each forward pass, rows [N], columns [N] and hidden states [N, H] of the predicting positions.

    Args:
        token_ids: int64 [B, T of the trajectories].
        predicting: rows and columns of the predicting positions, on the host.
        layer_input: makes the model's arguments from trajectories [R] and tokens [R, T] that begin with their prompts,
            which may contain images.
    """
    device = token_ids.device
    cache: DynamicCache | None = None
    for rows, following in pairwise([*plan, []]):
        tokens = _Tokens.of(rows, on_host(token_ids))
        inputs: dict[str, Any] = {"input_ids": to_device(tokens.token_ids, device)}
        used: DynamicCache | None = None  # the cache that this forward reads or fills
        if rows[0].stored is not None:
            stored = to_device(torch.tensor([row.stored for row in rows]), device)
            used = repeated_cache(model, cache, stored)
        else:
            inputs = layer_input(to_device(torch.tensor([row.members[0] for row in rows]), device), inputs["input_ids"])
            if following and following[0].stored is not None:
                used = cache = new_cache(model)
        if used is not None:
            inputs[cache_argument(model.base_model)] = used
        if any(row.needs_mask for row in rows):
            inputs["position_ids"] = to_device(tokens.positions, device)
            inputs["attention_mask"] = mask_of(to_device(tokens.segments, device), model.dtype)
        hidden = model.base_model(**inputs, use_cache=used is not None).last_hidden_state
        indices = tokens.flat_indices[predicting]
        trajectories, columns, indices = (to_device(values[indices >= 0], device) for values in (*predicting, indices))
        yield trajectories, columns, hidden.flatten(0, 1)[indices]


class _Tokens(NamedTuple):
    """The layout of the rows of a forward pass; int64, on the host."""

    token_ids: Tensor  # [R, T]
    positions: Tensor  # [R, T], in the trajectory
    segments: Tensor  # [R, T]: 0 is the prompt, then each completion; -1 is padding
    flat_indices: Tensor  # [B, T of the trajectories], each token's index in the concatenated rows, or -1

    @classmethod
    def of(cls, rows: Sequence[Row], token_ids: Tensor) -> _Tokens:
        """Lays out each row: its prompt, unless an earlier forward stored it, then its completions, then padding."""
        pieces = []  # row, first column, trajectory, first position, tokens, segment
        for number, row in enumerate(rows):
            end = row.num_tokens - sum(row.sizes)
            pieces.append((number, 0, row.members[0], 0, end, 0))
            for segment, (member, size) in enumerate(zip(row.members, row.sizes, strict=True), start=1):
                pieces.append((number, end, member, row.num_prompt_tokens, size, segment))
                end += size
        table = torch.tensor(pieces)
        sizes = table[:, 4]
        piece_of_token = torch.arange(len(table)).repeat_interleave(sizes)
        offset = torch.arange(len(piece_of_token)) - (sizes.cumsum(0) - sizes)[piece_of_token]
        numbers, columns, sources, positions, _, segments = table[piece_of_token].unbind(1)
        width = max(row.num_tokens for row in rows)
        indices, positions = numbers * width + columns + offset, positions + offset
        filled = torch.zeros(3, len(rows) * width, dtype=torch.int64)
        filled[2] = -1
        filled[:, indices] = torch.stack([token_ids[sources, positions], positions, segments])
        flat_indices = torch.full(token_ids.shape, -1)
        flat_indices[sources, positions] = indices
        for number, row in enumerate(rows):
            if row.stored is None:  # the prompt's last position predicts the first token of each completion
                last = row.num_prompt_tokens - 1
                flat_indices[row.members, last] = number * width + last
        ids, positions, segments = filled.view(3, len(rows), width)
        return cls(ids, positions, segments, flat_indices)


def mask_of(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """Builds the mask [R, 1, T, T], 0 or -inf: a token sees earlier tokens of its prompt (segment 0) and segment."""
    num_tokens = segments.shape[1]
    is_before = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segments.device).tril()
    is_seen = is_before & ((segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0))
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~is_seen, float("-inf"))[:, None]


def new_cache(model: PreTrainedModel) -> DynamicCache:
    """Creates an empty key-value cache for the model."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def repeated_cache(model: PreTrainedModel, cache: DynamicCache, stored: Tensor) -> DynamicCache:
    """Copies the key-values of the rows `stored` [R] to a new cache; gradients flow back to the originals."""
    repeated = new_cache(model)
    for index, layer in enumerate(cache.layers):
        repeated.update(layer.keys.index_select(0, stored), layer.values.index_select(0, stored), index)
    return repeated
