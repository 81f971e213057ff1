"""TraceFile: spans as events of Chrome's trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

A file is a JSON array with one event per line, without its end, which the format allows: it can be read while the run
writes it, and a killed run leaves all it did. Each process is a row group (`pid` is its rank), each track of it a row
(`tid`), or several where its events overlap.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lightrl.trace.spans import Event

_LANES = 10_000  # at most in a track; `tid` is the number of the track times this, plus the lane
_OPEN = "[\n"


class TraceFile:
    """The events of one process, `<folder>/rank-00003.json`, with a marker before each iteration.

    When it has half of `max_bytes` it becomes `rank-00003.before.json`, in place of an earlier one, and begins again:
    the last iterations of a long run are there.

    Args:
        folder: of the trace; made.
        rank: of this process.
        title: of the process in the viewer.
        offset_ns: is subtracted from the clock.
        max_bytes: of both files together.
    """

    def __init__(self, folder: Path, rank: int, title: str, *, offset_ns: int = 0, max_bytes: int) -> None:
        self.path = folder / f"rank-{rank:05d}.json"
        self._rank, self._title, self._offset_ns, self._max_bytes = rank, title, offset_ns, max_bytes
        folder.mkdir(parents=True, exist_ok=True)
        self._begin()

    def add(self, iteration: int, start_ns: int, events: Iterable[Event], memory: Mapping[str, float]) -> None:
        """Appends an iteration, the marker first; `memory` becomes a curve, in MiB."""
        marker = {"name": f"iteration {iteration}", "ph": "i", "s": "p", "ts": self._us(start_ns), "pid": self._rank}
        lines = [{**marker, "tid": 0, "args": {"iteration": iteration}}]
        for event in sorted(events, key=lambda one: one.start_ns):
            tid = self._row(event, lines)
            line = {"name": event.name, "cat": event.category, "ph": "X", "ts": self._us(event.start_ns)}
            line |= {"dur": (event.end_ns - event.start_ns) / 1000, "pid": self._rank, "tid": tid}
            lines.append({**line, "args": event.args} if event.args else line)
        if memory:
            lines.append({**marker, "name": "memory (MiB)", "ph": "C", "args": dict(memory)})
        self._write(lines)

    def _row(self, event: Event, lines: list[dict[str, object]]) -> int:
        """The `tid` of a row of the track that is free when the event starts; names a new one."""
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
        self._rows: dict[str, list[tuple[int, int]]] = {}  # track → heap of its rows: end of the last event, lane
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


OVERLAPPING = frozenset({"generations", "rewards"})  # tracks besides those of servers, whose names are addresses


def trace_files(folder: Path) -> list[Path]:
    """The files of all processes, each one's earlier half first."""
    return sorted(folder.glob("rank-*.json"), key=lambda path: (path.name[:10], "before" not in path.name))


def join_traces(folder: Path) -> Path | None:
    """Writes the events of all processes, which are on one clock, as `trace.json`; None if there are none."""
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
                        continue  # the array's beginning; a line that a killed process did not finish
                    out.write(event if is_first else f",\n{event}")
                    is_first = False
        out.write("\n]\n")
    unfinished.replace(target)
    return target
