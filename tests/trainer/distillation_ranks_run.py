"""What test_distillation_ranks.py runs, in one process and in two: distillation from a teacher's likeliest tokens.

In two processes it is started once, Lightning starts the second process from the same command.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from digit_reward import token_reward
from rank_scripts import gathered_tensors, leave
from tiny_run import CONFIG, POLICY, Digits, make_trainer
from torch import Tensor

from lightrl import Distillation, Experience, FSDP2Strategy, Parallel3DStrategy, Role, Sampling, Trajectory
from lightrl.models import RoleMesh

STUDENT = replace(POLICY, config={**CONFIG, "num_hidden_layers": 2, "num_key_value_heads": 2})
# With more tokens than the student has, as models of one tokenizer may be padded.
TEACHER = replace(STUDENT, seed=7, config={**(STUDENT.config or {}), "vocab_size": 12, "initializer_range": 0.4})

ALONE = {"policy": RoleMesh(0, 1), "teacher": RoleMesh(1, 1)}

# Name → what makes the strategy, and meshes of the roles.
CASES: dict[str, tuple[Any, dict[str, RoleMesh]]] = {
    "sharded": (FSDP2Strategy, {}),
    "a rank for each role": (FSDP2Strategy, ALONE),
    "two tensor ranks": (partial(Parallel3DStrategy, tp=2), {}),
    "two stages": (partial(Parallel3DStrategy, pp=2), {}),
}


class TinyDistillation(Distillation):
    """Judged in this process, and with a record of what it was trained on."""

    def __init__(self, meshes: dict[str, RoleMesh]) -> None:
        super().__init__(
            Role(STUDENT, mesh=meshes.get("policy")),
            teacher=Role(TEACHER, mesh=meshes.get("teacher")),
            teacher_topk=5,  # more than a tensor rank's half of the student's tokens
            divergence="forward_kl",
            reward_coef=0.5,
            group_size=4,
            sampling=Sampling(max_new_tokens=6, temperature=0.8, min_new_tokens=1),
            num_minibatches=2,
            microbatch_tokens=20,
            lr=0.3,
        )
        self.updates: list[dict[str, float]] = []
        self.experiences: list[Experience] = []

    def reward(self, trajectory: Trajectory) -> Any:
        return token_reward(trajectory)

    def on_experience_ready(self, experience: Experience) -> None:
        self.experiences.append(experience)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups())  # Adam would divide the rounding of a gradient by it

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))


def play(folder: Path, meshes: dict[str, RoleMesh] | None = None, **spread: Any) -> dict[str, Any]:
    """Trains; gives what is compared."""
    module = TinyDistillation(meshes or {})
    make_trainer(folder, max_steps=2, gradient_clip_val=0.5, **spread).fit(module, datamodule=Digits())
    buckets = module.parallel_models["policy"].full_parameters(1000)
    weights: dict[str, Tensor] = {name: value.clone() for bucket in buckets for name, value in bucket.tensors.items()}
    experiences = [gathered_tensors(experience) for experience in module.experiences]
    return {"updates": module.updates, "weights": weights, "experiences": experiences}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    leave({name: play(folder, meshes, devices=2, strategy=make()) for name, (make, meshes) in CASES.items()}, folder)


if __name__ == "__main__":
    main()
