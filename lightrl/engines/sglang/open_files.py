"""Open files: 4,096 requests in flight need as many sockets, but most systems start a process with 1,024."""

from __future__ import annotations

import errno
import resource
import sys
from pathlib import Path

_KEPT = 128  # for files, and for pipes and sockets of rewards and agents
CONTROL_CONNECTIONS = 16  # to each server


def raise_open_files() -> int:
    """Allows as many open files as the system permits; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def connections_within(limit: int, num_servers: int) -> int:
    """How many requests to each server may be in flight, so that this process stays within its limit of open files."""
    num_open = sum(1 for _ in Path("/dev/fd").iterdir())
    return max(1, (limit - num_open - _KEPT) // max(1, num_servers) - CONTROL_CONNECTIONS)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether this process, or this machine, could not open another file: nothing that a server could help."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
