"""The output head: selects the tokens whose logprobs are computed at each predicting position, and computes them.

Whole models and the last stage of a split model use the same Targets, but different functions to compute the logprobs.

Shapes: B trajectories, T tokens; N positions that predict a token; K additional tokens with logprobs at each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightrl.columns import SUPPORTS, TOPK_IDS
from lightrl.experience import Experience
from lightrl.functional import Supports, hidden_logprobs, hidden_topk, predicted_token_ids, to_device
from lightrl.models import Candidates


@dataclass(frozen=True)
class LogprobSettings:
    """The engine's changes to logits before sampling, which the trainer must also make."""

    temperature: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    entropy_needs_gradient: bool = True
    num_ids: int | None = None  # the policy's vocabulary size, which limits the ids of a top-k; None for no limit


@dataclass(frozen=True)
class Targets:
    """The tokens whose logprobs the head computes at N predicting positions, and the tokens allowed there."""

    token_ids: Tensor  # int64 [N], the tokens that the positions predict
    candidates: Candidates  # int64 [N, K], additional tokens at each position; or K, for the head's top-k
    masked_rows: Tensor | None  # bool [N], True where stop tokens could not be sampled; None if they always could be
    supports: Supports | None  # the tokens that could be sampled; None for all

    @classmethod
    def at(
        cls, experience: Experience, rows: Tensor, columns: Tensor, candidates: Candidates, settings: LogprobSettings
    ) -> Targets:
        """Selects the targets at these positions (rows [N], columns [N]); `candidates` is int64 [B, T, K], or K."""
        masked = supports = None
        if settings.min_new_tokens > 0:
            masked = stops_are_masked(experience.weight_versions, settings.min_new_tokens)
        if experience.supports is not None:
            codes = experience.row_codes(SUPPORTS.name)
            supports = Supports.at(codes, experience.lengths, experience.token_ids, rows, columns)
        return cls(
            token_ids=predicted_token_ids(experience.token_ids, rows, columns),
            candidates=candidates if isinstance(candidates, int) else predicted_token_ids(candidates, rows, columns),
            masked_rows=None if masked is None else predicted_token_ids(masked, rows, columns),
            supports=supports,
        )


def topk_candidates(experience: Experience) -> Candidates:
    """Returns the teacher's top-k tokens if the experience has them, otherwise the sampler's; 0 if there are none."""
    return experience.extras.get("teacher_topk_ids", experience.columns.get(TOPK_IDS.name, 0))


# `functional.hidden_topk` and `functional.hidden_logprobs`, or similar functions, with hidden states and head bound.
TopK = Callable[..., Tensor]
Logprobs = Callable[..., tuple[Tensor, Tensor]]


def whole_head(head: torch.nn.Linear, hidden: Tensor) -> tuple[TopK, Logprobs]:
    """Returns the functions that `read_head` needs, for hidden states [N, H] and an output head that is not split."""
    inputs: dict[str, Any] = {"hidden": hidden, "weight": head.weight, "bias": head.bias}
    return functools.partial(hidden_topk, **inputs), functools.partial(hidden_logprobs, **inputs)


def read_head(
    topk: TopK, logprobs: Logprobs, targets: Targets, settings: LogprobSettings, *, logit_scale: float = 1.0
) -> dict[str, Tensor]:
    """Computes the fields of Outputs at the targets' N positions: [N], or [N, K] for the top-k.

    The model multiplies its logits by `logit_scale`, but `topk` and `logprobs` do not.
    """
    masks: dict[str, Any] = {}
    if targets.masked_rows is not None:
        stop_ids = torch.tensor(settings.stop_token_ids, dtype=torch.int64)
        masks = {"masked_ids": to_device(stop_ids, targets.masked_rows.device), "masked_rows": targets.masked_rows}
    candidates = targets.candidates
    more_ids = None if isinstance(candidates, int) else candidates
    if isinstance(candidates, int) and candidates > 0:
        more_ids = topk(num=candidates, num_ids=settings.num_ids, **masks)
    ids = targets.token_ids if more_ids is None else torch.cat([targets.token_ids[:, None], more_ids], -1)
    values, entropy = logprobs(
        token_ids=ids,
        temperature=settings.temperature / logit_scale,
        entropy_gradient=settings.entropy_needs_gradient,
        supports=targets.supports,
        **masks,
    )
    if more_ids is None:
        return {"logprobs": values, "entropy": entropy}
    outputs = {"logprobs": values[:, 0], "entropy": entropy, "teacher_topk": values[:, 1:]}
    return {**outputs, "teacher_topk_ids": more_ids} if isinstance(candidates, int) else outputs


def stops_are_masked(weight_versions: Tensor, min_new_tokens: int) -> Tensor:
    """Returns [B, T], True where the engine could not sample a stop token: the first `min_new_tokens` of each turn.

    Generated tokens are those with a weight version. A callback may have removed some of them from the loss mask.
    """
    is_generated = weight_versions >= 0
    count = is_generated.long().cumsum(1)
    before_turn = torch.where(is_generated, 0, count).cummax(1).values
    return is_generated & (count - before_turn <= min_new_tokens)
