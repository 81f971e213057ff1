import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import random_trajectories
from torch import Tensor

from lightrl.callbacks.trajectory_log import store_call_outputs
from lightrl.dataflow import DataFlowGraph, ModelCall
from lightrl.experience import Experience
from lightrl.loops.score import asked_once
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
    graph = DataFlowGraph([own()], roles=())
    module: Any = SimpleNamespace(data_flow=lambda from_file: graph)
    store_call_outputs(
        module, Experience.from_trajectories(trajectories).with_tensors({"judge": said[kind]}), trajectories
    )
    again = [Trajectory.from_json(json.loads(json.dumps(item.to_json()))) for item in trajectories]
    torch.set_default_dtype(torch.bfloat16)  # as half precision does meanwhile
    try:
        found = asked_once(own(), again, dict)["judge"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.dtype == said[kind].dtype
    assert torch.equal(found, said[kind])


@pytest.mark.parametrize(
    ("settings", "is_asked"),
    [
        ({"inputs": ("token_ids", "rewards")}, False),
        ({"inputs": ("proximal_logprobs",)}, True),
        ({"after": ("values",)}, True),
        ({"role": "policy"}, True),
        ({"on_all_ranks": True}, True),
    ],
    ids=["the rollout's keys", "another call's key", "after another", "a model of ours", "in the trainer's thread"],
)
def test_only_what_follows_from_the_trajectory_alone_is_taken_from_it(settings: dict[str, Any], is_asked: bool) -> None:
    trajectories = random_trajectories()
    for trajectory in trajectories:
        trajectory.call_outputs["judge"] = 1.0
    found = asked_once(own(**settings), trajectories, lambda: {"judge": torch.zeros(9)})["judge"]
    assert found.tolist() == [0.0 if is_asked else 1.0] * 9


def test_a_trajectory_without_an_answer_has_all_asked() -> None:
    first, *others = random_trajectories()
    first.call_outputs["judge"] = 1.0
    found = asked_once(own(), [first, *others], lambda: {"judge": torch.zeros(9, dtype=torch.float64)})["judge"]
    assert found.tolist() == [0.0] * 9
    assert found.dtype == torch.float32
