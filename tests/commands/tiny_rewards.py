"""Rewards of tiny_task.py, in a file of their own: a reward process imports only these, not torch and Lightning."""

from lightrl.trajectory import Trajectory

ANSWER = 5


def exact(trajectory: Trajectory) -> float:
    return float(trajectory.completion_ids[0] == ANSWER)


def broken(trajectory: Trajectory) -> float:
    raise RuntimeError("this reward is broken")
