"""Files that every run writes to its folder: README.txt, logs, status.json, problems, a timed checkpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import socket
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.files import STATUS_FILE
from lightrl.checks.printable import count_text
from lightrl.engines import RolloutEngine
from lightrl.experience import Experience
from lightrl.module import RLModule
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.trajectory import Group

log = logging.getLogger(__name__)

# File pattern in the run's folder → content of the file; the most useful first.
KINDS = {
    "config.yaml": "all settings except secrets, for fit --config",
    "learning_curve.png": "reward and accuracy over the iterations",
    "learning_curve.csv": "the plotted numbers",
    "metrics.csv": "every metric, a row per iteration",
    "events.out.tfevents*": "every metric, for tensorboard --logdir .",
    "trajectories": "trajectories, one per line; lightrl inspect shows them",
    "predictions*.jsonl": "trajectories of lightrl predict, one per line",
    "checkpoints": "fit --ckpt_path last continues from the newest",
    "exported": "the trained model as a Hugging Face folder",
    "trace": "where the time went: summary.json, trace.json",
    "problems": "warnings, errors and drops, a file per rank",
    "logs": "log lines, a file per rank; logging: sets the levels",
    "failed_rewards.jsonl": "failed rewards; recompute with lightrl doctor replay",
    "failed_rollouts.jsonl": "partial trajectories of failed rollouts",
    "traceback.txt": "the error that ended the run",
    "status.json": "what the run is doing, for lightrl status",
    "hparams.yaml": "the settings as Lightning's CSVLogger writes them",
}
_NAME_CHARS = max(map(len, KINDS))


def contents(folder: Path) -> list[str]:
    """Returns a line for each kind of file in a run's folder."""
    return [f"  {name:<{_NAME_CHARS}}  {kind}" for name, kind in KINDS.items() if any(folder.glob(name))]


def write_whole(place: Path, text: str) -> None:
    """Writes a small file atomically, because other processes may read it at any time."""
    part = place.with_name(f"{place.name}.part")
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    part.replace(place)


def run_folder(trainer: L.Trainer) -> Path | None:
    """Returns the run's folder; None without a logger or with `fast_dev_run`. Otherwise rank 0 broadcasts it."""
    folder = trainer.log_dir if trainer.loggers and not getattr(trainer, "fast_dev_run", False) else None
    return Path(folder) if folder else None


class RunFiles(RLCallback):
    """Writes README.txt when a stage is set up, logs the folder's path, and writes each rank's log lines to a file.

    It writes nothing without a logger, with `fast_dev_run`, or if the disk is full.
    """

    def __init__(self) -> None:
        self._log_file: logging.FileHandler | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        log_dir = trainer.log_dir  # read on all ranks, because rank 0 broadcasts it
        for callback in trainer.checkpoint_callbacks if log_dir else []:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str(Path(str(log_dir)) / "checkpoints")  # even if CSVLogger is not the first logger
        folder = run_folder(trainer)
        if folder is None:
            return
        self._close_log()
        with contextlib.suppress(OSError):
            path = folder / "logs" / f"rank-{trainer.global_rank}.log"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._log_file = logging.FileHandler(path, encoding="utf-8", errors="backslashreplace")
            self._log_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
            logging.getLogger("lightrl").addHandler(self._log_file)
        if not trainer.is_global_zero:
            return
        log.info("run folder: %s", folder)
        lines = [
            "A run of lightrl. `lightrl inspect .` shows it in the browser, even while it is running.",
            "Some files exist only with their callback or logger, in asynchronous runs, or after an error:",
            "",
            *(f"{name:<{_NAME_CHARS}}  {kind}" for name, kind in KINDS.items()),
        ]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / "README.txt", "\n".join(lines) + "\n")

    def _close_log(self, *_: object, **__: object) -> None:
        if self._log_file is not None:
            logging.getLogger("lightrl").removeHandler(self._log_file)
            self._log_file.close()
            self._log_file = None

    teardown = on_exception = _close_log


_EVERY_S = 1.0  # minimum time between two writes within a phase


class StatusFile(RLCallback):
    """Writes `status.json` to the run's folder when the phase changes, and every second within a phase.

    If the disk is full, the file stays unchanged; another write by the run then fails with a better message.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._content: dict[str, object] = {}
        self._written_at = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        self._path = folder / STATUS_FILE if folder is not None and trainer.is_global_zero else None
        self._content = {"stage": stage, "pid": os.getpid(), "host": socket.gethostname()}
        self._enter(trainer, "starting")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._enter(trainer, "validation")

    on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def on_rollout_start(self, trainer: RLTrainer, module: RLModule) -> None:
        self._enter(trainer, "rollout")

    def on_rollout_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        self._progress(trainer, f"{done} of {total} trajectories")

    def on_rollout_end(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        self._enter(trainer, "scores and rewards")

    def on_rewards_progress(self, trainer: RLTrainer, module: RLModule, done: int, total: int) -> None:
        self._progress(trainer, f"{done} of {total} rewards")

    def on_experience_ready(self, trainer: RLTrainer, module: RLModule, experience: Experience) -> None:
        self._enter(trainer, "update")

    def on_minibatch_end(
        self, trainer: RLTrainer, module: RLModule, metrics: dict[str, float], index: int, total: int
    ) -> None:
        self._progress(trainer, f"{index + 1} of {total} minibatches")

    def on_policy_updated(self, trainer: RLTrainer, module: RLModule, weight_version: int) -> None:
        self._enter(trainer, "sync")

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        self._enter(trainer, "end of the iteration")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        is_interrupt = isinstance(exception, KeyboardInterrupt | SIGTERMException)
        if not is_interrupt:
            self._content["error"] = f"{type(exception).__name__}: {exception}"
        self._enter(trainer, "interrupted" if is_interrupt else "failed")

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if self._content.get("phase") not in ("failed", "interrupted"):
            self._enter(trainer, "done")

    def _enter(self, trainer: L.Trainer, phase: str) -> None:
        self._content |= {"phase": phase, "since": time.time(), "progress": ""}
        self._write(trainer)

    def _progress(self, trainer: L.Trainer, progress: str) -> None:
        self._content["progress"] = progress
        if time.monotonic() - self._written_at >= _EVERY_S:
            self._write(trainer)

    def _write(self, trainer: L.Trainer) -> None:
        if self._path is None:
            return
        self._written_at = time.monotonic()
        engine: RolloutEngine | None = getattr(trainer, "engine", None)
        servers = [] if engine is None else engine.server_states()
        now: dict[str, object] = {"at": time.time(), "max_steps": trainer.max_steps, "servers": servers}
        now |= {"iteration": cast("RLTrainer", trainer).iteration, "num_finished": trainer.global_step}
        now["weight_version"] = engine and engine.weight_version
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._content | now, indent=1))


MAX_LINES = 10_000  # per process
_MAX_DROPS = 50  # per iteration; further drops are only counted
_MAX_CHARS = 4_000  # per message


class ProblemLog(RLCallback):
    """Writes `<run folder>/problems/rank-00000.jsonl`: lightrl's warnings, drops, and the final error.

        {"at": 1763851234.5, "iteration": 12, "rank": 0, "source": "server", "kind": "warning", "message": "..."}

    `source` is server, reward, rollout or trainer. After `MAX_LINES`, or on a full disk, the log stops, not the run.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._num_lines = 0
        self._num_dropped: Counter[str] = Counter()  # reason → number in this iteration
        self._handler: _Handler | None = None
        self._trainer: L.Trainer | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = run_folder(trainer)
        self._trainer = trainer
        self._path = None if folder is None else folder / "problems" / f"rank-{trainer.global_rank:05d}.jsonl"
        if self._path is not None and self._handler is None:
            self._handler = _Handler(self)
            logging.getLogger("lightrl").addHandler(self._handler)

    def on_trajectory_dropped(self, trainer: RLTrainer, module: RLModule, reason: str, message: str) -> None:
        if trainer.is_global_zero:  # the hook is called on every rank
            self._num_dropped[reason] += 1
            if self._num_dropped.total() <= _MAX_DROPS:
                self.add("reward" if reason.startswith("reward") else "rollout", f"dropped: {reason}", message)

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        if self._num_dropped.total() > _MAX_DROPS:
            counts = ", ".join(f"{num} {reason}" for reason, num in self._num_dropped.most_common())
            self.add("rollout", "dropped", f"{count_text(self._num_dropped.total(), 'trajectory')} in total: {counts}")
        self._num_dropped.clear()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.add("trainer", "error", f"{type(exception).__name__}: {exception}")
        self.teardown()  # Lightning does not call it after an error

    def teardown(self, *_: object, **__: object) -> None:
        if self._handler is not None:
            logging.getLogger("lightrl").removeHandler(self._handler)
        self._handler = self._trainer = None

    def add(self, source: str, kind: str, message: str) -> None:
        """Appends a line; may be called from any thread."""
        trainer, path = cast("RLTrainer | None", self._trainer), self._path
        if path is None or trainer is None or self._num_lines >= MAX_LINES:
            return
        self._num_lines += 1
        stamp = {"at": round(time.time(), 3), "iteration": trainer.iteration, "rank": trainer.global_rank}
        line = json.dumps({**stamp, "source": source, "kind": kind, "message": message[:_MAX_CHARS]})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None


_SOURCES = {"engines": "server", "rewards": "reward", "rollout": "rollout", "workflows": "rollout"}


class _Handler(logging.Handler):
    """Passes the warnings and errors from lightrl's loggers to the ProblemLog."""

    def __init__(self, target: ProblemLog) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        package = record.name.split(".")[1] if "." in record.name else ""
        self._target.add(_SOURCES.get(package, "trainer"), record.levelname.lower(), record.getMessage())


def keep_slashes_out(checkpoint: ModelCheckpoint) -> None:
    """Makes `{val/reward}` in a file name become `val_reward=0.5`; Lightning would create a `val` folder."""
    names = {
        "filename": checkpoint.filename or "{epoch}-{step}",
        "CHECKPOINT_NAME_LAST": checkpoint.CHECKPOINT_NAME_LAST,
    }
    if checkpoint.auto_insert_metric_name and any(re.search(r"\{[^}:]*/", name) for name in names.values()):
        checkpoint.auto_insert_metric_name = False
        for attribute, name in names.items():
            shown = re.sub(r"\{([^}:]*)", lambda match: f"{match[1].replace('/', '_')}={{{match[1]}", name)
            setattr(checkpoint, attribute, shown)


class TimedCheckpoint(ModelCheckpoint):
    """Keeps one checkpoint, `last-timed.ckpt`, at most `every_s` plus one iteration old; writes it in the background.

    It also saves at the end and on exceptions if no other ModelCheckpoint does. Every run with checkpoints uses it.

    Args:
        dirpath: the checkpoint's folder; None means the folder of the run's other checkpoints.
        every_s: seconds between two checkpoints.
    """

    CHECKPOINT_NAME_LAST = "last-timed"  # `--ckpt_path last` finds it

    def __init__(self, dirpath: str | Path | None = None, *, every_s: float = 600.0) -> None:
        super().__init__(
            dirpath, save_top_k=0, save_last=True, train_time_interval=timedelta(seconds=every_s),
            enable_version_counter=False, save_on_exception=True,
        )  # fmt: skip

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        # lightrl's strategies and checkpoint plugins have `save_async`; a user's plugin may not.
        strategy: Any = trainer.strategy
        writer = strategy if hasattr(strategy, "save_async") else strategy.checkpoint_io
        before = getattr(writer, "save_async", None)
        try:
            if before is not None:
                writer.save_async = True
            super().on_train_batch_end(trainer, *args, **kwargs)
        finally:
            if before is not None:
                writer.save_async = before

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not any(item.save_last for item in self._others(trainer)):
            super().on_train_end(trainer, pl_module)

    def on_exception(self, trainer: Any, pl_module: L.LightningModule, exception: BaseException) -> None:
        if not self.save_on_exception or trainer.sanity_checking:
            return
        saving = [item for item in self._others(trainer) if item.save_last and item.save_on_exception]
        path = saving[0].last_model_path if saving else self.format_checkpoint_name({}, self.CHECKPOINT_NAME_LAST)
        is_saved = trainer.saved_at == trainer.global_step
        if (is_saved if saving else trainer.save_checkpoint(path, weights_only=False)) and trainer.is_global_zero:
            log.info("Saved %s; --ckpt_path last continues from it.", path)

    def _others(self, trainer: L.Trainer) -> list[ModelCheckpoint]:
        return [item for item in trainer.checkpoint_callbacks if isinstance(item, ModelCheckpoint) and item is not self]
