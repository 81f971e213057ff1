"""A worker process of RewardPool: imports a reward function and calls it on the trajectories that the pool sends.

Both directions carry one JSON value per line; a batch of trajectories follows the line with their lengths in bytes.

    pool ─► worker   {"parts": [{"path": ...}, ...], "timeout_s": ..., "memory_limit_mib": ...}, then batches:
                     [number of bytes, ...], then the trajectories (`Trajectory.to_bytes`)
    worker ─► pool   {"runs_together": ...} or {"problem": ...}, then one reply per finished trajectory; `index`
                     counts them from the start:
                     {"index": 0, "reward": 1.0, "metrics": {...}, "rewards": null, "extracted": null}
                     or {"index": 0, "error": ..., "reason": ...}

The child is two processes. The worker runs the function and leads a process group; its parent, the guardian, runs no
user code and kills all its descendants when the pool requests it, closes the pipe or dies, even if C code blocks the
worker's interpreter. Neither imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from typing import NoReturn

from lightrl.checks.user_code import function_of
from lightrl.concurrency import parent_guard
from lightrl.errors import RewardError
from lightrl.rewards.parts import RewardPart, bound, summed
from lightrl.rewards.reward_result import Runner
from lightrl.trajectory import Trajectory

_GRACE_S = 1.0  # for a sandbox to remove its program after the worker has ended
_SIGNALS = {signal.SIGTERM, signal.SIGUSR1}  # from the pool: end; show the stack


def main() -> None:
    """Serves the pool whose process id is `sys.argv[1]` until it closes the pipe or dies."""
    parent = int(sys.argv[1])
    del sys.argv[1:]
    requests, replies = _take_over_pipes()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # a guardian must not die without its worker
    parent_guard.adopt_orphans()
    worker = os.fork()  # before any thread starts
    if worker:
        os.close(replies)  # so that the pool sees the pipe close when the worker ends
        _guard(worker, parent, requests)
    os.setpgid(0, 0)
    parent_guard.die_with_parent()
    faulthandler.enable()  # shows where C code crashed
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # shows the pool where a call hangs
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    with os.fdopen(requests, "rb") as lines:
        settings = json.loads(lines.readline())
        parts = [RewardPart(**part) for part in settings["parts"]]
        if (limit_mib := settings["memory_limit_mib"]) is not None:
            # Bounds data (private writable memory) of this process and each of its children, but not address space,
            # since libraries reserve tens of GiB that they never touch.
            with contextlib.suppress(OSError, ValueError):  # a lower hard limit is already set
                resource.setrlimit(resource.RLIMIT_DATA, (limit_mib << 20, limit_mib << 20))
        try:
            function = summed(parts, [bound(part, function_of(part.path, "reward")) for part in parts])
        except ValueError as error:
            _reply(replies, {"problem": str(error)})
            return
        runner = Runner(function, name=" + ".join(part.path for part in parts), timeout_s=settings["timeout_s"])
        _reply(replies, {"runs_together": runner.runs_together})
        first = 0
        for line in lines:
            batch = [lines.read(num_bytes) for num_bytes in json.loads(line)]
            for index, outcome in runner.outcomes(Trajectory.from_bytes(data).with_lists() for data in batch):
                record = vars(outcome)
                if isinstance(outcome, RewardError):
                    record = {"error": str(outcome), "reason": outcome.reason}
                _reply(replies, {"index": first + index, **record})
            first += len(batch)


def _take_over_pipes() -> tuple[int, int]:
    """Moves the two pipes to new descriptors; the function reads from /dev/null and prints to stderr instead."""
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return requests, replies


def _guard(worker: int, parent: int, requests: int) -> NoReturn:
    """Waits until the worker ends, or the pool sends SIGTERM, closes the pipe or dies; then kills all descendants."""
    with contextlib.suppress(PermissionError, ProcessLookupError):  # the worker did it itself, or has ended
        os.setpgid(worker, worker)
    mirror = threading.Thread(target=_end_like, args=(worker,), daemon=True)
    mirror.start()
    signal.signal(signal.SIGTERM, lambda *_: parent_guard.kill_group(worker))
    signal.signal(signal.SIGUSR1, lambda *_: _show_stack(worker))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    parent_guard.wait_for_parent(parent, requests, until=lambda: parent_guard.reap_orphans(worker))
    parent_guard.kill_group(worker)
    mirror.join()
    raise AssertionError("the mirror ends this process")


def _show_stack(worker: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, and its descendants end within the grace period
        os.kill(worker, signal.SIGUSR1)


def _end_like(worker: int) -> NoReturn:
    """Waits until the worker ends, then ends this process with the same code or signal."""
    # WNOWAIT: no other process can get the number of its group until it is reaped.
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    parent_guard.kill_group(worker)
    code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    parent_guard.kill_descendants(_GRACE_S)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one core dump is enough
        signal.pthread_kill(threading.get_ident(), -code)  # this thread, so that it does not return
    os._exit(code if code >= 0 else 128 - code)


def _reply(replies: int, record: Mapping[str, object]) -> None:
    left = memoryview(json.dumps(record).encode() + b"\n")
    while left:
        left = left[os.write(replies, left) :]
