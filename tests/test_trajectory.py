from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from tiny import random_trajectories

from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, Turn, sampling_seed


def test_a_group_survives_json() -> None:
    trajectories = random_trajectories(num_groups=1, num_turns=2)
    trajectories[0].turns = [Turn(2, 5), Turn(7, 9, "length")]
    trajectories[1].rewards = [0.5] * len(trajectories[1].token_ids)
    group = Group(id=3, prompt=trajectories[0].prompt, trajectories=trajectories)
    assert Group.from_json(json.loads(json.dumps(group.to_json()))) == group


def test_a_trajectory_survives_json() -> None:
    trajectory = random_trajectories()[0]
    assert Trajectory.from_json(json.loads(json.dumps(trajectory.to_json()))) == trajectory


def test_versions_are_those_of_the_tokens_that_the_policy_wrote() -> None:
    trajectory = random_trajectories(completion_tokens=(3, 3), prompt_tokens=(2, 2))[0]
    trajectory.weight_versions = [-1, -1, 4, 4, 6]
    assert (trajectory.oldest_version, trajectory.newest_version) == (4, 6)
    trajectory.weight_versions = [-1] * 5
    assert (trajectory.oldest_version, trajectory.newest_version) == (-1, -1)


def test_a_group_is_as_old_as_its_oldest_token() -> None:
    first, second, third = random_trajectories(num_groups=1, completion_tokens=(1, 1), prompt_tokens=(1, 1))
    first.weight_versions, second.weight_versions, third.weight_versions = [-1, 7], [-1, 5], [-1, -1]
    assert Group(id=0, prompt=first.prompt, trajectories=[first, second, third]).oldest_version == 5
    assert Group(id=0, prompt=first.prompt).oldest_version == -1


def test_a_prompt_needs_messages_or_tokens() -> None:
    with pytest.raises(ValueError, match="Prompt 'empty' needs messages or token_ids"):
        Prompt(id="empty")


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_k": 0},
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"min_new_tokens": 9, "max_new_tokens": 8},
    ],
    ids=str,
)
def test_sampling_out_of_range_is_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be .*got {next(iter(settings.values()))}"):
        Sampling(**settings)


def test_seeds_differ_by_each_of_their_parts_and_are_the_same_on_every_machine() -> None:
    seeds = {
        sampling_seed(run, prompt, sample, turn)
        for run in (0, 1)
        for prompt in "ab"
        for sample in (0, 1)
        for turn in (0, 1)
    }
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    code = "from lightrl.trajectory import sampling_seed; print(sampling_seed(1, 'b', 2, 3))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) == sampling_seed(1, "b", 2, 3)


def test_records_need_no_torch() -> None:
    code = "import sys, lightrl.trajectory; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
