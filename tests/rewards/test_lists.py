"""What a reward function gets of a trajectory: the same fields, with lists, through a pipe or in this process."""

import asyncio
from pathlib import Path

import pytest
from reward_functions import reads_lists, trajectory_that

from lightrl.rewards import RewardHook, RewardPool
from lightrl.trajectory import Trajectory, Turn


def judged() -> Trajectory:
    trajectory = trajectory_that(answer="7", nested={"a": [1, None]})
    trajectory.rewards, trajectory.turns = [0.0, 0.0, 0.1, 0.2], [Turn(2, 4, "length")]
    return trajectory


@pytest.mark.parametrize("is_process", [True, False], ids=["in a process", "in a thread"])
def test_a_reward_function_reads_lists(is_process: bool) -> None:
    trajectory = judged()
    judge: RewardPool | RewardHook = RewardHook(reads_lists)
    if is_process:
        judge = RewardPool("reward_functions.reads_lists", search_paths=[str(Path(__file__).parent)])
    judge.start()
    try:
        judgment = asyncio.run(judge.score(trajectory))
    finally:
        judge.close()
    assert judgment.reward == pytest.approx(0.3)
    assert judgment.metrics["tokens"] == 5
    assert not (is_process and judgment.metrics["numpy"])
    assert trajectory.token_ids == [7, 8, 5, 1]
