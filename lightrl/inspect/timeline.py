"""The events of one iteration from the trace of all ranks, and the problems of servers, rewards and ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from lightrl.inspect.run_folder import Json, Run
from lightrl.trace import trace_files

MAX_EVENTS = 20_000  # per iteration, the longest ones
MAX_PROBLEMS = 5_000  # the last ones

_MARK = re.compile(rb'^\{"name":"iteration (\d+)","ph":"i"', re.M)
_CHUNK = 2**22


class Timeline:
    """Knows where in the trace's files each iteration begins; reads on where a file has grown."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trace"
        self._marks: dict[Path, list[tuple[int, int]]] = {}  # file → iteration and its first byte, in order
        self._scanned: dict[Path, tuple[int, int]] = {}  # file → inode, and bytes that were searched

    def iterations(self) -> list[int]:
        """List the traced iterations."""
        for path in trace_files(self._folder):
            self._scan(path)
        return sorted({iteration for marks in self._marks.values() for iteration, _ in marks})

    def summary(self) -> Json | None:
        """Read what Trace has written at the end of the run."""
        try:
            summary: Json = json.loads((self._folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return summary

    def events(self, iteration: int) -> Json:
        """Rows by rank and track, and events as [row, name, category, start in ms, duration in ms, args]."""
        self.iterations()
        names: dict[tuple[int, int], str] = {}
        events: list[Json] = []
        memory: dict[str, float] = {}
        for path, marks in self._marks.items():
            for event in self._lines(path, marks, iteration):
                if event["ph"] == "X":
                    events.append(event)
                elif event["ph"] == "C":
                    memory |= {f"rank {event['pid']}: {name}": value for name, value in event["args"].items()}
            names |= self._names(path)
        events = sorted(sorted(events, key=lambda one: -one["dur"])[:MAX_EVENTS], key=lambda one: one["ts"])
        start = min((event["ts"] for event in events), default=0.0)
        keys = sorted({(event["pid"], event["tid"]) for event in events})
        rows = {key: number for number, key in enumerate(keys)}
        return {
            "iteration": iteration,
            "rows": [{"rank": pid, "track": names.get((pid, tid), str(tid))} for pid, tid in keys],
            "events": [
                [
                    rows[event["pid"], event["tid"]],
                    event["name"],
                    event["cat"],
                    round((event["ts"] - start) / 1000, 4),
                    round(event["dur"] / 1000, 4),
                    event.get("args", {}),
                ]
                for event in events
            ],
            "memory": memory,
        }

    def _scan(self, path: Path) -> None:
        stat = path.stat()
        inode, done = self._scanned.get(path, (stat.st_ino, 0))
        if inode != stat.st_ino or stat.st_size < done:
            done = 0
        if done == 0:
            self._marks[path] = []
        with path.open("rb") as file:
            while done < stat.st_size:
                file.seek(done)
                content = file.read(_CHUNK)
                end = content.rfind(b"\n") + 1
                if end == 0:
                    break
                marks = self._marks[path]
                marks += [(int(match[1]), done + match.start()) for match in _MARK.finditer(content, 0, end)]
                done += end
        self._scanned[path] = (stat.st_ino, done)

    def _lines(self, path: Path, marks: list[tuple[int, int]], iteration: int) -> Iterator[Json]:
        for index, (number, start) in enumerate(marks):
            if number != iteration:
                continue
            end = marks[index + 1][1] if index + 1 < len(marks) else self._scanned[path][1]
            with path.open("rb") as file:
                file.seek(start)
                for line in file.read(end - start).splitlines():
                    yield json.loads(line.rstrip(b","))

    def _names(self, path: Path) -> dict[tuple[int, int], str]:
        """Names of the tracks; each is named once, in the iteration that it first occurs in."""
        with path.open("rb") as file:
            lines = [line for line in file if line.startswith(b'{"name":"thread_name"')]
        named = [json.loads(line.rstrip(b",\n")) for line in lines]
        return {(one["pid"], one["tid"]): one["args"]["name"] for one in named}


def problems(run: Run) -> list[Json]:
    """List lost servers, then warnings, errors and drops of all ranks and the traceback, the newest first."""
    status = run.status()
    stamp = {"at": status.get("at", 0.0), "iteration": status.get("iteration"), "source": "server"}
    lost = [
        {**stamp, "kind": str(one.get("state")), "message": f"{one.get('url')}: {one.get('reason') or 'not routable'}"}
        for one in status.get("servers", ())
        if one.get("state") != "routable"
    ]
    reported: list[Json] = []
    for path in sorted((run.folder / "problems").glob("rank-*.jsonl")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                reported.append(json.loads(line))
            except ValueError:
                continue  # in the making
    traceback = run.folder / "traceback.txt"
    if traceback.exists():
        text = traceback.read_text(encoding="utf-8", errors="replace")
        stamp = {"at": traceback.stat().st_mtime, "rank": 0, "source": "trainer"}
        reported.append({**stamp, "kind": "traceback", "message": text[-8_000:]})
    return [*lost, *sorted(reported, key=lambda one: -one.get("at", 0.0))[:MAX_PROBLEMS]]
