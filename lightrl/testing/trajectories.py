"""Trajectories and groups with made-up tokens, for tests of rewards, losses and callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightrl.trajectory import Group, Prompt, Trajectory


def make_trajectory(
    completion: str = "9",
    *,
    reward: float | None = None,
    fields: Mapping[str, Any] | None = None,
    group_id: int = 0,
    sample: int = 0,
    prompt_ids: Sequence[int] = (3, 7, 10),
    completion_ids: Sequence[int] = (9, 1),
    versions: Sequence[int] | None = None,
    **others: Any,
) -> Trajectory:
    """One turn; `fields` are the prompt's, `versions` those of the completion's tokens (0 if None)."""
    num = len(completion_ids)
    return Trajectory(
        prompt=Prompt(id=f"prompt-{group_id}", token_ids=list(prompt_ids), fields=dict(fields or {})),
        group_id=group_id,
        sample=sample,
        token_ids=[*prompt_ids, *completion_ids],
        loss_mask=[False] * len(prompt_ids) + [True] * num,
        behavior_logprobs=[0.0] * len(prompt_ids) + [-0.1 - index / 3 for index in range(num)],
        weight_versions=[-1] * len(prompt_ids) + list(versions if versions is not None else [0] * num),
        completion_ids=list(completion_ids),
        completion=completion,
        reward=reward,
        **others,
    )


def make_groups(rewards: Sequence[Sequence[float]], **settings: Any) -> list[Group]:
    """One group per row of rewards; `settings` are those of `make_trajectory`."""
    groups = []
    for group_id, row in enumerate(rewards):
        trajectories = [
            make_trajectory(
                **{"reward": reward, "group_id": group_id, "sample": i, "completion_ids": (9, i + 1), **settings}
            )
            for i, reward in enumerate(row)
        ]
        groups.append(Group(id=group_id, prompt=trajectories[0].prompt, trajectories=trajectories))
    return groups
