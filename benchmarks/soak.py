"""Tests a long run with faults: do memory, threads, files and checkpoints stay constant?

    python -m benchmarks.soak [--iterations 10000] [--staleness 0,2] [--max-minutes 55] [--plot benchmarks/soak.png]

The run has a tiny policy, two fake servers, reward workers, and every callback with state. 5 % of the rewards fail:
most raise, some hang until their worker is killed. Every 500 iterations, a server is killed. A row per max_staleness
contains the slopes of lines through the samples after the first tenth; those of memory have standard errors: resident
memory, and allocations by Python and glibc, which show leaks earlier. At the end, non-finite metrics are counted.

The program restarts itself with `MALLOC` for glibc's allocator: one arena, no per-thread caches, separate mappings for
large blocks. In the default of eight arenas per core, the holes between long-lived blocks grow slowly, so resident
memory would say more about glibc than about the run.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import ctypes
import gc
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yarl
from fake_sglang import python_of_fakes
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

import lightrl
from benchmarks.in_fork import in_fork
from benchmarks.report import Report
from lightrl import (
    GRPO,
    LearningCurve,
    Prompt,
    PromptDataModule,
    RLCallback,
    Sampling,
    SGLangEngine,
    StalenessControl,
    TrajectoryLog,
)
from lightrl.concurrency.parent_guard import kill_group
from lightrl.engines import Timeouts
from lightrl.rewards import RewardPart
from lightrl.testing import LETTERS, QUIET, tiny_policy

WARM_FRACTION = 0.1  # of the iterations, before the first that counts
NUM_SAMPLES = 1000  # of a run
HANG_FRACTION, RAISE_FRACTION = 0.002, 0.048  # of the rewards
REWARD_TIMEOUT_S = 0.3
KILL_EVERY = 500  # iterations, a server
NUM_SERVERS = 2
CHECKPOINTS = 20  # of a run
MALLOC = "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=0:glibc.malloc.mmap_threshold=32768"
STRINGS = 200_000  # more than fit into the table that the imports leave
ADDRESSES = 256  # more than yarl's caches hold
SAMPLES = "samples.csv"  # in a run's folder
MEASURED = ("rss_kib", "python_blocks", "glibc_kib", "threads", "open_files", "processes")  # should stay as they are
COLUMNS = ("iteration", "seconds", *MEASURED, "checkpoint_bytes", "killed")
SERVER = ["--vocab-size", str(len(LETTERS)), "--context-length", "64"]


class Letters(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [
            Prompt(f"{split}-{number}", token_ids=[3 + number, 4]) for number in range(8 if split == "train" else 1)
        ]


class Watch(RLCallback):
    """Kills a server at intervals, and samples the resources of the process.

    Args:
        folder: the run's folder, to which samples and checkpoints are written.
        iterations: number of iterations.
        kill_every: iterations between two kills.
        ends_at: time on the monotonic clock, in seconds, at which the run ends at the latest.
    """

    def __init__(self, folder: Path, iterations: int, kill_every: int, ends_at: float) -> None:
        self.folder = folder
        self.every = max(1, iterations // NUM_SAMPLES)
        self.save_every = max(1, iterations // CHECKPOINTS)
        self.kill_every = kill_every
        self.touch_at = int(WARM_FRACTION * iterations / 2)
        self.ends_at = ends_at
        self._num_killed = 0
        self._started_s = time.monotonic()
        self._file = (folder / SAMPLES).open("w", buffering=1)
        self._file.write(",".join(COLUMNS) + "\n")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for server in trainer.engine.fleet.in_state():  # one that dies every minute would be given up
            server.process.policy.stable_s = 1.0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        iteration = trainer.global_step
        if iteration % self.kill_every == 0:
            # Once the last one that was killed is back: a run ends if a sync has no server left.
            while len(trainer.engine.fleet.urls("routable")) < NUM_SERVERS and time.monotonic() < self.ends_at:
                time.sleep(0.1)
            kill_group(trainer.engine.fleet.in_state()[self._num_killed % NUM_SERVERS].process.pid)
            self._num_killed += 1
        if time.monotonic() > self.ends_at:
            trainer.should_stop = True
        if iteration == self.touch_at:
            touch_free_places()
        if iteration % self.every:
            return
        num_bytes: int | str = ""
        if iteration % self.save_every == 0:
            path = self.folder / "soak.ckpt"
            trainer.save_checkpoint(path)
            num_bytes = path.stat().st_size
        gc.collect()
        with contextlib.suppress(AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)  # free blocks between others count as resident otherwise
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        own = Path("/proc/self")
        row = [
            iteration, round(time.monotonic() - self._started_s, 2), pages * os.sysconf("SC_PAGE_SIZE") // 1024,
            sys.getallocatedblocks(), glibc_kib(), _num_entries(own / "task"), _num_entries(own / "fd"),
            _num_children(), num_bytes, self._num_killed,
        ]  # fmt: skip
        self._file.write(",".join(map(str, row)) + "\n")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._file.close()


class MallInfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`: bytes and counts."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def glibc_kib() -> int:
    """Returns the KiB that glibc's allocator has given out; 0 with another allocator."""
    try:
        mallinfo2 = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    mallinfo2.restype = MallInfo
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd) // 1024


def touch_free_places() -> None:
    """Writes once to the memory that Python's allocator has reserved and not used yet.

    A page counts as resident from its first use, so memory that is first used late looks like growth. Other memory that
    this maps is freed immediately.
    """
    for size in range(0, 480, 16):
        _ = [bytes(size) for _ in range(20_000)]
    _ = [(object(), float(number)) for number in range(200_000)]  # smaller than any bytes


def _num_entries(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def _num_children() -> int:
    """Counts this process's children, including zombies."""
    num = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended meanwhile
            num += len((task / "children").read_text().split())
    return num


def fill_bounded_tables() -> None:
    """Fills libraries' tables of bounded size now, so that they do not grow during the run.

    CPython's table of interned strings grows once, by 4 MB, after enough strings have come and gone, even if it holds
    no more of them than before. yarl, used by aiohttp, caches the last 128 parsed addresses: each restart of a server
    adds new ones.
    """
    for number in range(STRINGS):
        sys.intern(f"string {number}")
    for number in range(ADDRESSES):
        address = yarl.URL(f"http://127.0.0.1:{1024 + number}") / "generate"
        _ = yarl.URL(str(address)).raw_path_qs, address.host_subcomponent


def play(folder: Path, max_staleness: int, iterations: int, kill_every: int, ends_at: float) -> None:
    """Runs the training; writes its samples to the folder."""
    fill_bounded_tables()
    module = GRPO(
        tiny_policy(), group_size=4, sampling=Sampling(max_new_tokens=2), lr=1e-5, max_failed_fraction=1.0,
        reward=[RewardPart("benchmarks.faulty_reward.sometimes",
                           arguments={"hang_fraction": HANG_FRACTION, "raise_fraction": RAISE_FRACTION})],
        reward_timeout_s=REWARD_TIMEOUT_S, reward_workers=2,
    )  # fmt: skip
    trainer = lightrl.Trainer(
        **QUIET | {"enable_checkpointing": True, "logger": [CSVLogger(folder), TensorBoardLogger(folder)]},
        default_root_dir=folder, max_steps=iterations, max_epochs=-1, limit_val_batches=0,
        engine=SGLangEngine(
            servers=NUM_SERVERS, sglang_python=python_of_fakes(folder, *SERVER),
            timeouts=Timeouts(request_s=20, startup_s=120),
        ),
        callbacks=[Watch(folder, iterations, kill_every, ends_at), LearningCurve(), TrajectoryLog(),
                   StalenessControl(max_staleness),
                   ModelCheckpoint(folder / "checkpoints", save_last=True, every_n_train_steps=50, save_top_k=1)],
    )  # fmt: skip
    trainer.fit(module, datamodule=Letters(None, batch_size=1))


def read_samples(folder: Path) -> dict[str, np.ndarray]:
    """Returns the columns of a run's samples; NaN for missing values."""
    with (folder / SAMPLES).open() as file:
        rows = list(csv.DictReader(file))
    return {name: np.array([float(row[name] or "nan") for row in rows]) for name in COLUMNS}


def slope(iterations: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Returns the slope per iteration of the least-squares line, and its standard error.

    The residuals are correlated, so neighboring samples count as fewer. The error is that of independent samples times
    sqrt((1 + r) / (1 - r)), where r is their correlation with the previous sample.
    """
    x, y = iterations - iterations.mean(), values - values.mean()
    found = float((x * y).sum() / (x * x).sum())
    rest = y - found * x
    square = float((rest * rest).sum())
    correlation = max(0.0, float((rest[1:] * rest[:-1]).sum()) / square) if square else 0.0
    error = math.sqrt(square / max(1, len(x) - 2) / float((x * x).sum()))
    return found, error * math.sqrt((1 + correlation) / (1 - correlation))


def num_not_finite(folder: Path) -> tuple[int, int]:
    """Counts the numbers in the metrics' CSV, and those that are not finite."""
    num = bad = 0
    for path in folder.rglob("metrics.csv"):
        with path.open() as file:
            for row in csv.DictReader(file):
                values = [float(value) for value in row.values() if value]
                num += len(values)
                bad += sum(not math.isfinite(value) for value in values)
    return num, bad


def summary(folder: Path, max_staleness: int) -> dict[str, Any]:
    """Returns the row of a finished run."""
    samples = read_samples(folder)
    last = int(samples["iteration"][-1])
    counts = samples["iteration"] > WARM_FRACTION * last
    kept = {name: values[counts] for name, values in samples.items()}
    sizes = samples["checkpoint_bytes"][~np.isnan(samples["checkpoint_bytes"])]
    warm_sizes = kept["checkpoint_bytes"][~np.isnan(kept["checkpoint_bytes"])]
    slopes = {name: slope(kept["iteration"], kept[name]) for name in MEASURED}
    num, bad = num_not_finite(folder)
    return {
        "max_staleness": max_staleness, "iterations": last, "seconds": float(samples["seconds"][-1]),
        "rss_slope_kib_per_iteration": round(slopes["rss_kib"][0], 4),
        "rss_slope_error": round(slopes["rss_kib"][1], 4),
        "python_blocks_slope": round(slopes["python_blocks"][0], 4),
        "python_blocks_slope_error": round(slopes["python_blocks"][1], 4),
        "glibc_slope_kib_per_iteration": round(slopes["glibc_kib"][0], 4),
        "glibc_slope_error": round(slopes["glibc_kib"][1], 4),
        "rss_mib_first": round(kept["rss_kib"][0] / 1024, 1), "rss_mib_last": round(kept["rss_kib"][-1] / 1024, 1),
        **{f"{name}_slope": round(slopes[name][0], 6) for name in ("threads", "open_files", "processes")},
        **{f"{name}_last": int(kept[name][-1]) for name in ("threads", "open_files", "processes")},
        "checkpoint_bytes_first": int(warm_sizes[0]) if len(warm_sizes) else None,
        "checkpoint_bytes_last": int(sizes[-1]) if len(sizes) else None,
        "killed_servers": int(samples["killed"][-1]), "numbers_logged": num, "not_finite": bad,
    }  # fmt: skip


def draw(folders: dict[int, Path], picture: Path) -> None:
    """Plots memory, threads and files over the iterations, with a line for each max_staleness."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = {"rss_kib": "resident memory, MiB", "threads": "threads", "open_files": "open files and sockets",
              "processes": "child processes"}  # fmt: skip
    figure = Figure(figsize=(9, 4.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axis, (name, title) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        for max_staleness, folder in folders.items():
            samples = read_samples(folder)
            values = samples[name] / (1024 if name == "rss_kib" else 1)
            axis.plot(samples["iteration"], values, lw=0.8, label=f"max_staleness={max_staleness}")
        axis.set_title(f"{title} over iterations", fontsize=9, loc="left")
        axis.set_ylim(bottom=0)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=7)
    figure.savefig(picture, format="png")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--staleness", default="0,2", help="max_staleness of the runs, which play at the same time")
    parser.add_argument("--kill-every", type=int, default=KILL_EVERY, help="iterations, a server")
    parser.add_argument("--max-minutes", type=float, default=55.0, help="of each run; what is done counts")
    parser.add_argument("--plot", type=Path, help="a PNG file")
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which are kept")
    options = parser.parse_args(argv)
    if "GLIBC_TUNABLES" not in os.environ:  # which are read when a program starts
        words = [sys.executable, "-m", "benchmarks.soak", *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, words, {**os.environ, "GLIBC_TUNABLES": MALLOC})
    numbers = [int(word) for word in options.staleness.split(",")]
    report = Report("soak", hang_fraction=HANG_FRACTION, raise_fraction=RAISE_FRACTION, kill_every=options.kill_every,
                    malloc=os.environ["GLIBC_TUNABLES"])  # fmt: skip
    with tempfile.TemporaryDirectory() as temporary:
        folders = {number: (options.keep or Path(temporary)) / f"staleness-{number}" for number in numbers}
        ends_at = time.monotonic() + 60 * options.max_minutes
        children: dict[int, int] = {}
        for number, folder in folders.items():  # side by side: each waits for its servers most of the time
            folder.mkdir(parents=True)
            settings = (folder, number, options.iterations, options.kill_every, ends_at)
            children[number] = in_fork(lambda settings=settings: play(*settings), folder / "output.txt")
        try:
            codes = {number: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for number, child in children.items()}
        except KeyboardInterrupt:
            for child in children.values():
                os.kill(child, signal.SIGKILL)
            raise
        for number, folder in folders.items():
            if codes[number]:
                sys.stderr.write((folder / "output.txt").read_text()[-5000:])
            report.add("soak", **summary(folder, number), exit_code=codes[number])
        if options.plot:
            draw(folders, options.plot)
    report.finish()
    if any(codes.values()):
        raise SystemExit("A run failed; its output is above.")


if __name__ == "__main__":
    main()
