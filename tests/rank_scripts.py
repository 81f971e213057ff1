"""Runs on several ranks, each a script beside its test: starting one, and what its ranks leave for the test to read."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
import torch.distributed as dist

from lightrl.columns import column_of
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.experience import Experience, is_on_host

TESTS = Path(__file__).parent

# Bound on the difference between numbers of several ranks and of one process, relative to a tensor's largest number:
# 170 roundings of float32, 2**-24 each. Sums of some hundred terms in another order are some ten apart; a token that is
# counted twice makes a difference of 1e-3. After several updates it holds for optimizers that do not divide rounding by
# itself: SGD, or Adam with an epsilon as large as its lr.
ROUNDING = 1e-5


def finished(script, folder, *args, real=False):
    """The script's process after its end, whatever its exit code; Lightning starts the other ranks by itself.

    Args:
        folder: the script's first argument, where it works.
        args: its other arguments.
        real: its processes are fresh ones, as a user's are.
    """
    for name in ("LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert name not in os.environ, f"{name} of another run is still set"
    paths = [str(script.parent), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    return (subprocess.run if real else partial(forked.run, children_fork=True))(
        [sys.executable, str(script), str(folder), *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def run(script: Path, folder: Path, *args: str) -> None:
    """`finished`, of a script that is to succeed."""
    done = finished(script, folder, *args)
    assert done.returncode == 0, done.stderr[-5000:]


def leave(found: Any, folder: Path) -> None:
    """Called by each rank of a script, with what its test compares."""
    folder.mkdir(exist_ok=True)
    torch.save(found, folder / f"rank-{os.environ.get('LOCAL_RANK', '0')}.pt")


def gathered_tensors(experience: Experience) -> dict[str, torch.Tensor]:
    """The fields of all trajectories, from the ranks that answer for them; collective, after `fit` too."""
    rows, num, width = experience.local_rows, len(experience), int(experience.lengths.max())
    found = {}
    for name, value in experience.local.tensors().items():
        if is_on_host(name):  # one byte after another, of all rows
            continue
        column = column_of(name)
        fill = {"weight_versions": -1}.get(name, 0) if column is None else column.fill  # of what shorter rows lack
        number = value.int() if value.dtype == torch.bool else value
        whole = number.new_zeros(num, *([width, *value.shape[2:]] if value.dim() > 1 else []))
        whole[(rows, slice(value.shape[1])) if value.dim() > 1 else rows] = number - fill
        found[name] = (experience.total(whole) + fill).to(value.dtype)
    return found


def run_once(script: Path, factory: pytest.TempPathFactory, *args: str) -> Path:
    """The folder of one `run` for all of pytest's workers, which may share a file's tests."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "-".join([script.stem, *args])
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run(script, folder, *args)
            (folder / "done").touch()
    return folder


def left_by(num_ranks: int, folder: Path) -> list[Any]:
    """Loads what each rank left, by rank."""
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(num_ranks)]


def fork_runs(sizes: Sequence[int], on_rank: Callable[[int], None], *, ends_others: bool = True) -> int:
    """Runs of so many ranks at once, each rank a child that has imported all already; gives the script's exit code.

    Args:
        sizes: numbers of ranks, one run each.
        on_rank: called on each rank, with the number of its run's ranks.
        ends_others: when a rank fails; otherwise they must end by themselves.
    """
    children, ports = [], []
    for size in sizes:
        ports.append(HeldPort("127.0.0.1"))  # of rank 0's store, which comes seconds later
        children += [_fork(size, rank, ports[-1].number, on_rank) for rank in range(size)]
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        failed = failed or status != 0
        if status and ends_others:
            for other in children:
                os.kill(other, 9)
    for port in ports:
        port.close()
    return int(failed)


def print_compared(compare: Callable[[Any], dict[str, Any]], cases: Iterable[Any]) -> None:
    """On each rank: what the ranks together find of each case, which rank 0 prints as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in cases:
        found = compare(case)
        if dist.get_rank() == 0:
            os.write(1, (json.dumps(found) + "\n").encode())  # a line at once: several worlds print
    dist.barrier()
    dist.destroy_process_group()


def _fork(size: int, rank: int, port: int, on_rank: Callable[[int], None]) -> int:
    """The process id of a child that runs one rank and ends."""
    child = os.fork()
    if child:
        return child
    forked.end_with_parent()
    code = 0
    try:
        if size > 1:
            names = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="test")
        on_rank(size)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)
