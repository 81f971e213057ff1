"""What a file of tests leaves behind: it would disturb a later test, which then fails in its place."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked

_END_S = 10.0  # for what is ending
# Started when first needed, for all later tests
_SHARED = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "lightrl_sglang_cpu", "sandbox_guard")


class Leftovers:
    """Non-daemon threads and child processes since it was made, and tasks that wait in a loop that was closed."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = _children()

    def found(self) -> list[str]:
        """Descriptions of what is still there after some seconds."""
        names = [*self._left(self._new_threads), *self._left(self._new_children)]
        return names + [repr(task) for task in _pending_tasks() if task.get_loop().is_closed()]

    def _left(self, names: Callable[[], list[str]]) -> list[str]:
        deadline = time.monotonic() + _END_S
        while (left := names()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _new_threads(self) -> list[str]:
        return [repr(thread) for thread in threading.enumerate() if not thread.daemon and thread not in self._threads]

    def _new_children(self) -> list[str]:
        children = _children() - self._children - {str(forked.server.pid)}
        command_lines = {child: _command_line(child) for child in children}
        return [
            f"process {child}: {line[:300]}"
            for child, line in command_lines.items()
            if line and not any(name in line for name in _SHARED)
        ]


def _children() -> set[str]:
    """Process ids of this process's children; none where the system does not list them."""
    files = Path("/proc/self/task").glob("*/children")
    return {child for file in files for child in _text(file).split()}


def _command_line(process: str) -> str:
    """Empty for one that has ended."""
    return _text(Path("/proc", process, "cmdline")).replace("\0", " ")


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # the thread or process has ended
        return ""


def _pending_tasks() -> list[asyncio.Task[Any]]:
    """Of all loops; asyncio's own list has no public name."""
    tasks: Any = getattr(asyncio.tasks, "_all_tasks", None) or getattr(asyncio.tasks, "_scheduled_tasks", ())
    return [task for task in list(tasks) if not task.done()]
