"""StatusFile: what the run does at the moment, as a small file in its folder that `lightrl status` reads."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.status_files import STATUS_FILE
from lightrl.engines import SGLangEngine
from lightrl.strategies.atomic_write import write_whole

if TYPE_CHECKING:
    import lightning as L

_EVERY_S = 1.0  # within a phase


class StatusFile(RLCallback):
    """Writes `status.json` into the run's folder at each change of phase, and each second within one.

    Nothing is written without a logger or with `fast_dev_run`. A full disk leaves the file as it was: what the run does
    next fails with a better message.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._content: dict[str, Any] = {}
        self._written_at = 0.0

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # on all ranks: it comes from rank 0
        has_folder = trainer.is_global_zero and trainer.loggers and not getattr(trainer, "fast_dev_run", False)
        self._path = Path(folder) / STATUS_FILE if has_folder and folder else None
        self._content = {"stage": stage, "pid": os.getpid(), "host": socket.gethostname()}
        self._enter(trainer, "starting")

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._enter(trainer, "validation")

    on_validation_start = on_test_start = on_predict_start = on_sanity_check_start

    def on_rollout_start(self, trainer: Any, module: Any) -> None:
        self._enter(trainer, "rollout")

    def on_rollout_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        self._progress(trainer, f"{done} of {total} trajectories")

    def on_rollout_end(self, trainer: Any, module: Any, groups: Any) -> None:
        self._enter(trainer, "scores and rewards")

    def on_rewards_progress(self, trainer: Any, module: Any, done: int, total: int) -> None:
        self._progress(trainer, f"{done} of {total} rewards")

    def on_experience_ready(self, trainer: Any, module: Any, experience: Any) -> None:
        self._enter(trainer, "update")

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: Any, index: int, total: int) -> None:
        self._progress(trainer, f"{index + 1} of {total} minibatches")

    def on_policy_updated(self, trainer: Any, module: Any, weight_version: int) -> None:
        self._enter(trainer, "sync")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._enter(trainer, "end of the iteration")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if isinstance(exception, KeyboardInterrupt):
            self._enter(trainer, "interrupted")
            return
        self._content["error"] = f"{type(exception).__name__}: {exception}"
        self._enter(trainer, "failed")

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
        engine = getattr(trainer, "engine", None)
        fleet = engine.fleet.in_state() if isinstance(engine, SGLangEngine) else []
        servers = [dataclasses.asdict(server.status()) for server in fleet]
        now = {"at": time.time(), "iteration": trainer.global_step, "max_steps": trainer.max_steps, "servers": servers}
        now["weight_version"] = getattr(engine, "weight_version", None)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, json.dumps(self._content | now, indent=1))
        except OSError:
            return
