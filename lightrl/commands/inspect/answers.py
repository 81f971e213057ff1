"""Answers the page's questions with plain JSON, in the same way for the server and for an exported file.

The questions are about curves, trajectories token by token, images, an iteration's traced events, and problems.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import json
import math
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrl.checks.printable import count_text
from lightrl.commands.inspect.index import TrajectoryIndex, finite_number
from lightrl.commands.inspect.run_folder import MAX_BYTES, Json, Run, open_file, read_text
from lightrl.trace import trace_files
from lightrl.trajectory import rows_of

MAX_POINTS = 600  # maximum number of points per curve
MAX_TOKENS = 100_000  # maximum number shown per trajectory
_MAX_IMAGE_BYTES = 32 * 2**20
_KINDS = {b"\x89PNG\r\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}

_STEPS = ("step", "iteration")  # the column for the horizontal axis, as CSVLogger and LearningCurve name it
_NOT_CURVES = ("epoch", "created_at")
_FIRST_FILES = 8  # files to index before the table's first page
_UPDATE_S = 2.0  # seconds between two updates of an index


class Curves:
    """The curves of a run; when its metrics file has grown, only the new part is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._header = ""
        self._read_bytes = 0
        self._points: dict[str, tuple[list[float], list[float]]] = {}  # metric → iterations, values

    def to_json(self) -> Json:
        """Returns metric → {"x": iterations, "y": values}; a long curve is averaged over equal intervals."""
        self._read()
        return {name: _shortened(*points) for name, points in sorted(self._points.items())}

    def _read(self) -> None:
        names = ("metrics.csv", "learning_curve.csv")
        path = next((self._folder / name for name in names if (self._folder / name).exists()), None)
        if path is None:
            return
        with open_file(path) as file:
            head = file.readline(MAX_BYTES)
            header = head.decode(errors="replace")
            # CSVLogger writes the whole file again when a metric is added.
            if path != self._path or header != self._header or path.stat().st_size < self._read_bytes:
                self._path, self._header, self._points = path, header, {}
                self._read_bytes = len(head)
            file.seek(self._read_bytes)
            content = file.read(MAX_BYTES)
        end = content.rfind(b"\n") + 1  # the last line may be incomplete
        self._read_bytes += end
        text = content[:end].decode(errors="replace")
        names_of_columns = next(csv.reader([header]), [])
        step = next((index for index, name in enumerate(names_of_columns) if name in _STEPS), None)
        if step is None:
            return
        columns = [
            (index, self._points.setdefault(name, ([], [])))
            for index, name in enumerate(names_of_columns)
            if index != step and name not in _NOT_CURVES
        ]
        for row in csv.reader(text.splitlines()):
            for index, (steps, values) in columns:
                if index < len(row) and row[index]:
                    iteration, value = finite_number(row[step]), finite_number(row[index])
                    if iteration is not None and value is not None:
                        steps.append(iteration)
                        values.append(value)


def _shortened(steps: list[float], values: list[float]) -> dict[str, list[float]]:
    stride = math.ceil(len(steps) / MAX_POINTS)
    if stride <= 1:
        return {"x": steps, "y": values}
    starts = range(0, len(steps), stride)
    return {
        "x": [fmean(steps[start : start + stride]) for start in starts],
        "y": [fmean(values[start : start + stride]) for start in starts],
    }


class _OpenRun:
    def __init__(self, run: Run, cache: Path | None) -> None:
        self.run = run
        self.curves = Curves(run.folder)
        self.index = TrajectoryIndex(run.folder, cache)
        self.texts = TokenTexts(run.folder)
        self.timeline = Timeline(run.folder)
        self.lock = threading.Lock()  # guards curves, texts and timeline


@contextlib.contextmanager
def _reading_files(question: str) -> Iterator[None]:
    """Turns any error caused by the content of a run's files into a LookupError or a ValueError."""
    try:
        yield
    except (LookupError, ValueError):
        raise
    except Exception as error:  # untrusted files may fail in any way
        raise ValueError(f"The run's files cannot be read for {question!r}: {type(error).__name__}: {error}") from error


class Answers:
    """Answers questions from any thread. A run's number is its position in `runs`; `cache` is a folder for indices."""

    def __init__(self, runs: Sequence[Run], cache: Path | None = None) -> None:
        self.runs = [_OpenRun(run, cache) for run in runs]
        self._closed = threading.Event()

    def start(self) -> None:
        """Starts a thread that keeps the indices up to date; the newest trajectories are available at once."""
        for one in self.runs:
            one.index.update(max_files=_FIRST_FILES)
        threading.Thread(target=self._follow, name="lightrl-inspect-index", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def answer(self, question: str, values: Mapping[str, str]) -> Any:
        """Returns plain JSON; raises LookupError for an unknown question, run or row, ValueError for a wrong value."""
        with _reading_files(question):
            return self._answer(question, values)

    def _answer(self, question: str, values: Mapping[str, str]) -> Any:
        if question == "runs":
            return [self._summary(number) for number in range(len(self.runs))]
        if question == "settings":
            return [one.run.settings() for one in self.runs]
        one = self._run(values)
        if question == "table":
            page = one.index.page(
                values.get("query", ""),
                values.get("sort", "iteration"),
                descending=values.get("order", "desc") == "desc",
                offset=int(values.get("offset", "0")),
                limit=int(values.get("limit", "100")),
            )
            return {**page, "missing_files": one.index.num_missing}
        if question == "problems":
            return problems(one.run)
        with one.lock:
            if question == "curves":
                return one.curves.to_json()
            if question == "timeline":
                return one.timeline.events(int(values["iteration"]))
            if question == "trajectory":
                record = one.index.line(int(values["id"]))
                if "trajectory" not in record:
                    raise LookupError(f"This trajectory was dropped: {record['message']}")
                group = one.index.group_of(record["iteration"], record["trajectory"]["group_id"])
                return {**as_shown(record, one.texts), "group_rows": group}
        raise LookupError(f"There is no question {question!r}.")

    def image(self, values: Mapping[str, str]) -> tuple[str, bytes]:
        """Returns the content type and bytes of a trajectory's image."""
        with _reading_files("image"):
            return image(self._run(values).index.line(int(values["id"])), int(values["number"]))

    def _run(self, values: Mapping[str, str]) -> _OpenRun:
        number = int(values.get("run", "0"))
        if not 0 <= number < len(self.runs):
            raise LookupError(f"There is no run {number}.")
        return self.runs[number]

    def _summary(self, number: int) -> Json:
        one = self.runs[number]
        with one.lock:
            iterations, summary = one.timeline.iterations(), one.timeline.summary()
        status = one.run.status()
        return {
            "number": number,
            "name": one.run.name,
            "folder": str(one.run.folder),
            "status": {name: status.get(name) for name in ("phase", "progress", "iteration", "max_steps", "at")},
            "traced": iterations,
            "time": summary,
        }

    def _follow(self) -> None:
        while not self._closed.wait(_UPDATE_S):
            for one in self.runs:
                one.index.update()


class TokenTexts:
    """The texts of token ids that TrajectoryLog has written; when the file has grown, only the new part is read."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "trajectories" / "tokens.jsonl"
        self._read_bytes = 0
        self._texts: dict[int, str] = {}

    def of(self, token_ids: list[int]) -> dict[int, str]:
        if not self._texts.keys() >= set(token_ids):
            self._read()
        return {id_: self._texts[id_] for id_ in set(token_ids) if id_ in self._texts}

    def _read(self) -> None:
        if not self._path.exists():
            return
        with open_file(self._path) as file:
            file.seek(self._read_bytes)
            content = file.read(MAX_BYTES)
        end = content.rfind(b"\n") + 1
        self._read_bytes += end
        self._texts.update(json.loads(line) for line in content[:end].splitlines())


def as_shown(record: Json, texts: TokenTexts) -> Json:
    """Converts a TrajectoryLog record for the page, to lists with one entry per token."""
    trajectory = record["trajectory"]
    token_ids = trajectory["token_ids"][:MAX_TOKENS]
    num = len(token_ids)
    mask = trajectory["loss_mask"][:num]
    advantages = record.get("advantages")
    if advantages is None and record.get("advantage") is not None:
        advantages = [record["advantage"] if trains else 0.0 for trains in mask]
    branches = [(index, gap) for index, gap in enumerate((trajectory.get("gaps") or ())[:num]) if gap]
    prompt = trajectory["prompt"]
    shown = {name: record.get(name) for name in ("iteration", "weight_version", "advantage")}
    return {
        **shown,
        "group": trajectory["group_id"],
        "sample": trajectory["sample"],
        "reward": trajectory["reward"],
        "finish": record.get("finish") or trajectory["finish_reason"],
        "message": record.get("message"),
        "agent_output": trajectory.get("agent_output"),
        "truncated": trajectory["is_truncated"],
        "prompt": {"id": prompt["id"], "messages": prompt.get("messages"), "fields": prompt.get("fields") or {}},
        "num_images": len(_images(trajectory)),
        "completion": trajectory["completion"],
        "metrics": trajectory["metrics"],
        "turns": trajectory["turns"],
        "branches": branches,
        "rows": rows_of(num, branches),
        "num_tokens": len(trajectory["token_ids"]),
        "tokens": {
            "id": token_ids,
            "mask": [int(trains) for trains in mask],
            "logprob": trajectory["behavior_logprobs"][:num],
            "version": trajectory["weight_versions"][:num],
            "advantage": advantages and advantages[:num],
            "trainer_logprob": record.get("trainer_logprobs"),
            "reward": trajectory.get("rewards") and trajectory["rewards"][:num],
        },
        "texts": {**texts.of(token_ids), **{int(id_): text for id_, text in record.get("texts", {}).items()}},
    }


def _images(trajectory: Json) -> list[str]:
    """Returns the images in the prompt, then the images in the observations."""
    return [*(trajectory["prompt"].get("images") or ()), *(trajectory.get("images") or ())]


def image(record: Json, number: int) -> tuple[str, bytes]:
    """Returns the content type and bytes of a trajectory's image; refuses any other kind of file."""
    images = _images(record["trajectory"])
    if not 0 <= number < len(images):
        raise LookupError(f"The trajectory has {count_text(len(images), 'image')}; there is no image {number}.")
    source = str(images[number])
    try:
        if source.startswith("data:"):
            content = base64.b64decode(source.partition(",")[2], validate=True)
        else:
            with open_file(Path(source), follows_link=True) as file:
                content = file.read(_MAX_IMAGE_BYTES + 1) or b""
            if len(content) > _MAX_IMAGE_BYTES:
                raise LookupError(f"{source} is larger than {_MAX_IMAGE_BYTES >> 20} MiB.")
    except (OSError, ValueError) as error:
        raise LookupError(f"Image {number} cannot be read: {error}") from error
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise LookupError(f"Image {number} is not a PNG, JPEG, GIF or WebP.")
    return kind, content


MAX_EVENTS = 20_000  # per iteration; the longest are kept
MAX_PROBLEMS = 5_000  # the newest are kept

_MARK = re.compile(rb'^\{"name":"iteration (\d+)","ph":"i"', re.M)
_CHUNK = 2**22


class Timeline:
    """Finds where each iteration begins in the trace files; if a file has grown, only its new part is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "trace"
        self._marks: dict[Path, list[tuple[int, int]]] = {}  # file → iteration and its first byte, in order
        self._scanned: dict[Path, tuple[int, int]] = {}  # file → inode, and number of bytes searched

    def iterations(self) -> list[int]:
        for path in trace_files(self._folder):
            self._find_iterations(path)
        return sorted({iteration for marks in self._marks.values() for iteration, _ in marks})

    def summary(self) -> Json | None:
        """Returns the summary that Trace wrote at the end of the run; None if it cannot be read."""
        try:
            summary: Json = json.loads(read_text(self._folder / "summary.json"))
        except (OSError, ValueError, RecursionError):
            return None
        return summary

    def events(self, iteration: int) -> Json:
        """Returns a row per rank and track, and events as [row, name, category, start in ms, duration in ms, args]."""
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

    def _find_iterations(self, path: Path) -> None:
        stat = path.stat()
        inode, done = self._scanned.get(path, (stat.st_ino, 0))
        if inode != stat.st_ino or stat.st_size < done:
            done = 0
        if done == 0:
            self._marks[path] = []
        with open_file(path) as file:
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
            with open_file(path) as file:
                file.seek(start)
                for line in file.read(min(end - start, MAX_BYTES)).splitlines():
                    yield json.loads(line.rstrip(b","))

    def _names(self, path: Path) -> dict[tuple[int, int], str]:
        """Returns the names of the tracks; the file names each track only once, where it first occurs."""
        lines = []
        with open_file(path) as file:
            while file.tell() < self._scanned[path][1]:
                line = file.readline(_CHUNK)
                lines += [line] if line.startswith(b'{"name":"thread_name"') else []
        named = [json.loads(line.rstrip(b",\n")) for line in lines]
        return {(one["pid"], one["tid"]): one["args"]["name"] for one in named}


def problems(run: Run) -> list[Json]:
    """Lists lost servers, then all ranks' warnings, errors and drops, and the traceback, newest first."""
    status = run.status()
    stamp = {"at": status.get("at", 0.0), "iteration": status.get("iteration"), "source": "server"}
    lost = [
        {**stamp, "kind": str(one.get("state")), "message": f"{one.get('url')}: {one.get('reason') or 'not routable'}"}
        for one in status.get("servers", ())
        if one.get("state") != "routable"
    ]
    reported: list[Json] = []
    for path in sorted((run.folder / "problems").glob("rank-*.jsonl")):
        for line in read_text(path).splitlines():
            with contextlib.suppress(ValueError, RecursionError):  # incomplete, or not written by lightrl
                reported.append({"at": 0.0, **json.loads(line)})
    traceback = run.folder / "traceback.txt"
    if traceback.exists():
        text = read_text(traceback)
        stamp = {"at": traceback.stat().st_mtime, "rank": 0, "source": "trainer"}
        reported.append({**stamp, "kind": "traceback", "message": text[-8_000:]})
    return [*lost, *sorted(reported, key=lambda one: -one["at"])[:MAX_PROBLEMS]]
