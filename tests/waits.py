"""What a test waits for instead of a while: however slow the machine is, a test then acts when the moment is there."""

import asyncio
import contextlib
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from fake_sglang.process import FakeServerProcess

from lightrl.engines import Timeouts

LONGEST_S = 600.0  # of what takes milliseconds
NUM_TOKENS = 2000  # at SLOWLY more than a minute, so a test that goes on from `until_written` is not late
SLOWLY = {"seconds_per_token": 0.05}  # of a fake server; `pace(0)` lets it write the rest at once


@dataclass(frozen=True)
class Deadlines(Timeouts):
    """Timeouts of which a test sets each by itself."""

    hang_s: float = 30.0
    probe_interval_s: float = 0.1
    server_wait_s: float = 900.0
    generate_s: float = 900.0


async def until(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.01)


def comes_true(is_true: Callable[[], object], longest_s: float = LONGEST_S, *, pause_s: float = 0.02) -> bool:
    """Whether it is true within a time that only a fault takes."""
    deadline = time.monotonic() + longest_s
    while not is_true() and time.monotonic() < deadline:
        time.sleep(pause_s)
    return bool(is_true())


async def until_written(server: FakeServerProcess, num_requests: int = 1) -> None:
    """Waits until so many requests run, each with a token at least."""
    await until(lambda: sum(count > 0 for count in server.stats()["written"]) == num_requests)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """Inside, this process can open no further file or socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with Path(os.devnull).open("rb") as lowest:
        limit = lowest.fileno()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
