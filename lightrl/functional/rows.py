"""Trajectories as rows of tensors: what Experience is made of, on one rank or on several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.functional.supports import EVERY_TOKEN, support_ends
from lightrl.trajectory import Trajectory, token_array


def padded_rows(values: Sequence[Sequence[float]], fill: float, dtype: type) -> Tensor:
    """[B, T] of TokenArrays, padded to the longest."""
    rows: Any = np.full((len(values), max(len(row) for row in values)), fill, dtype)
    for row, numbers in zip(rows, values, strict=True):
        row[: len(numbers)] = numbers
    return torch.from_numpy(rows)


def row_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the fields [B] that the rollout fills in; rewards, which may still be awaited, are NaN."""
    return {
        "rewards": torch.full((len(trajectories),), torch.nan, dtype=torch.float32),
        "group_ids": torch.tensor([item.group_id for item in trajectories], dtype=torch.int64),
        "is_truncated": torch.tensor([item.is_truncated for item in trajectories], dtype=torch.bool),
        "lengths": torch.tensor([len(item.token_ids) for item in trajectories], dtype=torch.int64),
    }


def reward_fields(trajectories: Sequence[Trajectory]) -> tuple[Tensor, list[Any] | None]:
    """Return the rewards, float32 [B], and for each row those of its tokens, float32, if any row has them."""
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if all(item.rewards is None for item in trajectories):
        return rewards, None
    check_trajectories(trajectories)
    return rewards, [np.asarray(_token_rewards(item), np.float32) for item in trajectories]


NATIVE = 255  # each byte of the routes of a token that are not known (models/routes.py)


def route_rows(trajectories: Sequence[Trajectory]) -> list[Any] | None:
    """Return the routes of each row's tokens, arrays [T, w]; None if no row has any.

    Raises:
        ValueError: if trajectories have routes of different widths, which are of different models.
    """
    widths = {len(item.routes) // len(item.token_ids) for item in trajectories if item.routes is not None}
    if len(widths) > 1:
        raise ValueError(
            f"Trajectories have routes of {sorted(widths)} bytes for each token. All must be of one model: let the "
            "engine serve the trainer's."
        )
    if not widths:
        return None
    width = widths.pop()
    return [
        np.full((len(item.token_ids), width), NATIVE, np.uint8)
        if item.routes is None
        else token_array("routes", item.routes).numpy().reshape(-1, width)
        for item in trajectories
    ]


def support_codes(trajectory: Trajectory) -> Tensor:
    if trajectory.supports is None:
        return every_token(len(trajectory.token_ids))
    return torch.from_numpy(np.array(trajectory.supports, np.uint8))


def every_token(num: int) -> Tensor:
    """The codes of tokens that were read, or sampled from the whole vocabulary."""
    return torch.full((num,), EVERY_TOKEN[0], dtype=torch.uint8)


def support_fields(codes: Sequence[Tensor]) -> dict[str, Tensor]:
    """The three fields of the supports, from the codes of each row."""
    sizes = torch.tensor([len(item) for item in codes], dtype=torch.int64)
    supports = torch.cat([torch.empty(0, dtype=torch.uint8), *codes])
    return {"supports": supports, "support_starts": sizes.cumsum(0) - sizes, "support_sizes": sizes}


def _token_rewards(trajectory: Trajectory) -> Sequence[float]:
    """Return its rewards per token, or the reward on the last loss token."""
    if trajectory.rewards is not None:
        return trajectory.rewards
    spread = [0.0] * len(trajectory.token_ids)
    last = max((index for index, trains in enumerate(trajectory.loss_mask) if trains), default=None)
    if last is not None:
        spread[last] = float(trajectory.reward or 0.0)
    return spread


def check_trajectories(trajectories: Sequence[Trajectory], *, has_rewards: bool = True) -> None:
    """Raise ValueError if they cannot make an Experience; see `Experience.from_trajectories`."""
    if not trajectories:
        raise ValueError("This iteration has no trajectory: every group was dropped.")
    without = [item.prompt.id for item in trajectories if item.reward is None]
    if without and has_rewards:
        raise ValueError(f"A trajectory of prompt {without[0]!r} has no reward. Compute it first.")
    for item in trajectories:
        _check_tokens(item)


def _check_tokens(trajectory: Trajectory) -> None:
    num = len(trajectory.token_ids)
    if trajectory.supports is not None and (coded := len(support_ends(trajectory.supports))) != num:
        raise ValueError(
            f"A trajectory of prompt {trajectory.prompt.id!r} has the supports of {coded} tokens and {num} token_ids. "
            "Join those of its completions with functional.joined_supports."
        )
    if trajectory.routes is not None and num and len(trajectory.routes) % num:
        raise ValueError(
            f"A trajectory of prompt {trajectory.prompt.id!r} has {len(trajectory.routes)} bytes of routes for {num} "
            "token_ids; each token needs equally many. Join those of its completions with models.routes.joined_routes."
        )
    for name in ("loss_mask", "behavior_logprobs", "weight_versions", "rewards", "gaps"):
        values = getattr(trajectory, name)
        if values is not None and len(values) != num:
            raise ValueError(
                f"A trajectory of prompt {trajectory.prompt.id!r} needs one entry of {name} for each of its {num} "
                f"token_ids, got {len(values)}. Fix the workflow or the reward."
            )
    firsts = [0] if num else []
    if trajectory.gaps is not None:
        gaps, most = np.asarray(trajectory.gaps, np.int64), np.arange(num)
        if ((gaps < 0) | (gaps > most)).any() or trajectory.prompt.images or trajectory.images:
            raise ValueError(
                f"A trajectory of prompt {trajectory.prompt.id!r} has gaps, which must be from 0 to the number of "
                "tokens before the token, and are for trajectories without images. Fix the workflow."
            )
        firsts = np.flatnonzero(gaps == most).tolist()
    if any(trajectory.loss_mask[first] for first in firsts):
        raise ValueError(
            f"A trajectory of prompt {trajectory.prompt.id!r} trains its first token, which nothing predicts. Its "
            "prompt needs at least one token, such as a start token."
        )
