"""environment_reward: what the environment of a workflow gave, as the judgment."""

from __future__ import annotations

from typing import Any

from lightrl.trajectory import Trajectory


def environment_reward(trajectory: Trajectory) -> dict[str, Any]:
    """The rewards that MultiTurn or AgentWorkflow has placed on the turns of this trajectory; its reward is their sum.

    Raises:
        ValueError: if the workflow gave none.
    """
    if trajectory.rewards is None:
        raise ValueError(
            "The trajectory has no rewards of an environment, expected a workflow that gives them. Use MultiTurn or "
            "AgentWorkflow (whose agent returns a number), or another reward function."
        )
    return {"rewards": trajectory.rewards}
