"""Marks of processes: who made a file or folder, and whether that process still runs.

A mark is `<process id>-<start time>`, as process ids are used again. The start time is the kernel's, in clock ticks
since boot, and 0 on systems without /proc.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path


def own_mark() -> str:
    """The mark of this process; not cached, since a fork is another one."""
    return f"{os.getpid()}-{_started(os.getpid()) or 0}"


def may_run(mark: str) -> bool:
    """False if the process with this mark on this machine is surely gone; a text that is no mark may be anything."""
    process, _, started = mark.partition("-")
    if not process.isdigit() or not started.isdigit():
        return True
    if int(started):
        return _started(int(process)) == int(started)
    try:
        os.kill(int(process), 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def kill_owner(mark: str) -> None:
    """SIGKILL for the process that has this mark on this machine, if it runs."""
    if mark and may_run(mark):
        with contextlib.suppress(OSError):
            os.kill(int(mark.partition("-")[0]), signal.SIGKILL)


def _started(process: int) -> int | None:
    """Clock ticks from boot to the start of a process; None if it is gone, is a zombie, or there is no /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])
