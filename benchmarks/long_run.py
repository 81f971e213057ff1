"""One long run, for `benchmarks.growth`: a tiny policy, FakeEngine, and every callback that keeps state.

    python -m benchmarks.long_run 10,100,1000,10000 FOLDER [MAX_STALENESS]

Prints a JSON line at each of these iterations. FakeEngine's own record of requests, which grows, is cut.
"""

from __future__ import annotations

import io
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import lightrl
from benchmarks.report import rss_mib
from lightrl import FakeEngine, LearningCurve, Prompt, PromptDataModule, RLCallback, Sampling, TrajectoryLog
from lightrl.testing import QUIET, tiny_policy
from lightrl.trajectory import Trajectory

_LAST = 50  # iterations, whose medians are a mark's seconds
_REQUESTS_OF_FAKE = 1000  # after as many, FakeEngine's own record is emptied


class Letters(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{number}", token_ids=[2 + number % 8, 3]) for number in range(8)]


class TinyGRPO(lightrl.GRPO):
    def reward(self, trajectory: Trajectory) -> float:
        return float(sum(trajectory.completion_ids) % 2)


class Marks(RLCallback):
    """Measures the run at some iterations: time, memory, and what a checkpoint holds."""

    def __init__(self, marks: list[int], folder: Path) -> None:
        self.marks = marks
        self.folder = folder
        self._seconds: list[tuple[float, float]] = []  # of the last iterations: by the clock, of the processor
        self._started = (time.perf_counter(), time.process_time())

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        clock, processor = self._started
        self._seconds = [*self._seconds[1 - _LAST :], (time.perf_counter() - clock, time.process_time() - processor)]
        if isinstance(trainer.engine, FakeEngine):
            del trainer.engine.requests[:-_REQUESTS_OF_FAKE]
        if trainer.global_step in self.marks:
            self._show(trainer)
        self._started = (time.perf_counter(), time.process_time())

    def _show(self, trainer: Any) -> None:
        path = self.folder / "mark.ckpt"
        trainer.save_checkpoint(path)
        checkpoint = torch.load(path, weights_only=True)
        largest = sorted(_sizes(checkpoint), reverse=True)[:3]
        metrics = Path(trainer.loggers[0].log_dir) / "metrics.csv"
        row = {
            "iteration": trainer.global_step,
            "seconds": round(statistics.median(clock for clock, _ in self._seconds), 5),
            "processor_s": round(statistics.median(processor for _, processor in self._seconds), 5),
            "rss_mib": round(rss_mib(), 1),
            "checkpoint_bytes": path.stat().st_size,
            "largest_parts": {name: size for size, name in largest},
            "logged_bytes_per_iteration": round(metrics.stat().st_size / trainer.global_step),
            "open_files": len(list(Path("/proc/self/fd").iterdir())),
        }
        print(json.dumps(row), flush=True)


def _sizes(value: Any, name: str = "", depth: int = 3) -> list[tuple[int, str]]:
    """Bytes of the parts of a checkpoint, with their names."""
    if isinstance(value, dict) and depth and value:
        return [part for key, item in value.items() for part in _sizes(item, f"{name}/{key}", depth - 1)]
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return [(buffer.tell(), name)]


def measured(marks: str) -> list[dict[str, Any]]:
    """The lines of a run in a process of its own; none for no marks."""
    if not marks:
        return []
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.long_run", marks, folder]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [json.loads(line) for line in answer.splitlines() if line.startswith('{"iteration"')]


def main() -> None:
    marks, folder = [int(mark) for mark in sys.argv[1].split(",")], Path(sys.argv[2])
    max_staleness = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    lightrl_callbacks = [LearningCurve(), TrajectoryLog(), Marks(marks, folder)]
    trainer = lightrl.Trainer(
        **{
            **QUIET,
            "default_root_dir": folder,
            "max_steps": marks[-1],
            "engine": FakeEngine(),
            "enable_checkpointing": True,
            "logger": [CSVLogger(folder), TensorBoardLogger(folder)],
            "callbacks": [*lightrl_callbacks, lightrl.StalenessControl(max_staleness)],
        }
    )
    module = TinyGRPO(tiny_policy(), group_size=2, sampling=Sampling(max_new_tokens=2), lr=1e-3)
    trainer.fit(module, Letters(None, batch_size=2))


if __name__ == "__main__":
    main()
