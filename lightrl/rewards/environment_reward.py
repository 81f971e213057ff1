"""environment_reward: the rewards that a workflow's environment returned."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.trajectory import Trajectory


def environment_reward(trajectory: Trajectory) -> dict[str, Sequence[float]]:
    """Returns the rewards that MultiTurn or AgentWorkflow recorded in this trajectory; the reward is their sum.

    Raises:
        ValueError: if the workflow recorded no rewards.
    """
    if trajectory.rewards is None:
        raise ValueError(
            "The workflow gave this trajectory no rewards. Use MultiTurn, AgentWorkflow with an agent that returns a "
            "number, or another reward function."
        )
    return {"rewards": trajectory.rewards}
