"""Script of test_several_ranks.py for two processes: a run that resumes, and runs that fail.

It is started once, Lightning starts the second process from the same command.
"""

import os
import signal
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities import rank_zero_only
from rank_scripts import leave
from resharded_run import weights_of
from tiny_run import BATCH_SIZE, Digits, TinyGRPO, make_trainer, train
from tree_workflow import Tree

from lightrl import Experience, FSDP2Strategy, LocalEngine, RLCallback, Trace, Trajectory, TrajectoryLog
from lightrl.experience import LossUnit
from lightrl.rollout import RolloutSettings
from lightrl.strategies.ranks import watch as rank_watch


class BySGD:
    """Adam would divide the rounding of a tiny gradient by itself, unless its epsilon is as large as its lr."""

    def __init__(self, *args: Any, is_adam: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.is_adam = is_adam

    def configure_optimizers(self: Any) -> Any:
        groups = self.parameter_groups()
        return torch.optim.AdamW(groups, eps=self.lr) if self.is_adam else torch.optim.SGD(groups, momentum=0.9)


class Recorded(BySGD, TinyGRPO):
    """Keeps the metrics of each update.

    `is_batch_wide` compares with the whole iteration instead of the group; with `loses_some` one reward of each
    iteration raises; `max_loss_tokens` bounds what trains of each trajectory.
    """

    def __init__(
        self,
        is_batch_wide: bool = False,
        loses_some: bool = False,
        loss_unit: LossUnit = "trajectory",
        max_loss_tokens: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**{"lr": 0.1, **kwargs})
        self.loss_unit = loss_unit
        self.max_loss_tokens = max_loss_tokens
        self.is_batch_wide = is_batch_wide
        self.loses_some = loses_some
        self.updates: list[dict[str, float]] = []

    def reward(self, trajectory: Trajectory) -> Any:
        reward = super().reward(trajectory)
        if not self.loses_some:
            return reward
        if trajectory.group_id % BATCH_SIZE == 1 and trajectory.sample == 2:
            raise ValueError("no answer found")
        if trajectory.sample == 1:
            return {"rewards": [0.0] * (len(trajectory.token_ids) - 1) + [reward], "tries": trajectory.group_id}
        return {"reward": reward, "tries": 0}

    def advantages(self, experience: Experience) -> Any:
        if not self.is_batch_wide:
            return super().advantages(experience)
        return (experience.rewards - experience.rewards.mean()) / (experience.rewards.std() + 1e-4)

    def on_experience_ready(self, experience: Experience) -> Experience | None:  # type: ignore[override]
        super().on_experience_ready(experience)
        if self.max_loss_tokens is None:
            return None
        mask = experience.local.loss_mask
        return replace(experience.local, loss_mask=mask & (mask.cumsum(1) <= self.max_loss_tokens))

    def on_minibatch_end(self, metrics: dict[str, float], index: int, total: int) -> None:
        self.updates.append(dict(metrics))


def resume(folder: Path, max_batch: int | None = None, **settings: Any) -> dict[str, Any]:
    """Trains four iterations, and again the last two from the checkpoint between."""

    def run(ckpt_path: Path | None) -> tuple[TinyGRPO, Any]:
        module = TinyGRPO(num_minibatches=2, **settings)
        module.reads_prompts = True
        checkpoints = ModelCheckpoint(folder / "resume", every_n_train_steps=2, save_top_k=-1, filename="{step}")
        validation = {"val_check_interval": 2, "limit_val_batches": 1.0, "check_val_every_n_epoch": None}
        spread = {"devices": 2, "strategy": "FSDP2Strategy", "engine": LocalEngine(max_batch=max_batch)}
        callbacks = [checkpoints, Trace(max_cost=1.0)]
        kwargs = {"callbacks": callbacks, "enable_checkpointing": True, "max_steps": 4, **validation, **spread}
        return module, train(folder, module, ckpt_path=ckpt_path, **kwargs)

    with warnings.catch_warnings(record=True) as warned:
        whole, _ = run(None)
    resumed, trainer = run(folder / "resume" / "step=2.ckpt")
    return {
        "whole": weights_of(whole),
        "resumed": weights_of(resumed),
        "trained": (whole.trained, resumed.trained),
        "prompts": [prompt.id for prompt in whole.prompts],
        "group_ids": whole.experiences[-1].group_ids.tolist(),
        "warned": [str(warning.message) for warning in warned],
        "val/prompts": float(trainer.callback_metrics["val/prompts"]),
        "val/reward": float(trainer.callback_metrics["val/reward"]),
        "files": sorted(path.name for path in (folder / "resume").iterdir()),
    }


class RankZeroLogger(DummyLogger):
    """Has the name of its run on rank 0 only, as W&B's, which gets it from a server."""

    def __init__(self, save_dir: Path, version: str) -> None:
        super().__init__()
        self.root, self.given = save_dir, version

    save_dir = property(lambda self: str(self.root))  # type: ignore[assignment]
    name = property(lambda self: "project")  # type: ignore[assignment]
    version = property(lambda self: None if rank_zero_only.rank else self.given)  # type: ignore[assignment, attr-defined]


def newest(folder: Path) -> dict[str, Any]:
    """Trains an iteration, then one more from `last`, and validates from a `last` that is not there."""
    module = TinyGRPO()
    for number, steps in (("a", 1), ("b", 2)):
        logger = RankZeroLogger(folder / "online", f"run-{number}")
        spread = {"devices": 2, "strategy": "FSDP2Strategy", "logger": logger, "enable_checkpointing": True}
        trainer = train(folder, module, ckpt_path="last", max_steps=steps, **spread)
    empty = make_trainer(folder / "empty", devices=2, strategy="FSDP2Strategy")
    try:
        empty.validate(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    except ValueError as error:
        refusal = str(error)
    return {"path": str(trainer.ckpt_path), "num_trained": len(module.trained), "refusal": refusal}


class DiffersByRank(RLCallback):
    """Rank 1 asks for a filter, after which no rewards would be awaited late, and for another number."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def configure_rollout(self, trainer: Any, module: Any, settings: RolloutSettings) -> RolloutSettings:
        if trainer.global_rank == 0:
            return settings
        return replace(settings, group_filter=lambda group: None, max_concurrent=7)

    def on_rollout_end(self, trainer: Any, module: Any, groups: Any) -> None:
        self.settings = dict(vars(trainer.rollout.settings))


def configure(folder: Path) -> dict[str, Any]:
    """Trains with a callback that decides something else on each rank; gives the settings that applied."""
    differs, module = DiffersByRank(), TinyGRPO(num_minibatches=2, decoupled=True)
    log = TrajectoryLog(every_n_iterations=1, table_every_n_iterations=None)
    train(folder, module, devices=2, strategy="FSDP2Strategy", callbacks=[differs, log])
    return {"settings": differs.settings, "weights": weights_of(module)}


class Failing(TinyGRPO):
    """Lets one rank do what `how` says in its second iteration."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(num_minibatches=2)
        self.rank, self.how = rank, how

    def on_fit_start(self) -> None:
        if self.how == "hang at the start" and self.trainer.global_rank == self.rank:
            time.sleep(600)

    def on_minibatch_start(self, minibatch: Experience, index: int, total: int) -> None:
        if self.trainer.global_step != 1 or index != 0 or self.trainer.global_rank != self.rank:
            return
        if self.how == "raise":
            raise ValueError("raised on purpose")
        if self.how == "hang":
            time.sleep(600)
        if self.how in ("SIGSTOP", "SIGKILL"):
            os.kill(os.getpid(), signal.Signals[self.how])
        if self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)

    def reward(self, trajectory: Any) -> Any:
        if self.how == "reward" and self.trainer.global_step == 1:
            raise ValueError("failed on purpose")
        return super().reward(trajectory)


class TerminatedAtStart(LocalEngine):
    """Gets SIGTERM while it waits, as for a server."""

    def start(self, config: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)


def fail(folder: Path, rank: int, how: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    checkpoint = ModelCheckpoint(folder / how, save_on_exception=True, every_n_train_steps=100)
    rank_watch.START_S = 20.0
    strategy = FSDP2Strategy(hang_timeout_s=20 if how.startswith(("hang", "SIG")) else 600)
    engine = TerminatedAtStart() if how == "terminate" else LocalEngine()
    trainer = make_trainer(
        folder, engine=engine, devices=2, strategy=strategy, callbacks=[checkpoint], enable_checkpointing=True
    )
    trainer.fit(Failing(rank, how), datamodule=Digits())


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    if sys.argv[2] == "fail":
        fail(folder, int(sys.argv[3]), sys.argv[4])
        return
    trees = {"workflow": partial(Tree, num_subagents=(5, 0)), "microbatch_tokens": 12, "decoupled": True}
    found = {"newest": newest(folder), "resume": resume(folder), "configured": configure(folder)}
    leave({**found, "resume of pieces": resume(folder / "pieces", max_batch=1, **trees)}, folder)


if __name__ == "__main__":
    main()
