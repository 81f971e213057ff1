"""What test_ppo_ranks.py runs, in one process and in two: short PPO runs whose models and numbers it compares.

In two processes it is started once, Lightning starts the second process from the same command.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from digit_reward import token_reward
from rank_scripts import leave
from tiny_run import POLICY, Digits, make_trainer
from torch import Tensor

from lightrl import PPO, Experience, FSDP2Strategy, ModelCall, ModelSpec, Outputs, Sampling, Trajectory
from lightrl.strategies import whole

# Name → settings of the module, and of FSDP2Strategy.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a critic of its own, a moving reference": (
        {
            "num_minibatches": 2,
            "update_epochs": 2,
            "value_normalization": "running",
            "kl_coef": 0.1,
            "kl_target_nats": 0.01,
            "reference": POLICY,
            "reference_decay": 0.5,
        },
        {},
    ),
    "a critic on the policy's body": ({"critic": "shared", "num_minibatches": 2}, {"reshard_after_forward": False}),
    "two replicas, a frozen critic, a reference that waits in CPU memory": (
        {
            "critic": replace(POLICY, frozen=True, head="scalar"),
            "kl_coef": 0.1,
            "kl_in_reward": False,
            "reference": replace(POLICY, seed=4, offload=True),
            "value_normalization": "exponential",
        },
        {"num_replicas": 2},
    ),
}


class TinyPPO(PPO):
    """Judged in this process, with what a user may add: a judge of its own, and metrics, one of them of one rank only.

    `judged` counts the judge's calls here; `updates` has the metrics of each update, `gradients` those of the first.
    """

    def __init__(self, policy: str | ModelSpec = POLICY, **kwargs: Any) -> None:
        sampling = Sampling(max_new_tokens=6)
        super().__init__(policy, group_size=4, sampling=sampling, lr=0.3, microbatch_tokens=20, **kwargs)
        self.judged = 0
        self.updates: list[dict[str, float]] = []
        self.experiences: list[Experience] = []
        self.gradients: dict[str, Tensor] = {}

    def configure_model(self) -> None:
        super().configure_model()
        if self.value_head is not None:
            with torch.no_grad():  # one that says 0 sends nothing back to its body
                self.value_head.weight.copy_(torch.linspace(-0.3, 0.3, self.value_head.weight.shape[1])[None])

    def reward(self, trajectory: Trajectory) -> Any:
        return token_reward(trajectory)

    def score_calls(self) -> list[ModelCall]:
        return [*super().score_calls(), ModelCall("style", outputs=("style_rewards",), run=self.style)]

    def style(self, experience: Experience, trajectories: Sequence[Trajectory]) -> Tensor:
        self.judged += 1
        return torch.tensor([len(set(trajectory.token_ids)) / 10 for trajectory in trajectories])

    def shaped_rewards(self, experience: Experience) -> Tensor:
        return super().shaped_rewards(experience) + experience["style_rewards"]

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        result = super().loss(experience, outputs)
        surprise = -outputs.logprobs.detach()
        result |= {"surprise": surprise, "max_surprise": surprise, "min_surprise": surprise, "num_nats": surprise}
        result |= {"reward": experience.rewards, "num_trajectories": torch.ones_like(experience.rewards)}
        if self.trainer.world_size == 2 and self.trainer.global_rank == 1:
            result["only_here"] = surprise
        return result

    def on_experience_ready(self, experience: Experience) -> None:
        self.experiences.append(experience)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups())  # Adam would divide the rounding of a small gradient by it

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if not self.gradients:
            found = ((key, value.grad) for key, value in self.named_parameters())
            self.gradients = {key: whole(grad).clone() for key, grad in found if grad is not None}

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))


def play(name: str, folder: Path, *, devices: int) -> dict[str, Any]:
    """Trains the case; gives what is compared."""
    settings, strategy = CASES[name]
    module = TinyPPO(**settings)
    spread = {"devices": devices, "strategy": FSDP2Strategy(**strategy)} if devices > 1 else {}
    trainer = make_trainer(folder, gradient_clip_val=0.5, **spread)
    trainer.fit(module, datamodule=Digits())
    return found_by(module, trainer)


def found_by(module: TinyPPO, trainer: Any) -> dict[str, Any]:
    """What is compared, after a fit."""
    normalizer = module.normalizer
    return {
        "updates": module.updates,
        "gradients": module.gradients,
        "weights": {key: whole(value) for key, value in module.named_parameters()},
        "experiences": [experience.tensors() for experience in module.experiences],
        "state": [module.kl_coef, *([] if normalizer is None else map(float, normalizer.state_dict().values()))],
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "judged": module.judged,
    }


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    leave({name: play(name, folder, devices=2) for name in CASES}, folder)


if __name__ == "__main__":
    main()
