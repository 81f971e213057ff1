"""Runs on several ranks, each a script beside its test: starting one, and what its ranks leave for the test to read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).parent


def finished(script: Path, folder: Path, *args: str, timeout_s: float = 170) -> subprocess.CompletedProcess[str]:
    """The script's process after its end, whatever its exit code; Lightning starts the other ranks by itself.

    Args:
        folder: the script's first argument, where it works.
        args: its other arguments.
    """
    for name in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert name not in os.environ, f"{name} of another run is still set"
    paths = [str(script.parent), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(script), str(folder), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def run(script: Path, folder: Path, *args: str, timeout_s: float = 170) -> None:
    """`finished`, of a script that is to succeed."""
    done = finished(script, folder, *args, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-5000:]


def leave(found: Any, folder: Path) -> None:
    """Called by each rank of a script, with what its test compares."""
    folder.mkdir(exist_ok=True)
    torch.save(found, folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}.pt")


def left_by(num_ranks: int, folder: Path) -> list[Any]:
    """What each rank left, by rank."""
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(num_ranks)]
