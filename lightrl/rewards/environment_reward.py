"""environment_reward: the rewards that the environment of a workflow gave."""

from __future__ import annotations

from collections.abc import Sequence

from lightrl.trajectory import Trajectory


def environment_reward(trajectory: Trajectory) -> dict[str, Sequence[float]]:
    """The rewards that MultiTurn or AgentWorkflow put on the turns of this trajectory; the reward is their sum.

    Raises:
        ValueError: if the workflow gave none.
    """
    if trajectory.rewards is None:
        raise ValueError(
            "The workflow gave this trajectory no rewards. Use MultiTurn, or AgentWorkflow with an agent that returns "
            "a number, or another reward function."
        )
    return {"rewards": trajectory.rewards}
