"""A reward function whose process imports no torch."""

from __future__ import annotations

from pathlib import Path

import psutil

from benchmarks.grpo_vs_trl import odd_fraction
from lightrl.trajectory import Trajectory


def noted(trajectory: Trajectory, folder: str) -> float:
    """The benchmark's reward; notes what started the guardian of this process."""
    starter = psutil.Process().parents()[1].cmdline()[0]
    with (Path(folder) / "starters").open("a") as file:
        file.write(f"{starter.partition('.')[0]}\n")
    return odd_fraction(trajectory)
