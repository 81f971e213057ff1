"""What test_ppo_ranks.py runs, in one process and on several ranks: short PPO runs whose numbers it compares.

    python tests/trainer/ppo_ranks_run.py FOLDER

Each process leaves `FOLDER/<number of ranks>/rank-<rank>.pt`: a dict of what `play` gives, by case, or, in one process,
by the settings that cases share.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from digit_reward import token_reward
from rank_scripts import fork_runs, gathered_tensors, leave
from second_device import second_device
from tiny_run import CONFIG, POLICY, Digits, make_trainer
from torch import Tensor

from lightrl import (
    PPO,
    AdaptiveKL,
    Experience,
    FSDP2Strategy,
    ModelCall,
    ModelSpec,
    Outputs,
    Parallel3DStrategy,
    Sampling,
    Trajectory,
)
from lightrl.models import Role, scalar_head
from lightrl.strategies import ranks_of, whole

# Two layers and two key-value heads, so that it can be split both ways.
TIED = replace(POLICY, config={**CONFIG, "num_hidden_layers": 2, "num_key_value_heads": 2})
UNTIED = replace(TIED, config={**(TIED.config or {}), "tie_word_embeddings": False})
ADAM_LR = 1e-3
JUDGE = replace(UNTIED, head="scalar", seed=5)  # with a head that says something, from a folder inside the run's

# Name → settings of the module.
SETTINGS: dict[str, dict[str, Any]] = {
    "a critic of its own, a moving reference": {
        "num_minibatches": 2,
        "update_epochs": 2,
        "value_normalization": "running",
        "reference": AdaptiveKL(0.1, POLICY, target_nats=0.01, decay=0.5),
    },
    "a critic on the policy's body": {"critic": "shared", "num_minibatches": 2},
    "two replicas, a frozen critic, a reference that waits in CPU memory": {
        "critic": Role(replace(POLICY, head="scalar"), frozen=True),
        "reference": AdaptiveKL(0.1, Role(replace(POLICY, seed=4), offload=True), in_reward=False),
        "value_normalization": "exponential",
    },
    "a critic of its own, a reward model, a fixed reference": {
        "policy": UNTIED,
        "num_minibatches": 2,
        "critic": Role(JUDGE, lr=0.03, weight_decay=0.01),
        "reference": AdaptiveKL(0.1, replace(UNTIED, seed=4)),
        "reward_model": JUDGE,
    },
    "a critic on a split policy's body, a moving reference": {
        "policy": TIED,
        "critic": "shared",
        "num_minibatches": 2,
        "reference": AdaptiveKL(0.1, Role(replace(TIED, seed=4), offload=True), decay=0.5),
    },
}
BY_ADAM = "a critic on a split policy's body, by Adam"
SETTINGS[BY_ADAM] = {"policy": TIED, "critic": "shared", "num_minibatches": 2, "is_adam": True}


@dataclass(frozen=True)
class Case:
    """Settings of the module, by name, and on which ranks they run."""

    settings: str
    num_ranks: int
    strategy: type[FSDP2Strategy]
    sizes: dict[str, Any]


def _cases() -> dict[str, Case]:
    own, shared, replicas, judged, on_body, by_adam = SETTINGS
    sharded = {own: {"reshard_after_forward": False}, shared: {}, replicas: {"num_replicas": 2}}
    cases = {name: Case(name, 2, FSDP2Strategy, sizes) for name, sizes in sharded.items()}
    layouts = {
        "two stages": {"pp": 2},
        "two tensor ranks": {"tp": 2},
        "two data ranks": {"dp": 2},
    }
    fours = {
        judged: {"stages and tensor": {"pp": 2, "tp": 2}},
        on_body: {"data and tensor": {"dp": 2, "tp": 2}, "stages and data": {"pp": 2, "dp": 2}},
    }
    for name, more in fours.items():
        for layout, sizes in (layouts | more).items():
            num_ranks = math.prod(sizes.values())
            cases[f"{name}: {layout}"] = Case(name, num_ranks, Parallel3DStrategy, sizes)
    for layout, sizes in fours[on_body].items():
        cases[f"{by_adam}: {layout}"] = Case(by_adam, 4, Parallel3DStrategy, sizes)
    return cases


CASES = _cases()


class TinyPPO(PPO):
    """Judged in this process, with what a user may add: a judge of its own, and metrics, one of them of one rank only.

    `judged` counts the judge's calls here; `updates` has the metrics of each update, `gradients` and `clipped` are
    those of the first, before and after the clip.
    """

    def __init__(self, policy: str | ModelSpec = POLICY, *, is_adam: bool = False, **kwargs: Any) -> None:
        settings = {"sampling": Sampling(max_new_tokens=6), "lr": ADAM_LR if is_adam else 0.1, **kwargs}
        super().__init__(policy, group_size=4, microbatch_tokens=20, **settings)
        self.is_adam = is_adam
        self.judged = 0
        self.updates: list[dict[str, float]] = []
        self.experiences: list[Experience] = []
        self.gradients: dict[str, Tensor] = {}
        self.clipped: dict[str, Tensor] = {}

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
        if ranks_of(self.trainer.strategy).dp_rank == 1:
            result["only_here"] = surprise
        return result

    def on_experience_ready(self, experience: Experience) -> None:
        self.experiences.append(experience)

    def configure_optimizers(self) -> Any:
        # With its usual epsilon of 1e-8, Adam divides the rounding of a tiny gradient by itself.
        groups = self.parameter_groups()
        return torch.optim.AdamW(groups, eps=self.lr) if self.is_adam else torch.optim.SGD(groups)

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        super().configure_gradient_clipping(*args, **kwargs)
        self.clipped = self.clipped or self.whole_gradients()

    def whole_gradients(self) -> dict[str, Tensor]:
        found = ((key, value.grad) for key, value in self.named_parameters())
        return {key: whole(grad).clone() for key, grad in found if grad is not None}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = self.gradients or self.whole_gradients()

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))


def play(settings: str, folder: Path, **spread: Any) -> dict[str, Any]:
    """Trains with these settings; gives what is compared. Of a split model this rank's part, each parameter whole."""
    given = dict(SETTINGS[settings])
    judge = replace(JUDGE, config=None, path=str(folder / "judge"))
    for name, role in given.items():
        if isinstance(role, Role) and role.model == JUDGE:
            given[name] = replace(role, model=judge)
        elif role == JUDGE:
            given[name] = judge
    module = TinyPPO(**given)
    trainer = make_trainer(folder, gradient_clip_val=0.5, **spread)
    with second_device() as moved:
        trainer.fit(module, datamodule=Digits())
    return {**found_by(module, trainer), "num_moves": len(moved)}


def found_by(module: TinyPPO, trainer: Any) -> dict[str, Any]:
    """What is compared, after a fit."""
    normalizer = module.normalizer
    return {
        "updates": module.updates,
        "only_here": [update.pop("only_here") for update in module.updates if "only_here" in update],
        "dp_size": ranks_of(trainer.strategy).dp_size,
        "gradients": module.gradients,
        "clipped": module.clipped,
        "weights": {key: whole(value) for key, value in module.named_parameters()},
        "trained": {key for key, value in module.named_parameters() if value.requires_grad},
        "experiences": [gathered_tensors(experience) for experience in module.experiences],
        "state": [module.kl_coef, *([] if normalizer is None else map(float, normalizer.state_dict().values()))],
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "judged": module.judged,
    }


def save_judge(folder: Path) -> None:
    model = JUDGE.load_model()
    head = scalar_head(model)
    assert head is not None
    torch.nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(6))
    model.save_pretrained(folder / "judge")


def main() -> int:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    save_judge(folder)

    def play_all(size: int) -> None:
        if size == 1:
            found = {name: play(name, folder) for name in SETTINGS}
        else:
            found = {
                name: play(case.settings, folder, devices=size, strategy=case.strategy(**case.sizes))
                for name, case in CASES.items()
                if case.num_ranks == size
            }
        leave(found, folder / str(size))

    return fork_runs((2, 4, 1), play_all)


if __name__ == "__main__":
    sys.exit(main())
