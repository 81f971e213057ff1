"""Strategies of a run that does not start, and the scripts of this folder: what its tests share."""

import json
import os
import sys
from pathlib import Path
from typing import Any, TypeVar

import forked
import torch

from lightrl import FSDP2Strategy

Strategy = TypeVar("Strategy", bound=FSDP2Strategy)


def on_cpus(strategy: Strategy, num_ranks: int = 1) -> Strategy:
    """The strategy as a Trainer with so many CPU processes has it."""
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    return strategy


def results_of(script: str, cases: list[list[Any]]) -> list[dict[str, Any]]:
    """What a script prints for each case; all its processes are started at once."""
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
