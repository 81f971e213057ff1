"""A run of Lightning's own trainer whose training step calls an iteration's RL hooks with trajectories of a test."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch

from lightrl.dataflow import DataFlowGraph
from lightrl.experience import Experience
from lightrl.rollout import RolloutSettings
from lightrl.trajectory import Group

MakeGroups = Callable[[int], list[Group]]  # iteration → its groups


class ScriptedTrainer(L.Trainer):
    """Lightning's trainer with what callbacks ask of lightrl's."""

    def __init__(self, *, max_staleness: int = 0, **settings: Any) -> None:
        quiet = {"accelerator": "cpu", "enable_model_summary": False, "log_every_n_steps": 1, "logger": False}
        super().__init__(**{**quiet, "enable_checkpointing": False, **settings})
        self.phase_seconds = {"rollout": 2.0, "score": 0.0, "update": 0.5, "sync": 0.25}
        self.rollout = SimpleNamespace(
            settings=RolloutSettings(max_staleness=max_staleness),
            is_recorded=False,
            progress=lambda: {"skipped_prompts": 0, "stragglers": 0, "straggler_wait_s": 0.0},
        )

    @property
    def weight_version(self) -> int:
        return self.global_step

    def call_rl_hook(self, name: str, *arguments: Any) -> None:
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if hasattr(callback, name):
                getattr(callback, name)(self, self.lightning_module, *arguments)


class ScriptedModule(L.LightningModule):
    """Calls all hooks in order with `make_groups(iteration)`; advantage = reward - mean of the iteration."""

    def __init__(self, make_groups: MakeGroups, *, num_minibatches: int = 2) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.make_groups = make_groups
        self.num_minibatches = num_minibatches

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hook = self.trainer.call_rl_hook  # type: ignore[attr-defined]
        hook("on_rollout_start")
        groups = self.make_groups(self.trainer.global_step)
        trajectories = [item for group in groups for item in group.trajectories]
        hook("on_rollout_progress", 1, len(trajectories))
        hook("on_rollout_end", groups)
        hook("on_rewards_ready", groups)
        experience = Experience.from_trajectories(trajectories)
        advantages = (experience.rewards - experience.rewards.mean())[:, None] * experience.loss_mask
        experience = replace(experience, advantages=advantages)
        hook("on_experience_ready", experience)
        for index, rows in enumerate(torch.arange(len(experience)).tensor_split(self.num_minibatches)):
            hook("on_minibatch_start", experience.select(rows), index, self.num_minibatches)
            hook("on_minibatch_end", {"loss": float(index), "entropy_nats": 2.0}, index, self.num_minibatches)
        hook("on_policy_updated", self.trainer.global_step + 1)
        hook("on_weights_synced", self.trainer.global_step + 1)
        return self.layer(batch).sum()

    def data_flow(self, *, from_file: bool = False) -> DataFlowGraph:
        return DataFlowGraph([], roles=())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ValidatedModule(ScriptedModule):
    """A quarter of the held-out prompts is right at first; each iteration adds a sixteenth."""

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val/accuracy_fraction", 0.25 + self.trainer.global_step / 16)


def batches(num: int) -> torch.Tensor:
    """A sized iterable that Lightning takes as a loader; a list would be many loaders."""
    return torch.ones(num, 1, 1)


def run(make_groups: MakeGroups, *callbacks: L.Callback, num_iterations: int = 1, **settings: Any) -> ScriptedTrainer:
    """Runs so many iterations of one epoch; `settings` are the trainer's."""
    defaults = {"max_steps": num_iterations, "enable_progress_bar": False}
    trainer = ScriptedTrainer(callbacks=list(callbacks), **{**defaults, **settings})
    trainer.fit(ScriptedModule(make_groups), batches(num_iterations))
    return trainer
