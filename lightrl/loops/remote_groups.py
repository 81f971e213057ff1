"""What the ranks beside rank 0 know of an iteration's groups: numbers of each trajectory, no tokens and no text.

    length of the JSON (8 bytes) | JSON: groups, names of metrics | one array for each number, [B]

Some 100 bytes a trajectory. Tokens go to the ranks that work on them and nowhere else (sharing.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from lightrl.loops.group_bytes import read_head, with_head
from lightrl.strategies.spread_experience import SpreadExperience, elsewhere, table_of
from lightrl.trajectory import Group, Prompt, Trajectory

_FINISH_REASONS = ("stop", "length", "abort")


def _is_on_rank_0(record: str, prompt_id: str, name: str) -> NoReturn:
    raise AttributeError(
        f"{name!r} of the {record} of prompt {prompt_id!r} is on rank 0, which has its tokens and texts; other ranks "
        "have its numbers: reward, metrics, versions. Read it if trainer.is_global_zero, or read tensors of "
        "experience.own in on_experience_ready."
    )


class RemotePrompt(Prompt):
    """A prompt of rank 0: its id and images."""

    def __init__(self, id: str, images: Sequence[str] = ()) -> None:
        vars(self).update(id=id, images=tuple(images))

    messages = property(lambda self: _is_on_rank_0("prompt", self.id, "messages"))
    token_ids = property(lambda self: _is_on_rank_0("prompt", self.id, "token_ids"))
    fields = property(lambda self: _is_on_rank_0("prompt", self.id, "fields"))


class RemoteTrajectory(Trajectory):
    """A trajectory of rank 0: its numbers."""

    def __init__(self, **numbers: Any) -> None:
        vars(self).update(numbers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "prompt" not in vars(self):  # copies ask for what is not there yet
            raise AttributeError(name)
        _is_on_rank_0("trajectory", self.prompt.id, name)

    @property
    def oldest_version(self) -> int:
        return int(vars(self)["oldest"])

    @property
    def newest_version(self) -> int:
        return int(vars(self)["newest"])


def summary_to_bytes(groups: Sequence[Group], experience: SpreadExperience | None) -> bytes:
    """Bytes from which `summary_from_bytes` makes what other ranks know.

    Args:
        groups: with their trajectories.
        experience: of these trajectories in order; None if there is none.
    """
    items = [item for group in groups for item in group.trajectories]
    names = sorted({name for item in items for name in item.metrics})
    head: dict[str, Any] = {
        "groups": [[group.id, group.prompt.id, len(group.trajectories), *group.prompt.images] for group in groups],
        "metrics": names,
        "has_token_rewards": any(item.rewards is not None for item in items),
        "token_fields": [] if experience is None else sorted(experience.tokens),
        "columns": [],
    }
    columns: dict[str, Any] = {} if experience is None else dict(table_of(experience))
    columns |= {
        "sample": np.array([item.sample for item in items], np.int32),
        "finish_reason": np.array([_FINISH_REASONS.index(item.finish_reason) for item in items], np.int8),
        "is_judged": np.array([item.reward is not None for item in items], np.bool_),
        "reward": np.array([item.reward or 0.0 for item in items], np.float64),
    }
    for name in names:
        columns[f"has/{name}"] = np.array([name in item.metrics for item in items], np.bool_)
        columns[f"metric/{name}"] = np.array([item.metrics.get(name, 0.0) for item in items], np.float64)
    arrays = {name: np.asarray(value) for name, value in columns.items()}
    head["columns"] = [[name, value.dtype.str] for name, value in arrays.items()]
    return with_head(head, [value.tobytes() for value in arrays.values()])


def summary_from_bytes(data: bytes) -> tuple[list[Group], SpreadExperience | None]:
    """The groups without tokens and texts, and their Experience, whose tokens are elsewhere; None without rows."""
    head, start = read_head(data)
    columns = _columns(head, data, start)
    rows = iter(_records(columns, head["metrics"]))
    groups = []
    for group_id, prompt_id, size, *images in head["groups"]:
        prompt = RemotePrompt(prompt_id, images)
        items: list[Trajectory] = [
            RemoteTrajectory(prompt=prompt, group_id=group_id, **next(rows)) for _ in range(size)
        ]
        groups.append(Group(group_id, prompt, items))
    if "lengths" not in columns:
        return groups, None
    own = ("sample", "finish_reason", "is_judged", "reward")
    table: dict[str, Tensor] = {
        name: torch.from_numpy(value) for name, value in columns.items() if "/" not in name and name not in own
    }
    return groups, elsewhere(table, has_token_rewards="token_rewards" in head["token_fields"])


def set_remote_rewards(groups: Sequence[Group], data: bytes) -> bool:
    """Sets the rewards of a later summary; removes trajectories without one. Gives whether some are per token."""
    head, start = read_head(data)
    sizes = [group[2] for group in head["groups"]]
    columns = _columns(head, data, start)
    metrics = _metrics(columns, head["metrics"])
    records = iter(zip(columns["sample"].tolist(), columns["reward"].tolist(), metrics, strict=True))
    for group, size in zip(groups, sizes, strict=True):
        items = {item.sample: item for item in group.trajectories}
        group.trajectories = []
        for sample, reward, numbers in (next(records) for _ in range(size)):
            item = items[sample]
            item.reward, item.metrics = reward, numbers
            group.trajectories.append(item)
    return bool(head["has_token_rewards"])


def _columns(head: Mapping[str, Any], data: bytes, start: int) -> dict[str, Any]:
    num = sum(group[2] for group in head["groups"])
    columns: dict[str, Any] = {}
    for name, dtype in head["columns"]:
        size = num * np.dtype(dtype).itemsize
        columns[name] = np.frombuffer(data[start : start + size], dtype).copy()
        start += size
    return columns


def _metrics(columns: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, float]]:
    lists = {name: (columns[f"has/{name}"].tolist(), columns[f"metric/{name}"].tolist()) for name in names}
    rows = range(len(columns["sample"]))
    return [{name: values[row] for name, (has, values) in lists.items() if has[row]} for row in rows]


def _records(columns: Mapping[str, Any], names: Sequence[str]) -> list[dict[str, Any]]:
    metrics = _metrics(columns, names)
    if not metrics:
        return []
    lists = {name: value.tolist() for name, value in columns.items()}
    return [
        {
            "sample": lists["sample"][row],
            "finish_reason": _FINISH_REASONS[lists["finish_reason"][row]],
            "is_truncated": lists["is_truncated"][row],
            "reward": lists["reward"][row] if lists["is_judged"][row] else None,
            "rewards": None,
            "turns": [],
            "metrics": metrics[row],
            "call_outputs": {},
            "oldest": lists["_oldest_version"][row],
            "newest": lists["_newest_version"][row],
        }
        for row in range(len(metrics))
    ]
