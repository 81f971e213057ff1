"""Kills ranks and launchers at random moments: how many iterations are lost, and do the losses stay the same?

    python -m benchmarks.recovery [--kills 10] [--ranks 2]

`lightrl launch` starts a small version of the quickstart with `recover: {retries: …}` and a checkpoint after each
iteration. After two iterations and a random part of the next two, kill -9 ends a rank, after which the launcher
restarts all ranks, or the launcher, after which the same command runs again with `--ckpt_path last`. All losses must
equal those of an undisturbed on-policy run to the last bit. Columns:

    ended_s              seconds from the kill until no rank of that attempt is left
    lost_iterations      iterations trained again after the kill: at most the one that the checkpoint does not contain
    equal_losses         whether the losses of all iterations, including repeated ones, are equal
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.report import Report
from lightrl import RLCallback

ROOT = Path(__file__).parents[1]
LOSSES = "losses.jsonl"
LONGEST_S = 600.0
_TICK_S = 0.05


class Losses(RLCallback):
    """Records each rank's process, and on rank 0 the losses of each iteration once it is trained.

    Args:
        folder: the folder of the records.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._losses: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        (self.folder / f"rank-{trainer.global_rank}").write_text(str(os.getpid()))

    def on_minibatch_end(self, trainer: Any, module: Any, metrics: dict[str, float], index: int, total: int) -> None:
        self._losses.append(float(metrics["loss"]))

    def on_policy_updated(self, trainer: Any, module: Any, weight_version: int) -> None:
        if trainer.is_global_zero:
            line = {"iteration": weight_version, "losses": self._losses, "at": time.monotonic()}
            with (self.folder / LOSSES).open("a") as file:
                file.write(json.dumps(line) + "\n")
        self._losses = []


def settings(folder: Path, ranks: int, iterations: int, retries: int) -> dict[str, Any]:
    """Returns settings that override the quickstart's."""
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}}
    losses = {"class_path": "benchmarks.recovery.Losses", "init_args": {"folder": str(folder)}}
    return {
        "trainer": {
            "max_steps": iterations, "default_root_dir": str(folder / "runs"), "callbacks": [checkpoint, losses],
            "num_sanity_val_steps": 0, "limit_val_batches": 0, "enable_progress_bar": False,
            "strategy": "FSDP2Strategy" if ranks > 1 else "auto",
        },
        "model": {"init_args": {"group_size": 4, "reward": "benchmarks.grpo_vs_trl.odd_fraction"}},
        "data": {"init_args": {"batch_size": 8}},
        "launch": {"ranks": ranks, "recover": {"retries": retries}, "warning_s": 5},
    }  # fmt: skip


class LaunchedRun:
    """A run by `lightrl launch` in its own folder."""

    def __init__(self, folder: Path, *, ranks: int, iterations: int, retries: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.ranks = folder, ranks
        (folder / "run.yaml").write_text(yaml.safe_dump(settings(folder, ranks, iterations, retries)))
        self.start()

    def __enter__(self) -> LaunchedRun:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the launcher, with which everything left ends."""
        self.launcher.kill()
        self.launcher.wait()

    def start(self, *words: str) -> None:
        configs = ("--config", str(ROOT / "examples/quickstart/grpo.yaml"), "--config", str(self.folder / "run.yaml"))
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (self.folder / "output").open("ab") as output:
            self.launcher = self.popen(
                [sys.executable, "-m", "lightrl", "launch", *configs, *words],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, stdout=output, stderr=output,
            )  # fmt: skip

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, **options)

    def processes(self) -> dict[str, int]:
        """The processes of the launcher and the current ranks."""
        files = {f"rank {rank}": self.folder / f"rank-{rank}" for rank in range(self.ranks)}
        ranks = {name: int(file.read_text() or 0) for name, file in files.items() if file.exists()}
        return {"launcher": self.launcher.pid, **{name: process for name, process in ranks.items() if process}}

    def losses(self) -> list[dict[str, Any]]:
        file = self.folder / LOSSES
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for(self, num: int) -> None:
        """Waits until this number of iterations is recorded."""
        deadline = time.monotonic() + LONGEST_S
        while len(self.losses()) < num:
            if self.launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{num} iterations were not reached:\n{self.output()}")
            time.sleep(_TICK_S)

    def kill(self, victim: str) -> dict[str, Any]:
        """Kills a process, waits until all ranks of this attempt have ended, and returns what the kill cost."""
        processes = self.processes()
        ranks = [process for name, process in processes.items() if name != "launcher"]
        began, num_before = time.monotonic(), len(self.losses())
        os.kill(processes[victim], signal.SIGKILL)
        while any(_runs(process) for process in ranks):
            if time.monotonic() > began + LONGEST_S:
                raise RuntimeError(f"A rank outlived the kill of {victim}:\n{self.output()}")
            time.sleep(_TICK_S)
        ended_s = time.monotonic() - began
        num_before = max(num_before, len(self.losses()))
        if victim == "launcher":
            self.launcher.wait()
            self.start("--ckpt_path", "last")
        self.wait_for(num_before + 1)
        before, after = (self.losses()[index]["iteration"] for index in (num_before - 1, num_before))
        return {"victim": victim, "ended_s": round(ended_s, 2), "lost_iterations": before + 1 - after}

    def finish(self) -> int:
        return self.launcher.wait(LONGEST_S)

    def output(self) -> str:
        return (self.folder / "output").read_text()[-3000:]


def _runs(process: int) -> bool:
    """Whether a process runs; a zombie, which its guard has not reaped yet, does not."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def all_equal(disturbed: LaunchedRun, reference: LaunchedRun) -> bool:
    """Whether each iteration has the reference's losses every time it was trained, and none is missing."""
    expected = {line["iteration"]: line["losses"] for line in reference.losses()}
    found = disturbed.losses()
    return {line["iteration"] for line in found} == expected.keys() and all(
        line["losses"] == expected[line["iteration"]] for line in found
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    report, source = Report("recovery", ranks=given.ranks, seed=given.seed), random.Random(given.seed)
    iterations = 7 * (given.kills + 1)
    with tempfile.TemporaryDirectory() as folder:
        with LaunchedRun(Path(folder, "reference"), ranks=given.ranks, iterations=iterations) as reference:
            if reference.finish():
                raise RuntimeError(reference.output())
        disturbed = Path(folder, "disturbed")
        with LaunchedRun(disturbed, ranks=given.ranks, iterations=iterations, retries=given.kills) as run:
            for _ in range(given.kills):
                run.wait_for(len(run.losses()) + 2)  # a checkpoint is there
                *_, before, last = run.losses()
                time.sleep(source.uniform(0, 2) * (last["at"] - before["at"]))
                victim = source.choice(sorted(run.processes()))
                report.add("kill", **run.kill(victim), peak_rss_mib=0)
            exit_code = run.finish()
        report.finish(
            ["victim", "ended_s", "lost_iterations"],
            kills=given.kills, exit_code=exit_code, equal_losses=all_equal(run, reference),
            most_lost_iterations=max(row["lost_iterations"] for row in report.rows),
        )  # fmt: skip


if __name__ == "__main__":
    main()
