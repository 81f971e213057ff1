"""ProblemLog: every warning, error and dropped trajectory of a run as lines that `lightrl inspect` shows."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.printable import count_text

if TYPE_CHECKING:
    import lightning as L

MAX_LINES = 10_000  # the most lines of a process
_MAX_DROPS = 50  # the most in an iteration; the others are counted
_MAX_CHARS = 4_000  # the most of a message


class ProblemLog(RLCallback):
    """Writes `<run folder>/problems/rank-00000.jsonl`: what lightrl's loggers warn of, drops, and the final error.

        {"at": 1763851234.5, "iteration": 12, "rank": 0, "source": "server", "kind": "warning", "message": "..."}

    `source` is server, reward, rollout or trainer. After `MAX_LINES` it is silent. A disk that is full ends it and not
    the run.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._num_lines = 0
        self._num_dropped: Counter[str] = Counter()  # reason → number in this iteration
        self._handler: _Handler | None = None
        self._trainer: L.Trainer | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        folder = trainer.log_dir  # on all ranks: it comes from rank 0
        has_folder = trainer.loggers and not getattr(trainer, "fast_dev_run", False)
        self._trainer = trainer
        name = f"rank-{trainer.global_rank:05d}.jsonl"
        self._path = Path(folder) / "problems" / name if has_folder and folder else None
        if self._path is not None and self._handler is None:
            self._handler = _Handler(self)
            logging.getLogger("lightrl").addHandler(self._handler)

    def on_trajectory_dropped(self, trainer: Any, module: Any, reason: str, message: str) -> None:
        if trainer.is_global_zero:  # every rank hears of it
            self._num_dropped[reason] += 1
            if self._num_dropped.total() <= _MAX_DROPS:
                self.add("reward" if reason.startswith("reward") else "rollout", f"dropped: {reason}", message)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if self._num_dropped.total() > _MAX_DROPS:
            counts = ", ".join(f"{num} {reason}" for reason, num in self._num_dropped.most_common())
            self.add("rollout", "dropped", f"{count_text(self._num_dropped.total(), 'trajectory')} in all: {counts}")
        self._num_dropped.clear()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.add("trainer", "error", f"{type(exception).__name__}: {exception}")
        self._close()  # Lightning calls no teardown after an error

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._close()

    def _close(self) -> None:
        if self._handler is not None:
            logging.getLogger("lightrl").removeHandler(self._handler)
        self._handler = self._trainer = None

    def add(self, source: str, kind: str, message: str) -> None:
        """Appends a line; called from any thread."""
        trainer, path = self._trainer, self._path
        if path is None or trainer is None or self._num_lines >= MAX_LINES:
            return
        self._num_lines += 1
        stamp = {"at": round(time.time(), 3), "iteration": trainer.global_step, "rank": trainer.global_rank}
        line = json.dumps({**stamp, "source": source, "kind": kind, "message": message[:_MAX_CHARS]})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:
            self._path = None


_SOURCES = {"engines": "server", "rewards": "reward", "rollout": "rollout", "workflows": "rollout"}


class _Handler(logging.Handler):
    """Gives the warnings and errors of lightrl's loggers to the log."""

    def __init__(self, target: ProblemLog) -> None:
        super().__init__(logging.WARNING)
        self._target = target

    def emit(self, record: logging.LogRecord) -> None:
        package = record.name.split(".")[1] if "." in record.name else ""
        self._target.add(_SOURCES.get(package, "trainer"), record.levelname.lower(), record.getMessage())
