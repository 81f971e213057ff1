"""Advantages of agents, against loops over trajectories and agents."""

import statistics
from typing import Any

import pytest
import torch
from tiny import tiny_spec

from lightrl import GRPO, PPO, RLOO, RewardShaping
from lightrl.algorithms.agents import agent_advantages
from lightrl.columns import COPIES
from lightrl.strategies import ShardedExperience
from lightrl.trajectory import Prompt, Trajectory

# For each trajectory: its group, and each agent's code and reward.
PROPOSER, SOLVER = 0, COPIES
EPISODES = [
    (0, {PROPOSER: 1.0, SOLVER: 3.0, SOLVER + 1: 1.0}),
    (0, {PROPOSER: -1.0, SOLVER: 0.5, SOLVER + 1: 0.25, SOLVER + 2: 0.0}),
    (0, {PROPOSER: 0.25, SOLVER: 2.0, SOLVER + 1: 2.0}),
    (1, {PROPOSER: 2.0, SOLVER: 1.0}),
    (1, {SOLVER: 4.0}),  # its proposer was an opponent
]


def experience(rewards: bool = True, others: tuple[Trajectory, ...] = ()) -> ShardedExperience:
    items = list(others)
    for number, (group, earned) in enumerate(EPISODES):
        agents, per_token = [-1], [0.0]
        for code, reward in earned.items():  # two tokens each, and one that is read
            agents += [-1, code, code]
            per_token += [0.0, reward / 4, reward * 3 / 4]
        mask = [code >= 0 for code in agents]
        items.append(
            Trajectory(
                Prompt(f"p{group}", token_ids=[1]), group, number, [1] * len(agents), mask, [0.0] * len(agents),
                [0 if trains else -1 for trains in mask], [1], "", reward=sum(per_token),
                columns={"agents": agents, **({"rewards": per_token} if rewards else {})},
            )
        )  # fmt: skip
    return ShardedExperience.from_trajectories(items)


def slow(mean: str | None, leave_one_out: bool) -> list[dict[int, float]]:
    """The advantage of each agent of each trajectory, without a deviation."""
    result: list[dict[int, float]] = [{} for _ in EPISODES]
    for number, (group, earned) in enumerate(EPISODES):
        for code, reward in earned.items():
            copies = [other for other in earned if other // COPIES == code // COPIES]
            peers = [(number, other) for other in copies]
            if len(copies) == 1:
                peers = [
                    (other, next(iter(of)))
                    for other, (its, all_) in enumerate(EPISODES)
                    if its == group or mean == "batch"
                    for of in [[c for c in all_ if c // COPIES == code // COPIES]]
                    if len(of) == 1
                ]
            if mean == "batch":
                peers = [(n, c) for n, (_, all_) in enumerate(EPISODES) for c in all_ if c // COPIES == code // COPIES]
            values = [EPISODES[n][1][c] for n, c in peers if not (leave_one_out and (n, c) == (number, code))]
            result[number][code] = 0.0 if len(peers) == 1 else reward - statistics.fmean(values)
    return result


@pytest.mark.parametrize(("mean", "leave_one_out"), [("group", False), ("group", True), ("batch", False)])
def test_an_agent_is_compared_with_its_role_and_with_the_others_of_its_episode_if_there_are_several(
    mean, leave_one_out
):
    module = GRPO(tiny_spec(), reward=len, advantage_mean=mean, advantage_std=None, leave_one_out=leave_one_out)
    found = experience()
    actual = agent_advantages(module, found)
    agents = found["agents"]
    for row, expected in enumerate(slow(mean, leave_one_out)):
        wanted = torch.tensor([expected.get(int(code), 0.0) for code in agents[row]])
        torch.testing.assert_close(actual[row], wanted, rtol=0, atol=1e-6)


def test_adding_a_constant_to_one_roles_rewards_changes_nothing() -> None:
    module, before = GRPO(tiny_spec(), reward=len), experience()
    is_proposers = before["agents"] == PROPOSER
    shifted = before["token_rewards"] + 5.0 * is_proposers
    after = ShardedExperience.of(before.local.with_tensors({"token_rewards": shifted}))
    torch.testing.assert_close(agent_advantages(module, after), agent_advantages(module, before), rtol=0, atol=1e-5)


def single(group: int, sample: int, reward: float, **columns: Any) -> Trajectory:
    """A trajectory of a source with one number as reward; without `agents` unless given."""
    mask, versions = [False, True, True], [-1, 0, 0]
    prompt = Prompt(f"p{group}", token_ids=[1])
    return Trajectory(
        prompt, group, sample, [1] * 3, mask, [0.0] * 3, versions, [1], "", reward=reward, columns=columns
    )


def test_trajectories_of_a_source_without_agents_get_their_groups_advantages() -> None:
    module = GRPO(tiny_spec(), reward=len, advantage_std=None)
    mixed = agent_advantages(module, experience(others=(single(7, 0, 3.0), single(7, 1, 1.0))))
    assert mixed[:2, :3].tolist() == [[0.0, 1.0, 1.0], [0.0, -1.0, -1.0]]
    assert not mixed[:2, 3:].any()
    torch.testing.assert_close(mixed[2:], agent_advantages(module, experience()))


def test_an_episode_whose_reward_is_one_number_is_refused_also_beside_others() -> None:
    outcome = single(7, 0, 3.0, agents=[-1, PROPOSER, SOLVER])
    with pytest.raises(ValueError, match="needs rewards per agent"):
        agent_advantages(GRPO(tiny_spec(), reward=len), experience(others=(outcome,)))


class Shaped(GRPO):
    def shaped_rewards(self, experience: Any) -> Any:
        return 2 * experience.rewards


class Own(GRPO):
    def advantages(self, experience: Any) -> Any:
        return experience.rewards


def test_an_algorithm_without_such_a_baseline_is_refused_and_a_users_is_called() -> None:
    found = experience()
    with pytest.raises(ValueError, match="PPO has no baseline per agent"):
        agent_advantages(PPO(tiny_spec(), reward=len), found)
    with pytest.raises(ValueError, match="overlong_penalty and reward_shaping"):
        agent_advantages(RLOO(tiny_spec(), reward=len, reward_shaping=RewardShaping(bias=1.0)), found)
    with pytest.raises(ValueError, match="needs rewards per agent"):
        agent_advantages(GRPO(tiny_spec(), reward=len), experience(rewards=False))
    with pytest.raises(ValueError, match=r"Shaped\.shaped_rewards changes a trajectory's reward"):
        agent_advantages(Shaped(tiny_spec(), reward=len), found)
    with pytest.raises(ValueError, match="A reward model scores a trajectory, not an agent"):
        agent_advantages(GRPO(tiny_spec(), reward=len, reward_model=tiny_spec()), found)
    assert torch.equal(agent_advantages(Own(tiny_spec(), reward=len), found), found.rewards)
