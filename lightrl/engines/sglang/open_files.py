"""raise_open_files: 4,096 requests in flight are as many open sockets; most systems start a process with 1,024."""

from __future__ import annotations

import resource


def raise_open_files() -> int:
    """As many open files as the system lets this process have; the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
