from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny import random_trajectories
from torch import Tensor

from lightrl.dataflow import ModelCall
from lightrl.experience import Experience
from lightrl.loops.asked_once import asked_once
from lightrl.trajectory import Trajectory


def own(**settings: Any) -> ModelCall:
    return ModelCall("judge", **{"outputs": ("judge",), "run": len, **settings})


@pytest.mark.parametrize("kind", ["whole", "tokens", "topk", "ids", "bools"])
def test_what_was_said_comes_back_from_json_as_it_was(kind: str) -> None:
    trajectories = random_trajectories()
    mask = Experience.from_trajectories(trajectories).loss_mask
    said: dict[str, Tensor] = {
        "whole": torch.randn(9),
        "tokens": torch.randn(mask.shape) * mask,
        "topk": torch.randn(*mask.shape, 3) * mask[..., None],
        "ids": torch.arange(9),
        "bools": mask,
    }
    asked_once(own(), trajectories, lambda: {"judge": said[kind]})
    again = [Trajectory.from_json(json.loads(json.dumps(item.to_json()))) for item in trajectories]
    torch.set_default_dtype(torch.bfloat16)  # as half precision does meanwhile
    try:
        found = asked_once(own(), again, dict)["judge"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == said[kind].dtype
    assert torch.equal(found, said[kind])


@pytest.mark.parametrize(
    ("settings", "num_asked"),
    [
        ({"inputs": ("token_ids", "rewards")}, 1),
        ({"inputs": ("proximal_logprobs",)}, 2),
        ({"after": ("values",)}, 2),
        ({"role": "policy"}, 2),
        ({"on_all_ranks": True}, 2),
    ],
    ids=["the rollout's keys", "another call's key", "after another", "a model of ours", "in the trainer's thread"],
)
def test_only_what_follows_from_the_trajectory_alone_is_kept(settings: dict[str, Any], num_asked: int) -> None:
    trajectories, asked = random_trajectories(), []
    for _ in range(2):
        asked_once(own(**settings), trajectories, lambda: asked.append(1) or {"judge": torch.zeros(9)})
    assert len(asked) == num_asked
