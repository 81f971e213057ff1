"""Bundles: a prompt and several of its completions in one row; each completion sees the prompt and itself.

    prompt │ completion a │ completion b │ c  │      positions of a, b and c follow those of the prompt
    prompt │ completion d           │ e      │ · │

A prompt goes through the model once for each row, there is little padding, and one forward does for all: best where
completions are short. It is exact, including the gradient. The mask is T × T for a row, so rows are short. Shapes: B
trajectories, R rows, T tokens of a row, N loss tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import bins, on_host, predicting_positions, rectangles, to_device
from lightrl.strategies.shared_prefix import SharedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MAX_TOKENS = 128  # of a row, unless one trajectory has more; a longer row has less padding and a larger mask
# Keys that cost a query as many multiplications as one more token: a layer's parameters over 2 · heads · head size,
# here of a policy with 0.8 M parameters. For larger models it is more, so that the other forms are preferred there.
_KEYS_OF_A_TOKEN = 768


@dataclass(frozen=True)
class Bundle:
    """A row: the prompt of `first_row`, and the completions of `members` after their prompts of as many tokens."""

    first_row: int
    num_prompt_tokens: int
    members: list[int]
    num_tokens: int


def find_bundles(shared: Sequence[SharedPrompt], lengths: Sequence[int]) -> list[Bundle]:
    """Rows of at most MAX_TOKENS where possible; the last token of a trajectory predicts nothing and is left out."""
    bundles = []
    for part in shared:
        rows_of: list[list[int]] = [[] for _ in part.first_rows]
        for row, prompt in zip(part.rows, part.prompt_of_row, strict=True):
            rows_of[prompt].append(row)
        for first_row, rows in zip(part.first_rows, rows_of, strict=True):
            rests = [max(0, lengths[row] - 1 - part.num_tokens) for row in rows]
            for picked in bins(rests, max(0, MAX_TOKENS - part.num_tokens)):
                num_tokens = part.num_tokens + sum(rests[index] for index in picked)
                bundles.append(Bundle(first_row, part.num_tokens, [rows[index] for index in picked], num_tokens))
    return bundles


def bundles_cost(bundles: Sequence[Bundle], overhead_tokens: int) -> int:
    """In tokens of a forward without attention; a call costs `overhead_tokens`."""
    lengths = [bundle.num_tokens for bundle in bundles]
    cost = 0
    for part in rectangles(lengths, overhead_tokens):
        longest = max(lengths[row] for row in part)
        cost += overhead_tokens + len(part) * longest * (_KEYS_OF_A_TOKEN + longest) // _KEYS_OF_A_TOKEN
    return cost


def bundled_hidden(
    model: PreTrainedModel, experience: Experience, bundles: Sequence[Bundle], overhead_tokens: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows [N], columns [N] and hidden states [N, H] of the predicting positions, part by part."""
    device = experience.token_ids.device
    loss_mask, lengths = on_host(experience.loss_mask), on_host(experience.lengths)
    for picked in rectangles([bundle.num_tokens for bundle in bundles], overhead_tokens):
        part = [bundles[index] for index in picked]
        tokens = _Tokens.of(part, lengths.tolist())
        token_ids = torch.zeros_like(tokens.segments)
        token_ids[tokens.rows, tokens.columns] = on_host(experience.token_ids)[tokens.source_rows, tokens.positions]
        position_ids = torch.zeros_like(tokens.segments)
        position_ids[tokens.rows, tokens.columns] = tokens.positions
        hidden = model.base_model(
            input_ids=to_device(token_ids, device),
            position_ids=to_device(position_ids, device),
            attention_mask=mask_of(to_device(tokens.segments, device), model.dtype),
            use_cache=False,
        ).last_hidden_state
        members = torch.tensor([row for bundle in part for row in bundle.members])
        at, columns = predicting_positions(loss_mask[members])
        rows = members[at]
        place = tokens.places(loss_mask.shape, part)[rows, columns]
        rows, columns, place = (to_device(indices, device) for indices in (rows, columns, place))
        yield rows, columns, hidden.flatten(0, 1)[place]


def mask_of(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """What each token sees, [R, 1, T, T], 0 or -inf: what precedes it in the prompt (segment 0) and in its own segment.

    Args:
        segments: int64 [R, T].
    """
    num_tokens = segments.shape[1]
    is_before = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=segments.device).tril()
    is_seen = is_before & ((segments[:, :, None] == segments[:, None]) | (segments[:, None] == 0))
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=segments.device)
    return mask.masked_fill_(~is_seen, float("-inf"))[:, None]


@dataclass(frozen=True)
class _Tokens:
    """Where the M tokens of trajectories are in the rows of bundles; int64, [M] but for `segments`."""

    rows: Tensor
    columns: Tensor
    source_rows: Tensor  # the trajectory
    positions: Tensor  # its place in the trajectory
    segments: Tensor  # [R, T], of the rows: 0 is the prompt, then each completion; -1 is padding

    @classmethod
    def of(cls, bundles: Sequence[Bundle], lengths: Sequence[int]) -> _Tokens:
        pieces = []  # row, first column, trajectory, first position, tokens, segment
        for row, bundle in enumerate(bundles):
            end = bundle.num_prompt_tokens
            pieces.append((row, 0, bundle.first_row, 0, end, 0))
            for segment, member in enumerate(bundle.members, start=1):
                num_rest = max(0, lengths[member] - 1 - bundle.num_prompt_tokens)
                pieces.append((row, end, member, bundle.num_prompt_tokens, num_rest, segment))
                end += num_rest
        table = torch.tensor(pieces)
        sizes = table[:, 4]
        of_piece = torch.arange(len(table)).repeat_interleave(sizes)
        within = torch.arange(len(of_piece)) - (sizes.cumsum(0) - sizes)[of_piece]
        rows, columns, source_rows, positions, _, numbers = table[of_piece].unbind(1)
        segments = torch.full((len(bundles), max(bundle.num_tokens for bundle in bundles)), -1)
        segments[rows, columns + within] = numbers
        return cls(rows, columns + within, source_rows, positions + within, segments)

    def places(self, shape: Sequence[int], bundles: Sequence[Bundle]) -> Tensor:
        """[B, T of the trajectories]: where each token is in the rows end to end; those of its prompt but the last, -1.

        Args:
            shape: [B, T].
        """
        width = self.segments.shape[1]
        places = torch.full(tuple(shape), -1)
        places[self.source_rows, self.positions] = self.rows * width + self.columns
        for row, bundle in enumerate(bundles):
            places[bundle.members, bundle.num_prompt_tokens - 1] = row * width + bundle.num_prompt_tokens - 1
        return places
