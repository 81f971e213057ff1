"""Strategies of a run that does not start, and the scripts of this folder: what its tests share."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import forked
import torch
from torch import Tensor

from lightrl import Experience, FSDP2Strategy

Strategy = TypeVar("Strategy", bound=FSDP2Strategy)


def on_cpus(strategy: Strategy, num_ranks: int = 1) -> Strategy:
    """The strategy as a Trainer with so many CPU processes has it."""
    strategy.parallel_devices = [torch.device("cpu")] * num_ranks
    return strategy


def results_of(script: str, cases: list[Any]) -> list[dict[str, Any]]:
    """What a script prints for each case; all its processes are started at once."""
    command = [sys.executable, str(Path(__file__).with_name(script)), json.dumps(cases)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = forked.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def with_branches(experience: Experience, num_branches: int | Sequence[int] = 3) -> Experience:
    """Each trajectory as a tree: its last half follows its first `num_branches` times, each time with other tokens."""
    counts = experience.lengths.tolist()
    order, gaps = [], []
    numbers = [num_branches] * len(counts) if isinstance(num_branches, int) else num_branches
    for count, num in zip(counts, numbers, strict=True):
        half = max(1, count // 2)
        order.append([*range(half), *[*range(half, count)] * num])
        gap = [0] * len(order[-1])
        for branch in range(1, num):
            gap[half + branch * (count - half)] = branch * (count - half)
        gaps.append(gap)
    width = max(map(len, order))
    lengths = torch.tensor([*map(len, order)])
    index = torch.tensor([[*places, *[0] * (width - len(places))] for places in order])
    is_token = torch.arange(width) < lengths[:, None]
    tensors: dict[str, Tensor] = {"lengths": lengths}
    for name, value in experience.tensors().items():
        if value.dim() >= 2:
            picked = value[torch.arange(len(order))[:, None], index]
            shape = (...,) + (None,) * (value.dim() - 2)
            tensors[name] = torch.where(is_token[shape], picked, picked.new_full((), -1 if "versions" in name else 0))
    branches = torch.tensor([[*gap, *[0] * (width - len(gap))] for gap in gaps]).ne(0).cumsum(1)
    tensors["token_ids"] = torch.where(is_token, (tensors["token_ids"] + branches) % 17, 0)
    tensors["gaps"] = torch.tensor([[*gap, *[0] * (width - len(gap))] for gap in gaps])
    return Experience.of_tensors({**experience.tensors(), **tensors})
