"""Runs on several sources, teachers and agents, of one process or of two ranks, which test_tasks.py and others compare.

python tests/trainer/several_run.py FOLDER
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from rank_scripts import gathered_tensors, leave
from resharded_run import weights_of
from several_ranks_run import BySGD
from tiny_run import CONFIG, POLICY, TinyGRPO, train

from lightrl import Distillation, Environment, FSDP2Strategy, GiGPO, MultiTurn, PromptDataModule, RLCallback, Trajectory
from lightrl.callbacks.self_play import SelfPlay
from lightrl.data import DataSource
from lightrl.data.tasks import Task
from lightrl.models.bf16_adamw import BF16AdamW
from lightrl.workflows import AgentEnvironment, MultiAgent

ROUNDS = 2
MUON_LR = 0.02


class Echo(Environment):
    """Answers each turn with a digit; a turn earns the number of its characters."""

    def __init__(self) -> None:
        self.num_turns = 0

    def step(self, completion: str) -> Any:
        self.num_turns += 1
        return "4", float(len(completion)), self.num_turns == ROUNDS


def of_turns(trajectory: Trajectory) -> Any:
    return {"rewards": list(trajectory.rewards or [])}


def multi_turn(tokenizer: Any) -> MultiTurn:
    return MultiTurn(tokenizer, Echo, max_turns=ROUNDS, max_tokens=24)


class Sourced(BySGD, TinyGRPO):
    """GRPO whose reward is that of the sources without one."""


def sources(folder: Path) -> list[DataSource]:
    """Three sources of equal weight, one of them streamed."""
    for name, num in (("short", 5), ("turns", 4), ("plain", 7)):
        rows = [{"question": f"{row % 6} {name == 'turns':d}"} for row in range(num)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    short = Task(reward=lambda trajectory: -float(len(trajectory.completion_ids)), group_size=2, max_new_tokens=3)
    turns = Task(workflow=multi_turn, reward=lambda trajectory: of_turns(trajectory), group_size=3)
    return [
        DataSource(str(folder / "short.jsonl"), label="short", task=short, streaming=True, shuffle_buffer=2),
        DataSource(str(folder / "turns.jsonl"), label="turns", task=turns),
        DataSource(str(folder / "plain.jsonl")),
    ]


class Sizes(RLCallback):
    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def on_rewards_ready(self, trainer: Any, module: Any, groups: Any) -> None:
        self.sizes.append([len(group.trajectories) for group in groups])


def tasks_result(folder: Path, **flags: Any) -> dict[str, Any]:
    """Trains three iterations of two minibatches each."""
    module, sizes = Sourced(num_minibatches=2, lr=0.1), Sizes()
    data = PromptDataModule(sources(folder), batch_size=3, answer_column=None, seed=1)
    trainer = train(folder, module, data, callbacks=[sizes], **flags)
    names = ("rollout/reward/short", "rollout/reward/turns", "rollout/length_tokens/turns", "policy/loss")
    metrics = {name: float(trainer.callback_metrics[name]) for name in names}
    return {"weights": weights_of(module), "sizes": sizes.sizes, "metrics": metrics}


TEACHER = replace(POLICY, seed=7, config={**CONFIG, "initializer_range": 0.4})
TEACHERS = {"teacher": TEACHER, "teachers": {"turns": replace(TEACHER, seed=9)}}


def hint_of(token_ids: Sequence[int], start: int) -> list[int]:
    """Longer than the prompt, and different for different answers, which a teacher sees only afterwards."""
    return [3, 5, 6, *token_ids[:start], 2 + len(token_ids) % 6]


def hint(trajectory: Trajectory) -> list[int] | None:
    if trajectory.prompt.source == "short":
        return None
    assert trajectory.reward is not None
    return hint_of(list(trajectory.token_ids), trajectory.turns[0].start)


class Taught(BySGD, TinyGRPO, Distillation):
    pass


def taught_result(folder: Path, teachers: dict[str, Any], **flags: Any) -> dict[str, Any]:
    """One iteration; what the loss read of it, and the sources of its rows."""
    module = Taught(teacher_prompt=hint, group_size=2, num_minibatches=2, microbatch_tokens=40, lr=0.1, **teachers)
    module.reads_prompts = True
    data = PromptDataModule(sources(folder), batch_size=3, answer_column=None, seed=1)
    train(folder, module, data, max_steps=1, **flags)
    tensors = gathered_tensors(module.experiences[-1])
    return {"tensors": tensors, "sources": [prompt.source for prompt in module.prompts], "weights": weights_of(module)}


class Contest(AgentEnvironment):
    """Two players write twice each; whoever writes more fives wins the difference."""

    agents = ("left", "right")

    def __init__(self) -> None:
        self.texts: list[str] = []

    def reset(self, prompt: Any) -> Any:
        return "left", None

    def step(self, completion: str) -> Any:
        self.texts.append(completion)
        if len(self.texts) < 4:
            return self.agents[len(self.texts) % 2], "3", {}
        ahead = float(sum(text.count("5") * (-1) ** turn for turn, text in enumerate(self.texts)))
        return None, None, {"left": ahead, "right": -ahead}


class Duel(BySGD, TinyGRPO):
    """Keeps which trajectories had an opponent."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.with_opponent: list[float] = []

    def reward(self, trajectory: Trajectory) -> Any:
        self.with_opponent.append(trajectory.metrics["opponent_fraction"])
        return {"rewards": list(trajectory.rewards or [])}


def duel(num_minibatches: int = 2) -> Duel:
    def workflow(tokenizer: Any) -> MultiAgent:
        return MultiAgent(tokenizer, Contest, max_tokens=28, truncated_reward=-1.0)

    return Duel(workflow=workflow, num_minibatches=num_minibatches, max_failed_fraction=1.0, lr=0.1)


def agents_result(folder: Path, **flags: Any) -> dict[str, Any]:
    module = duel()
    train(folder, module, callbacks=[SelfPlay(1, fraction=0.5)], max_steps=2, **flags)
    return {"weights": weights_of(module)}


class Parity(Environment):
    """What it shows depends on the number of fives before, so that some turns of a group resemble each other."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def step(self, completion: str) -> Any:
        self.texts.append(completion)
        return "34"["".join(self.texts).count("5") % 2], float(completion.count("5")), len(self.texts) == 3


class ByTurns(BySGD, TinyGRPO, GiGPO):
    def reward(self, trajectory: Trajectory) -> Any:
        return of_turns(trajectory)


def turns_result(folder: Path, **flags: Any) -> dict[str, Any]:
    """Trains two iterations by GiGPO; the last one's tensors of all trajectories."""

    def workflow(tokenizer: Any) -> MultiTurn:
        return MultiTurn(tokenizer, Parity, max_turns=3, max_tokens=28)

    module = ByTurns(workflow=workflow, step_weight=0.7, num_minibatches=2, microbatch_tokens=60, lr=0.1)
    train(folder, module, max_steps=2, **flags)
    return {"tensors": gathered_tensors(module.experiences[-1]), "weights": weights_of(module)}


class InBF16(TinyGRPO):
    def configure_optimizers(self) -> Any:
        return BF16AdamW(self.parameter_groups())


def muon_result(folder: Path, ckpt_path: Path | None = None, module: Any = None, **flags: Any) -> dict[str, Any]:
    """Trains four iterations by Muon or a module, and saves after two; or the last two, from a checkpoint."""
    module = module or TinyGRPO(optimizer="muon", num_minibatches=2, lr=MUON_LR, eps=MUON_LR)  # see BySGD
    saves = [] if ckpt_path else [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")]
    checkpoints: dict[str, Any] = {"callbacks": saves, "enable_checkpointing": bool(saves), "ckpt_path": ckpt_path}
    train(folder, module, max_steps=4, **checkpoints, **flags)
    return {"weights": weights_of(module), "num_trained": len(module.trained)}


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "teachers": (TEACHERS, {}),
    "teachers, likeliest tokens": ({**TEACHERS, "teacher_topk": 3}, {"strategy": "cp"}),
    "itself": ({}, {"strategy": "cp"}),
}


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    spread: dict[str, Any] = {"devices": 2, "strategy": "FSDP2Strategy"}
    found = {"tasks": tasks_result(folder, **spread)}
    for name, (teachers, flags) in CASES.items():
        strategy = FSDP2Strategy(cp=2) if flags else FSDP2Strategy()
        found[name] = taught_result(folder, teachers, devices=2, strategy=strategy)
    found["agents"] = agents_result(folder, **spread)
    found["turns"] = turns_result(folder, **spread)
    found["muon"] = muon_result(folder / "muon", **spread)
    found["muon resumed"] = muon_result(folder / "muon resumed", folder / "muon" / "step=2.ckpt", **spread)
    offloading, spread["gradient_clip_val"] = FSDP2Strategy(offload_to_cpu=["optimizer"]), 0.1
    found["bf16"] = muon_result(folder / "bf16", None, InBF16(num_minibatches=2), **{**spread, "strategy": offloading})
    saved = folder / "bf16" / "step=2.ckpt"
    found["bf16 resumed"] = muon_result(folder / "bf16 resumed", saved, InBF16(num_minibatches=2), **spread)
    leave(found, folder)


if __name__ == "__main__":
    main()
