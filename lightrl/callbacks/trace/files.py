"""TraceFile writes events, `join_traces` joins all processes' files, MemoryPeaks measures the peak memory of blocks.

Files are in Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open: a JSON array with one
event per line and no closing bracket, which the format allows. So a file can be read while the run writes it, and a
killed run keeps all events. In the viewer, each process is a group of rows (`pid` is the rank), and each track is a row
(`tid`), or several rows if events overlap.
"""

from __future__ import annotations

import contextlib
import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from lightrl.trace import Event, trace_files
from lightrl.trace.spans import host_bytes

# Barriers bound the offset of a machine's clock from rank 0's, without assumptions about the network: no rank leaves a
# barrier before the last rank arrives. So any reading after a barrier is later than any reading before it, on any rank,
# and each barrier bounds the offset of two clocks from both sides.

Reading = tuple[int, int]  # this rank's clock before and after a barrier, in ns


def clock_offset_ns(own: Sequence[Reading], first: Sequence[Reading]) -> tuple[int, int]:
    """Computes the offset to subtract from a rank's clock to get rank 0's, and its maximum error, in ns.

    `own` and `first` are readings of this rank and of rank 0 around the same barriers, in order.
    """
    lower = max(before - after_first for (before, _), (_, after_first) in zip(own, first, strict=True))
    upper = min(after - before_first for (_, after), (before_first, _) in zip(own, first, strict=True))
    return (lower + upper) // 2, max(0, upper - lower) // 2


_LANES = 10_000  # maximum number of rows of a track; `tid` is the track's number times this, plus the row
_OPEN = "[\n"


class TraceFile:
    """Writes one process's events to `<folder>/rank-00003.json`, with a marker before each iteration.

    When the file reaches half of `max_bytes`, it is renamed to `rank-00003.before.json`, replacing an earlier one, and
    a new file begins. So only the last iterations of a long run are kept.

    Args:
        folder: the trace's folder; created if missing.
        title: the process's name in the viewer.
        offset_ns: subtracted from the clock.
        max_bytes: maximum size of both files together.
    """

    def __init__(self, folder: Path, rank: int, title: str, *, offset_ns: int = 0, max_bytes: int) -> None:
        self.path = folder / f"rank-{rank:05d}.json"
        self._rank, self._title, self._offset_ns, self._max_bytes = rank, title, offset_ns, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._begin()

    def add(self, iteration: int, start_ns: int, events: Iterable[Event], memory: Mapping[str, float]) -> None:
        """Appends the events of an iteration, after its marker; `memory`, in MiB, is shown as a curve."""
        marker = {"name": f"iteration {iteration}", "ph": "i", "s": "p", "ts": self._us(start_ns), "pid": self._rank}
        lines = [{**marker, "tid": 0, "args": {"iteration": iteration}}]
        for event in sorted(events, key=lambda event: event.start_ns):
            tid = self._row(event, lines)
            line = {"name": event.name, "cat": event.category, "ph": "X", "ts": self._us(event.start_ns)}
            line |= {"dur": (event.end_ns - event.start_ns) / 1000, "pid": self._rank, "tid": tid}
            lines.append({**line, "args": event.args} if event.args else line)
        if memory:
            lines.append({**marker, "name": "memory (MiB)", "ph": "C", "args": dict(memory)})
        self._write(lines)

    def _row(self, event: Event, lines: list[dict[str, object]]) -> int:
        """Returns the `tid` of a free row on the event's track. If all are in use, adds a row, named in `lines`."""
        number = self._numbers.setdefault(event.track, len(self._numbers) + 1)
        rows = self._rows.setdefault(event.track, [])
        overlaps = event.track in OVERLAPPING or event.track.startswith("http")
        if rows and (not overlaps or rows[0][0] <= event.start_ns):
            lane = rows[0][1]
            heapq.heapreplace(rows, (event.end_ns, lane))
            return number * _LANES + lane
        lane = min(len(rows), _LANES - 1)
        heapq.heappush(rows, (event.end_ns, lane))
        tid = number * _LANES + lane
        name = event.track if lane == 0 else f"{event.track} {lane + 1}"
        lines.append({"name": "thread_name", "ph": "M", "pid": self._rank, "tid": tid, "args": {"name": name}})
        return tid

    def _us(self, time_ns: int) -> float:
        return (time_ns - self._offset_ns) / 1000

    def _begin(self) -> None:
        self._numbers: dict[str, int] = {}  # track → number
        self._rows: dict[str, list[tuple[int, int]]] = {}  # track → heap of (end of last event, row number)
        self._size = 0
        self.path.write_text(_OPEN, encoding="utf-8")
        head = {"ph": "M", "pid": self._rank, "tid": 0}
        self._write([
            {**head, "name": "process_name", "args": {"name": self._title}},
            {**head, "name": "process_sort_index", "args": {"sort_index": self._rank}},
        ])  # fmt: skip

    def _write(self, lines: Sequence[Mapping[str, object]]) -> None:
        encode = json.JSONEncoder(separators=(",", ":"), default=str).encode
        text = "".join(f"{encode(line)},\n" for line in lines)
        with self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        self._size += len(text)
        if self._size > self._max_bytes // 2:
            self.path.replace(self.path.with_suffix(".before.json"))
            self._begin()


OVERLAPPING = frozenset({"generations", "rewards"})  # servers' tracks also overlap; their names are addresses


def join_traces(folder: Path) -> Path | None:
    """Writes the events from all processes, on one clock, to `trace.json`. Returns None if there are no events."""
    files = trace_files(folder)
    if not files:
        return None
    target = folder / "trace.json"
    unfinished = target.with_suffix(".tmp")
    with unfinished.open("w", encoding="utf-8") as out:
        out.write(_OPEN)
        is_first = True
        for path in files:
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    event = line.rstrip().removesuffix(",")
                    if not event.startswith("{") or not event.endswith("}"):
                        continue  # the opening bracket, or a line that a killed process did not finish
                    out.write(event if is_first else f",\n{event}")
                    is_first = False
        out.write("\n]\n")
    unfinished.replace(target)
    return target


class MemoryPeaks:
    """Records the peak memory of each named block, in bytes: `host` (resident), and `cuda` if there is a GPU.

    Linux records a process's peak since the last reset, which the process can usually do itself. If it cannot, `host`
    is the peak since the process started. Blocks must not be nested.
    """

    def __init__(self) -> None:
        self.peaks: dict[str, dict[str, int]] = {}  # block → kind → bytes

    def begin(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats()

    def end(self, name: str) -> dict[str, int]:
        """Returns the peaks since `begin`, by kind."""
        now = {"host": host_bytes("VmHWM")}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            now["cuda"] = int(torch.cuda.max_memory_allocated())
        before = self.peaks.setdefault(name, now)
        self.peaks[name] = {kind: max(value, before.get(kind, 0)) for kind, value in now.items()}
        return now
