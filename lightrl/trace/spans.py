"""Spans: `span` measures a block, and records it while a trace is open. Also reads the memory of process and host.

A span reads the clock twice and, while a trace is open, appends an event, in less than a microsecond. It may contain an
`await`. Times are `time.perf_counter_ns`, which is one clock for all processes on a machine.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple


class Event(NamedTuple):
    """A finished block."""

    name: str
    category: str  # phase, step, generate, reward, data, loader, score, update, collective, sync, wait, server
    track: str  # the event's row in the viewer; events may overlap, except on a thread's track
    start_ns: int
    end_ns: int
    args: dict[str, object]


class Tape:
    """Collects the events in this process, from all threads, until `take` removes them."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_recording = True

    def take(self) -> list[Event]:
        events = self.events[:]  # other threads may append while this runs
        del self.events[: len(events)]
        return events


_tape: Tape | None = None


def set_tape(tape: Tape | None) -> None:
    """Records all spans on this tape from now on; None stops recording."""
    global _tape
    _tape = tape


def record(name: str, category: str, track: str, start_ns: int, **args: object) -> None:
    """Records an event that ends now and does not correspond to a block of code."""
    tape = _tape
    if tape is not None and tape.is_recording:
        tape.events.append(Event(name, category, track, start_ns, time.perf_counter_ns(), args))


class span:
    """Measures a block: `with span("reference", "score", tokens=512) as measured:`; then `measured.seconds`.

    Args:
        name, category: name and category of the event.
        track: the event's row in the viewer; if empty, the thread's row. Overlapping blocks need separate tracks.
        args: shown with the event; the block may add more to `measured.args`.
    """

    __slots__ = ("args", "category", "end_ns", "name", "start_ns", "track")

    def __init__(self, name: str, category: str, track: str = "", **args: object) -> None:
        self.name, self.category, self.track, self.args = name, category, track, args
        self.start_ns = self.end_ns = 0

    def __enter__(self) -> span:
        self.start_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end_ns = time.perf_counter_ns()
        tape = _tape
        if tape is None or not tape.is_recording:
            return
        if error is not None:
            self.args["error"] = type(error).__name__
        track = self.track or thread_track()
        tape.events.append(Event(self.name, self.category, track, self.start_ns, self.end_ns, self.args))

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def thread_track() -> str:
    """Returns the track of this thread, `trainer` for the main thread."""
    thread = threading.current_thread()
    return "trainer" if thread is threading.main_thread() else thread.name


def in_microbatch_spans(
    loss: Callable[..., Any], backward: Callable[[Any], None]
) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """Wraps `loss` and `backward` to record an event per forward and backward; without a trace, returns them unchanged.

    A forward lasts from the thread's last backward to the loss. On a GPU, this measures only the launch of the work.
    """
    if _tape is None or not _tape.is_recording:
        return loss, backward
    first_start_ns = time.perf_counter_ns()
    backward_ends_ns: dict[int, int] = {}  # thread → end of its last backward

    def traced_loss(experience: Any, outputs: Any) -> Any:
        start_ns = backward_ends_ns.get(threading.get_ident(), first_start_ns)
        record("forward", "update", thread_track(), start_ns, trajectories=len(experience))
        with span("loss", "update"):
            return loss(experience, outputs)

    def traced_backward(value: Any) -> None:
        with span("backward", "update") as measured:
            backward(value)
        backward_ends_ns[threading.get_ident()] = measured.end_ns

    return traced_loss, traced_backward


def trace_files(folder: Path) -> list[Path]:
    """Returns the trace files of all processes; a process's `.before` file comes before its other file."""
    return sorted(folder.glob("rank-*.json"), key=lambda path: (path.name[:10], "before" not in path.name))


_PROCESS = Path("/proc/self")


def host_bytes(field: str = "VmRSS", process: Path = _PROCESS) -> int:
    """Returns a field of a process's status in /proc, in bytes; 0 if the field is missing."""
    with contextlib.suppress(OSError, ValueError):
        text = (process / "status").read_text(errors="replace")  # a process's name may have any bytes
        if (start := text.find(f"{field}:")) >= 0:
            return int(text[start:].split(None, 2)[1]) * 1024
    return 0


def host_memory() -> tuple[int, int]:
    """Returns available and total bytes of the host's memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total
    kib = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    return kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024


def child_bytes() -> dict[str, int]:
    """Returns the resident memory of all descendant processes (servers, reward workers), by name."""
    totals: dict[str, int] = {}
    pending = [_PROCESS]
    while pending:
        parent = pending.pop()
        with contextlib.suppress(OSError):
            for children in parent.glob("task/*/children"):
                for pid in children.read_text().split():
                    process = Path("/proc", pid)
                    name = repr((process / "comm").read_text(errors="replace").strip())[1:-1]  # may contain any bytes
                    totals[name] = totals.get(name, 0) + host_bytes(process=process)
                    pending.append(process)
    return totals
