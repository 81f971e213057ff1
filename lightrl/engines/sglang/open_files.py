"""raise_open_files: 4,096 requests in flight need as many sockets, but most systems start a process with 1,024."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """Allows as many open files as the system permits; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
