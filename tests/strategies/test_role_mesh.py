from pathlib import Path
from typing import Any

import pytest
import torch
from strategy_cases import on_cpus
from tiny import tiny_spec

from lightrl import PPO, AdaptiveKL, FSDP2Strategy, ModelSpec, Parallel3DStrategy, Role, RoleMesh, Trainer
from lightrl.strategies import check_strategy


def ppo(**meshes: RoleMesh) -> PPO:
    policy, critic, reference = (Role(tiny_spec(), mesh=meshes.get(n)) for n in ("policy", "critic", "reference"))
    return PPO(policy, critic=critic, reference=AdaptiveKL(0.1, reference), reward=len)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        (RoleMesh(2, 3), "first_rank=2, num_ranks=3 does not fit ranks 0 to 3 in this run"),
        (RoleMesh(4), "first_rank=4, num_ranks=None does not fit ranks 0 to 3"),
        (RoleMesh(1, tp=2), r"must be a multiple of pp \* tp = 2, got 3"),
    ],
)
def test_a_mesh_that_does_not_fit_the_run_is_refused(mesh: RoleMesh, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mesh.ranks(4)


def with_bias(module: PPO) -> PPO:
    module.bias = torch.nn.Parameter(torch.zeros(()))
    return module


@pytest.mark.parametrize(
    ("made", "module", "message"),
    [
        (on_cpus(FSDP2Strategy(), 4), ppo(critic=RoleMesh(4, 1)), "does not fit ranks 0 to 3"),
        (on_cpus(FSDP2Strategy(), 4), ppo(critic=RoleMesh(2, tp=2)), "The critic has mesh=.* Remove pp and tp"),
        (on_cpus(FSDP2Strategy(), 4), ppo(policy=RoleMesh(2)), "The policy's mesh.first_rank must be 0, got 2"),
        (on_cpus(Parallel3DStrategy(), 4), ppo(critic=RoleMesh(0, tp=4)), "tp=4 must divide"),
        (on_cpus(FSDP2Strategy(), 4), with_bias(ppo(critic=RoleMesh(2))), r"own parameters \(bias\).* critic has one"),
    ],
    ids=["outside", "tensor slices under FSDP2", "a policy without rank 0", "heads", "own parameters"],
)
def test_meshes_that_a_strategy_cannot_make_are_refused(made: FSDP2Strategy, module: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_strategy(made, module)


def test_one_process_has_no_ranks_to_give_away(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"does not fit ranks 0 to 0 in this run\. Change it, or increase trainer\.devices"
    ):
        Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False).fit(ppo(critic=RoleMesh(1, 1)))


def test_a_mesh_of_the_one_process_is_that_process() -> None:
    check_strategy(Trainer(accelerator="cpu", logger=False).strategy, ppo(critic=RoleMesh(0, 1)))


def test_a_server_has_no_mesh() -> None:
    with pytest.raises(ValueError, match=r"runs on its server's devices\. Omit mesh"):
        Role(ModelSpec(url="http://127.0.0.1:1"), mesh=RoleMesh())


def test_a_moving_reference_lies_as_the_policy_does() -> None:
    reference = Role(tiny_spec(), mesh=RoleMesh(1, 1))
    with pytest.raises(ValueError, match=r"reference.decay=0\.9 moves .* both need the same mesh"):
        PPO(tiny_spec(), reference=AdaptiveKL(0.1, reference, decay=0.9), reward=len)
