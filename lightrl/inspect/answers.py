"""The page's questions and their answers: plain JSON, the same from the server and in an exported file."""

from __future__ import annotations

import base64
import csv
import json
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from lightrl.checks.printable import count_text
from lightrl.inspect.index import TrajectoryIndex, finite_number
from lightrl.inspect.run_folder import Json, Run
from lightrl.inspect.timeline import Timeline, problems

MAX_POINTS = 600  # a curve's points: more than its columns on a screen
MAX_TOKENS = 100_000  # shown of a trajectory
_MAX_IMAGE_BYTES = 32 * 2**20
_KINDS = {b"\x89PNG\r\n": "image/png", b"\xff\xd8\xff": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}

_STEPS = ("step", "iteration")  # the column that is the horizontal axis; CSVLogger's, LearningCurve's
_OTHERS = ("epoch", "created_at")
_FIRST_FILES = 8  # indexed before the first page of the table
_UPDATE_S = 2.0  # between two updates of an index


class Curves:
    """Reads a file again when it has changed, and then only what was added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._header = ""
        self._read_bytes = 0
        self._points: dict[str, tuple[list[float], list[float]]] = {}  # metric → iterations, values

    def to_json(self) -> Json:
        """Metric → {"x": iterations, "y": values}; a long curve has the mean of each part."""
        self._read()
        return {name: _shortened(*points) for name, points in sorted(self._points.items())}

    def _read(self) -> None:
        names = ("metrics.csv", "learning_curve.csv")
        path = next((self._folder / name for name in names if (self._folder / name).exists()), None)
        if path is None:
            return
        with path.open(encoding="utf-8", newline="") as file:
            header = file.readline()
            # CSVLogger writes the whole file again when a metric is added.
            if path != self._path or header != self._header or path.stat().st_size < self._read_bytes:
                self._path, self._header, self._points = path, header, {}
                self._read_bytes = len(header.encode())
            file.seek(self._read_bytes)
            text = file.read()
        end = text.rfind("\n") + 1  # the last line may be in the making
        self._read_bytes += len(text[:end].encode())
        names_of_columns = next(csv.reader([header]), [])
        step = next((index for index, name in enumerate(names_of_columns) if name in _STEPS), None)
        if step is None:
            return
        columns = [
            (index, self._points.setdefault(name, ([], [])))
            for index, name in enumerate(names_of_columns)
            if index != step and name not in _OTHERS
        ]
        for row in csv.reader(text[:end].splitlines()):
            for index, (steps, values) in columns:
                if index < len(row) and row[index]:
                    value = finite_number(row[index])
                    if value is not None:
                        steps.append(float(row[step]))
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


class Answers:
    """The answers about some runs, whose number is their place; called from any thread. `cache` is for the indices."""

    def __init__(self, runs: Sequence[Run], cache: Path | None = None) -> None:
        self.runs = [_OpenRun(run, cache) for run in runs]
        self._closed = threading.Event()

    def start(self) -> None:
        """Follow the runs with the indices, in a thread; the newest trajectories are there at once."""
        for one in self.runs:
            one.index.update(max_files=_FIRST_FILES)
        threading.Thread(target=self._follow, name="lightrl-inspect-index", daemon=True).start()

    def close(self) -> None:
        self._closed.set()

    def answer(self, question: str, values: Mapping[str, str]) -> Any:
        """Plain JSON; raises LookupError for an unknown question, run or trajectory, ValueError for a wrong value."""
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
                    raise LookupError(f"It was dropped: {record['message']}")
                group = one.index.group_of(record["iteration"], record["trajectory"]["group_id"])
                return {**as_shown(record, one.texts), "group_rows": group}
        raise LookupError(f"There is no question {question!r}.")

    def image(self, values: Mapping[str, str]) -> tuple[str, bytes]:
        """Return content type and bytes of an image of a trajectory's prompt."""
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
    """The texts of token ids that TrajectoryLog has written; reads what was added since."""

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
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self._read_bytes += end
        self._texts.update(json.loads(line) for line in content[:end].splitlines())


def as_shown(record: Json, texts: TokenTexts) -> Json:
    """A record of TrajectoryLog as the page reads it: lists with an entry for each token, aligned to the token."""
    trajectory = record["trajectory"]
    token_ids = trajectory["token_ids"][:MAX_TOKENS]
    num = len(token_ids)
    mask = trajectory["loss_mask"][:num]
    advantages = record.get("advantages")
    if advantages is None and record.get("advantage") is not None:
        advantages = [record["advantage"] if trains else 0.0 for trains in mask]
    prompt = trajectory["prompt"]
    shown = {name: record.get(name) for name in ("iteration", "weight_version", "advantage")}
    return {
        **shown,
        "group": trajectory["group_id"],
        "sample": trajectory["sample"],
        "reward": trajectory["reward"],
        "finish": trajectory["finish_reason"],
        "truncated": trajectory["is_truncated"],
        "prompt": {"id": prompt["id"], "messages": prompt.get("messages"), "fields": prompt.get("fields") or {}},
        "num_images": len(prompt.get("images") or ()),
        "completion": trajectory["completion"],
        "metrics": trajectory["metrics"],
        "turns": trajectory["turns"],
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
        "texts": texts.of(token_ids),
    }


def image(record: Json, number: int) -> tuple[str, bytes]:
    """Content type and bytes of an image of the prompt; of a run's machine nothing but images is shown."""
    images = record["trajectory"]["prompt"].get("images") or ()
    if not 0 <= number < len(images):
        raise LookupError(f"The prompt has {count_text(len(images), 'image')}; there is no number {number}.")
    source = str(images[number])
    try:
        if source.startswith("data:"):
            content = base64.b64decode(source.partition(",")[2], validate=True)
        else:
            path = Path(source)
            if path.stat().st_size > _MAX_IMAGE_BYTES:
                raise LookupError(f"{path} is larger than {_MAX_IMAGE_BYTES >> 20} MiB.")
            content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise LookupError(f"Image {number} cannot be read: {error}") from error
    kind = next((kind for start, kind in _KINDS.items() if content.startswith(start)), None)
    if kind is None:
        raise LookupError(f"Image {number} is not a PNG, JPEG, GIF or WebP.")
    return kind, content
