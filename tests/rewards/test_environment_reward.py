"""environment_reward: the rewards of the turns are the result."""

import pytest

from lightrl.rewards import RewardResult, environment_reward
from lightrl.trajectory import Prompt, Trajectory


def a_trajectory(rewards: list[float] | None) -> Trajectory:
    prompt = Prompt("a", token_ids=[3, 7])
    lists = {"token_ids": [3, 7, 9, 1], "loss_mask": [False, False, True, True], "weight_versions": [-1, -1, 0, 0]}
    return Trajectory(
        prompt, 0, 0, behavior_logprobs=[0.0] * 4, completion_ids=[9, 1], completion="", rewards=rewards, **lists
    )


def test_the_rewards_of_the_turns_sum_to_the_reward():
    trajectory = a_trajectory([0.0, 0.0, 0.5, 0.25])
    RewardResult.of(environment_reward(trajectory), trajectory).apply_to(trajectory)
    assert (trajectory.reward, trajectory.rewards) == (0.75, [0.0, 0.0, 0.5, 0.25])


def test_a_trajectory_without_rewards_is_an_error():
    with pytest.raises(ValueError, match="gave this trajectory no rewards"):
        environment_reward(a_trajectory(None))
