"""What a reward function gets of a trajectory: the same fields, with lists, through a pipe or in this process."""

from pathlib import Path

import pytest
from reward_functions import reads_lists, trajectory_that
from reward_workers import outcomes, started

from lightrl.rewards import RewardHook, RewardPool
from lightrl.trajectory import Turn


@pytest.mark.parametrize("is_process", [True, False], ids=["in a process", "in a thread"])
def test_a_reward_function_reads_lists(is_process: bool) -> None:
    trajectory = trajectory_that(answer="7", nested={"a": [1, None]})
    trajectory.rewards, trajectory.turns = [0.0, 0.0, 0.1, 0.2], [Turn(2, 4, "length")]
    worker: RewardPool | RewardHook = RewardHook(reads_lists)
    if is_process:
        worker = RewardPool("reward_functions.reads_lists", search_paths=[str(Path(__file__).parent)])
    with started(worker):
        (result,) = outcomes(worker, trajectory)
    assert result.reward == pytest.approx(0.3)
    assert result.metrics["tokens"] == 5
    assert not (is_process and result.metrics["numpy"])
    assert trajectory.token_ids == [7, 8, 5, 1]
