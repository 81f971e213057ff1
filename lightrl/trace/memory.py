"""MemoryPeaks: the largest memory of this process within a block, the host's and the device's."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

_PROCESS = Path("/proc/self")


class MemoryPeaks:
    """Keeps the peak of each named block, in bytes: `host` (resident), and `cuda` where there is one.

    Linux counts a peak since the last reset, and any process may reset its own. Where it may not, the host's peak is
    that since the process began. Blocks must not be nested.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, int]] = {}  # block → kind → bytes

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            (_PROCESS / "clear_refs").write_text("5")
        if (cuda := _cuda()) is not None:
            cuda.reset_peak_memory_stats()

    def end(self, name: str) -> dict[str, int]:
        """The peaks since `begin`."""
        now = {"host": host_bytes("VmHWM")}
        if (cuda := _cuda()) is not None:
            now["cuda"] = int(cuda.max_memory_allocated())
        before = self.peaks.setdefault(name, now)
        self.peaks[name] = {kind: max(value, before.get(kind, 0)) for kind, value in now.items()}
        return now


def host_bytes(field: str = "VmRSS", process: Path = _PROCESS) -> int:
    """A field of a process's status in /proc, in bytes; 0 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        text = (process / "status").read_text()
        if (start := text.find(f"{field}:")) >= 0:
            return int(text[start:].split(None, 2)[1]) * 1024
    return 0


def child_bytes() -> dict[str, int]:
    """Resident memory of the processes that this one started, servers and reward workers, by name; with their own."""
    totals: dict[str, int] = {}
    waiting = [_PROCESS]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(OSError):
            for children in parent.glob("task/*/children"):
                for pid in children.read_text().split():
                    process = Path("/proc", pid)
                    name = (process / "comm").read_text().strip()
                    totals[name] = totals.get(name, 0) + host_bytes(process=process)
                    waiting.append(process)
    return totals


def _cuda() -> Any:
    """torch.cuda if this process uses it."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None
