"""Rollouts: prompts in, judged trajectories out, asynchronously. Knows no Lightning and no engine by name.

Reading order:
    protocol.py       Rollout: what the loop and the callbacks use
    settings.py       RolloutSettings: sizes, bounds, what is dropped
    buffer.py         what may start and what may be trained on: pure functions
    controller.py     keeps groups in flight and hands over batches
      trajectory_task.py, judging.py  one trajectory; rewards, awaited when needed
    prompt_cursor.py  which prompt comes next
    group_filter.py, drop_tally.py  which groups are replaced, and how many
    recorded.py       hands over the groups of an earlier run

May import: errors, checks, concurrency, trajectory, rewards, weights, engines, workflows.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightrl.rollout.controller import RolloutController
    from lightrl.rollout.group_filter import GroupFilter
    from lightrl.rollout.prompt_cursor import Curriculum
    from lightrl.rollout.protocol import Rollout
    from lightrl.rollout.recorded import RecordedRollout
    from lightrl.rollout.settings import RolloutSettings

# Loaded when first used: the fake server with a script starts without torch.
_HOMES = {
    "Curriculum": "prompt_cursor",
    "GroupFilter": "group_filter",
    "RecordedRollout": "recorded",
    "Rollout": "protocol",
    "RolloutController": "controller",
    "RolloutSettings": "settings",
}

__all__ = [
    "Curriculum", "GroupFilter", "RecordedRollout", "Rollout", "RolloutController", "RolloutSettings",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
