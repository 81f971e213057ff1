"""The reward of this folder's runs: imported by reward workers, which start faster without torch."""

from lightrl import Trajectory


def token_reward(trajectory: Trajectory) -> float:
    """The share of one digit, which any policy can raise."""
    return sum(token == 7 for token in trajectory.completion_ids) / len(trajectory.completion_ids)
