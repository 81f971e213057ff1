"""A worker process of RewardPool: imports a reward function and calls it on the trajectories that the pool sends.

Both directions carry one JSON value per line; a batch of trajectories follows the line with their lengths in bytes.

    pool ─► worker   {"parts": [{"path": ...}, ...], "timeout_s": ..., "memory_limit_mib": ...}, then batches:
                     [number of bytes, ...], then the trajectories (`Trajectory.to_bytes`)
    worker ─► pool   {"runs_together": ...} or {"problem": ...}, then one reply per finished trajectory; `index`
                     counts trajectories from the start:
                     {"index": 0, "reward": 1.0, "metrics": {...}, "rewards": null, "extracted": null}
                     or {"index": 0, "error": ..., "reason": ...}

The function's standard input is /dev/null; the pool logs its output. The process does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
from collections.abc import Mapping

from lightrl.checks.user_code import function_of
from lightrl.concurrency.child_process import connect_to_parent
from lightrl.errors import RewardError
from lightrl.rewards.parts import RewardPart, bound, summed
from lightrl.rewards.reward_result import Runner
from lightrl.trajectory import Trajectory


def main() -> None:
    """Serves the pool until it closes the socket or dies."""
    pool = connect_to_parent()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    with pool.makefile("rb") as lines:
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
            _reply(pool, {"problem": str(error)})
            return
        runner = Runner(function, name=" + ".join(part.path for part in parts), timeout_s=settings["timeout_s"])
        _reply(pool, {"runs_together": runner.runs_together})
        first = 0
        for line in lines:
            batch = [lines.read(num_bytes) for num_bytes in json.loads(line)]
            for index, outcome in runner.outcomes(Trajectory.from_bytes(data).with_lists() for data in batch):
                record = vars(outcome)
                if isinstance(outcome, RewardError):
                    record = {"error": str(outcome), "reason": outcome.reason}
                _reply(pool, {"index": first + index, **record})
            first += len(batch)


def _reply(pool: socket.socket, record: Mapping[str, object]) -> None:
    pool.sendall(json.dumps(record).encode() + b"\n")
