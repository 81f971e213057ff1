"""Rewards that fail on demand, for `benchmarks.kill_run` and `benchmarks.soak`; without torch."""

from __future__ import annotations

import os
import time
import zlib
from pathlib import Path

from lightrl.trajectory import Trajectory

HOLD, HELD, PID = "hold-reward", "reward-is-held", "reward-worker"  # files of a run's folder
LONGEST_S = 60.0


def even_share(trajectory: Trajectory) -> float:
    """Returns the share of even tokens."""
    return sum(token % 2 == 0 for token in trajectory.completion_ids) / max(1, len(trajectory.completion_ids))


def held(trajectory: Trajectory, folder: str) -> float:
    """Waits on sample 1 while the file HOLD exists, and writes HELD; PID contains the first worker's process id."""
    here = Path(folder)
    if not (here / PID).exists():
        (here / PID).write_text(str(os.getpid()))
    deadline = time.monotonic() + LONGEST_S
    while trajectory.sample == 1 and (here / HOLD).exists() and time.monotonic() < deadline:
        (here / HELD).touch()
        time.sleep(0.01)
    return even_share(trajectory)


def sometimes(trajectory: Trajectory, hang_fraction: float, raise_fraction: float) -> float:
    """Hangs and raises for these fractions of the trajectories, the same ones each time."""
    draw = zlib.crc32(f"{trajectory.group_id}/{trajectory.sample}".encode()) / 2**32
    if draw < hang_fraction:
        time.sleep(LONGEST_S)
    if draw < hang_fraction + raise_fraction:
        raise ValueError("this one fails")
    return even_share(trajectory)
