"""Turns trajectories into rows, and rows into the tensors of an Experience."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightrl.columns import REWARDS, TOKENS, column_named, column_of, registered
from lightrl.trajectory import Trajectory


def token_rows(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Returns every column except those that come with the reward, as one numpy array per trajectory.

    Raises:
        ValueError: if a column's width differs between trajectories, so they come from different models.
    """
    rows: dict[str, list[Any]] = {}
    for name, column in TOKENS.items():
        rows[name] = [column.array(getattr(item, name)).numpy() for item in trajectories]
    for column in registered():
        arrays = None if column.comes_with_reward else column.rows(trajectories)
        rows |= {} if arrays is None else {column.fields[0]: arrays}
    return rows


def row_tensors(field: str, rows: Sequence[Any]) -> dict[str, Tensor]:
    """Builds a column's fields of an Experience: one tensor [B, T, ...] (int32 becomes int64), or three if it is coded.

    These three are the concatenated codes of all rows, and the start and the size in bytes of each row's codes, [B].
    """
    column = column_of(field)
    assert column is not None
    if column.is_coded:
        sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64)
        codes = torch.from_numpy(np.concatenate([np.zeros(0, np.uint8), *rows]))
        return dict(zip(column.fields, (codes, sizes.cumsum(0) - sizes, sizes), strict=True))
    dtype = np.int64 if column.dtype == "int32" else column.dtype
    padded: Any = np.full((len(rows), max(map(len, rows)), *rows[0].shape[1:]), column.fill, dtype)
    for target, values in zip(padded, rows, strict=True):
        target[: len(values)] = values
    return {field: torch.from_numpy(padded)}


def row_fields(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Returns the fields [B] of an Experience; rewards are NaN, since they may still be pending."""
    return {
        "rewards": torch.full((len(trajectories),), torch.nan, dtype=torch.float32),
        "group_ids": torch.tensor([item.group_id for item in trajectories], dtype=torch.int64),
        "is_truncated": torch.tensor([item.is_truncated for item in trajectories], dtype=torch.bool),
        "lengths": torch.tensor([len(item.token_ids) for item in trajectories], dtype=torch.int64),
    }


def reward_fields(trajectories: Sequence[Trajectory]) -> tuple[Tensor, list[Any] | None]:
    """Returns the rewards, float32 [B], and each row's token rewards, float32, or None if no row has token rewards."""
    rewards = torch.tensor([item.reward for item in trajectories], dtype=torch.float32)
    if all(item.rewards is None for item in trajectories):
        return rewards, None
    check_trajectories(trajectories)
    return rewards, REWARDS.rows(trajectories)


def check_trajectories(trajectories: Sequence[Trajectory], *, has_rewards: bool = True) -> None:
    """Raises ValueError if the trajectories cannot make an Experience; see `Experience.from_trajectories`."""
    if not trajectories:
        raise ValueError("This iteration has no trajectories, because every group was dropped.")
    without = [item.prompt.id for item in trajectories if item.reward is None]
    if without and has_rewards:
        raise ValueError(f"A trajectory of prompt {without[0]!r} has no reward. Compute it first.")
    for item in trajectories:
        _check_tokens(item)


def _check_tokens(trajectory: Trajectory) -> None:
    """Raises ValueError if the trajectory's columns, gaps or loss mask are invalid."""
    num = len(trajectory.token_ids)
    problems = [TOKENS[name].problem(getattr(trajectory, name), num) for name in TOKENS]
    problems += [column_named(name).problem(values, num) for name, values in trajectory.columns.items()]
    if problem := next(filter(None, problems), None):
        raise ValueError(f"A trajectory of prompt {trajectory.prompt.id!r} {problem}")
    row_starts = [0] if num else []
    if trajectory.gaps is not None:
        gaps, num_before = np.asarray(trajectory.gaps, np.int64), np.arange(num)
        if ((gaps < 0) | (gaps > num_before)).any() or trajectory.prompt.images or trajectory.images:
            raise ValueError(
                f"A trajectory of prompt {trajectory.prompt.id!r} has invalid gaps. Each must be from 0 to the number "
                "of tokens before its token, and the trajectory must have no images. Fix the workflow."
            )
        row_starts = np.flatnonzero(gaps == num_before).tolist()
    if any(trajectory.loss_mask[start] for start in row_starts):
        raise ValueError(
            f"A trajectory of prompt {trajectory.prompt.id!r} trains on its first token, which nothing predicts. Its "
            "prompt needs at least one token, for example a start token."
        )
