"""GiGPO's advantages against a slow loop over turns, and returns over turns."""

import contextlib
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import random_experience, tiny_spec

from lightrl.algorithms import GiGPO
from lightrl.data import Task
from lightrl.experience import Experience
from lightrl.rewards import environment_reward
from lightrl.trajectory import Trajectory
from lightrl.workflows import MultiTurn, SingleTurn

# (group, [(observation, reward)] of each turn): two groups, with observations that meet across trajectories or repeat.
EPISODES = [
    (0, [(7, 0.0), (8, 1.0), (8, 0.0)]),
    (0, [(7, 0.5), (9, 0.0), (8, 2.0)]),
    (0, [(7, 0.0)]),
    (1, [(7, 1.0), (8, 0.0)]),
    (1, [(7, 0.0), (9, 3.0)]),
]


def episodes() -> Experience:
    """Each turn has two tokens, of which the reward is on the last, after one that was read."""
    experience = random_experience(num_groups=5, group_size=1, prompt_tokens=(1, 1), completion_tokens=(8, 8))
    shape = experience.token_ids.shape
    indices, states, rewards = torch.full(shape, -1), torch.full(shape, -1), torch.zeros(shape)
    for row, (_, turns) in enumerate(EPISODES):
        for index, (state, reward) in enumerate(turns):
            place = slice(1 + 3 * index, 3 + 3 * index)
            indices[row, place], states[row, place], rewards[row, 2 + 3 * index] = index, state, reward
    return experience.with_tensors({
        "turn_indices": indices, "turn_states": states, "token_rewards": rewards, "loss_mask": indices >= 0,
        "rewards": rewards.sum(1), "group_ids": torch.tensor([group for group, _ in EPISODES]),
    })  # fmt: skip


def centered(values: dict[Any, float], groups: dict[Any, Any], *, has_std: bool) -> dict[Any, float]:
    """Each value minus its group's mean, over its deviation; 0 where all are equal."""
    result = {}
    for key, value in values.items():
        others = [values[other] for other in values if groups[other] == groups[key]]
        mean = sum(others) / len(others)
        spread = (sum((other - mean) ** 2 for other in others) / max(len(others) - 1, 1)) ** 0.5
        result[key] = 0.0 if spread < 1e-12 else (value - mean) / (spread + 1e-5 if has_std else 1.0)
    return result


@pytest.mark.parametrize("std", ["group", None])
@pytest.mark.parametrize("step_groups", ["state", "turn"])
@pytest.mark.parametrize(("step_weight", "episode_weight", "discount"), [(0.5, 1.0, 0.9), (1.0, 0.0, 1.0)])
def test_a_turn_gets_its_episodes_advantage_and_that_among_turns_of_its_kind(
    step_weight: float, episode_weight: float, discount: float, step_groups: Any, std: Any
) -> None:
    weights = {"step_weight": step_weight, "episode_weight": episode_weight, "discount": discount}
    settings: dict[str, Any] = {"workflow": MultiTurn, "step_groups": step_groups, "advantage_std": std, **weights}
    advantages = GiGPO(tiny_spec(), reward=len, **settings).advantages(episodes())
    returns, kinds, totals = {}, {}, {}
    for row, (group, turns) in enumerate(EPISODES):
        totals[row] = sum(reward for _, reward in turns)
        for index, (state, _) in enumerate(turns):
            returns[row, index] = sum(reward * discount**later for later, (_, reward) in enumerate(turns[index:]))
            kinds[row, index] = group, state if step_groups == "state" else index
    steps = centered(returns, kinds, has_std=std is not None)
    whole = centered(totals, {row: group for row, (group, _) in enumerate(EPISODES)}, has_std=std is not None)
    expected = torch.zeros(advantages.shape)
    for (row, index), value in steps.items():
        expected[row, 1 + 3 * index : 3 + 3 * index] = step_weight * value + episode_weight * whole[row]
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=1e-5)
    assert expected.unique().numel() > 5


def test_a_trajectory_without_turns_gets_its_episodes_advantage() -> None:
    whole = episodes()
    indices = whole["turn_indices"].clone()
    indices[3:] = -1  # the second group is of a source without turns
    module = GiGPO(tiny_spec(), reward=len, workflow=MultiTurn, advantage_std=None)
    advantages = module.advantages(whole.with_tensors({"turn_indices": indices}))
    assert torch.equal(advantages[:3], module.advantages(whole)[:3])
    expected = torch.tensor([-1.0, 1.0])[:, None] * whole.loss_mask[3:]
    torch.testing.assert_close(advantages[3:], expected)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"workflow": None}, "Set workflow to MultiTurn"),
        ({"step_weight": 0.0, "episode_weight": 0.0}, "otherwise nothing is learned"),
        ({"step_weight": -1.0}, "step_weight must be >= 0"),
        ({"discount": 1.1}, "discount must be between 0 and 1"),
        ({"step_groups": "token"}, "step_groups must be state or turn"),
        ({"advantage_mean": "batch"}, "advantage_mean must be 'group' for GiGPO"),
        ({"workflow": functools.partial(MultiTurn, discount=0.9)}, "MultiTurn.discount must be 1 with GiGPO, got 0.9"),
    ],
)
def test_settings_that_compare_no_turns_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GiGPO(tiny_spec(), reward=len, **{"workflow": MultiTurn, **settings})


def test_a_workflow_that_discounts_is_refused_however_it_is_made() -> None:
    for discount in (1.0, 0.9):
        built: Any = SimpleNamespace(discount=discount)
        module = GiGPO(tiny_spec(), reward=len, workflow=lambda _, built=built: built)
        module.tokenizer = None
        with pytest.raises(ValueError, match="must be 1 with GiGPO") if discount != 1 else contextlib.nullcontext():
            assert module.configure_workflow() is built


def one_number(trajectory: Trajectory) -> float:
    return float(len(trajectory.turns))


def values(trajectory: Trajectory) -> "dict[str, Any]":
    return {"rewards": trajectory.rewards}


@pytest.mark.parametrize(
    ("settings", "data", "problem"),
    [
        ({"reward": one_number}, {}, "the reward returns one number for a trajectory"),
        ({"workflow": functools.partial(SingleTurn)}, {}, "SingleTurn has none"),
        ({"workflow": SingleTurn}, {}, "SingleTurn has none"),
        ({}, {}, None),
        ({"reward": values}, {}, None),
        ({"reward": one_number}, {"tasks": {"games": Task(reward=environment_reward)}}, None),
        ({"reward": one_number}, {"recorded_groups": []}, None),
    ],
)
def test_a_run_without_rewards_of_turns_is_refused_before_a_model_is_built(
    settings: dict[str, Any], data: dict[str, Any], problem: str | None
) -> None:
    module = GiGPO(tiny_spec(), **{"reward": environment_reward, "workflow": MultiTurn, **settings})
    refused = pytest.raises(ValueError, match=f"needs turns and their rewards, but {problem}")
    with refused if problem else contextlib.nullcontext():
        module.before_fit(SimpleNamespace(**data))


def test_trajectories_without_turns_are_refused() -> None:
    module = GiGPO(tiny_spec(), reward=len, workflow=MultiTurn)
    with pytest.raises(ValueError, match=r"needs turns and their rewards.* Use a workflow based on MultiTurn"):
        module.advantages(random_experience())
