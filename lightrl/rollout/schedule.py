"""A schedule: what decided a run, written down while it runs, so that a later run can repeat it.

    {"format": 1, "run_seed": 0, "first_version": 0, "settings": {"group_size": 4, ...}, "engine": "LocalEngine"}
    {"version": 0, "decisions": "q0 q1 s0@0 s1@0 d1.0:5f3a:0*6 ... t0:0,1", "steps": "0v0 0a3f,9c 12a71"}

The first line says what the run was and, if it was resumed, which mark of which file it `continues`; the others have
what happened until a batch was taken, in order:

    q7          position 7 of the prompt stream was chosen
    s7@3        its group started, under version 3
    d7.2:crc:v  its sample 2 was done: a checksum of its tokens; versions and numbers of tokens, 3*12,4*5, by turn
    d7.2        its sample 2 was dropped
    r7          the group was drawn again
    t4:5,7-9    the batch of version 4 took groups 5 and 7 and gave up 9
    k           a checkpoint's state was taken

`steps` are those of an engine whose numbers depend on what it decodes together (`engines.abilities.FollowsSteps`).
"""

from __future__ import annotations

import json
import logging
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.checks.disk_errors import write_problem
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RolloutError
from lightrl.rollout.settings import RolloutSettings
from lightrl.trajectory import Trajectory, token_array

log = logging.getLogger(__name__)

FORMAT = 1
SETTINGS = ("group_size", "groups_per_iteration", "max_staleness", "max_concurrent", "redraw_stragglers")


class ScheduleLog:
    """The decisions of a run as text. Belongs to the controller's event loop."""

    def __init__(self) -> None:
        self.num_marks = 0
        self._items: deque[str] = deque()

    def chose(self, position: int) -> None:
        self._items.append(f"q{position}")

    def started(self, position: int, weight_version: int) -> None:
        self._items.append(f"s{position}@{weight_version}")

    def done(self, position: int, sample: int, trajectory: Trajectory | None) -> None:
        self._items.append(f"d{position}.{sample}{summary(trajectory)}")

    def redrawn(self, position: int) -> None:
        self._items.append(f"r{position}")

    def took(self, weight_version: int, group_ids: Sequence[int], gives_up: Sequence[int]) -> None:
        self._items.append(taken_text(weight_version, group_ids, gives_up))

    def mark(self) -> int:
        """A checkpoint's state is taken now; the mark's number."""
        self._items.append("k")
        self.num_marks += 1
        return self.num_marks - 1

    def drain(self) -> str:
        items, self._items = self._items, deque()
        return " ".join(items)


def summary(trajectory: Trajectory | None) -> str:
    """What a replay compares of a trajectory: a checksum of its tokens, and the versions of each turn's tokens."""
    if trajectory is None:
        return ""
    checksum = zlib.crc32(token_array("token_ids", trajectory.token_ids).stored[0])
    versions = token_array("weight_versions", trajectory.weight_versions)
    turns = [versions]
    if len(trajectory.turns) > 1:
        turns = [token_array("weight_versions", versions[turn.start : turn.end]) for turn in trajectory.turns]
    texts = [",".join(f"{version}*{num}" for version, num in turn.runs() if version >= 0) for turn in turns]
    return f":{checksum:x}:{';'.join(texts)}"


def taken_text(weight_version: int, group_ids: Sequence[int], gives_up: Sequence[int]) -> str:
    given_up = f"-{','.join(map(str, gives_up))}" if gives_up else ""
    return f"t{weight_version}:{','.join(map(str, group_ids))}{given_up}"


def version_runs(summary_text: str) -> list[list[tuple[int, int]]]:
    """By turn, (version, number of tokens) in order, from a `summary`."""
    turns = summary_text.rpartition(":")[2].split(";") if summary_text else []
    runs = [[run.split("*") for run in turn.split(",") if run] for turn in turns]
    return [[(int(version), int(num)) for version, num in turn] for turn in runs]


def head_of(engine: RolloutEngine, settings: RolloutSettings, run_seed: int) -> dict[str, Any]:
    """The first line of a schedule."""
    return {
        "format": FORMAT,
        "run_seed": run_seed,
        "first_version": max(0, engine.weight_version),
        "settings": {name: getattr(settings, name) for name in SETTINGS},
        "engine": type(engine).__name__,
    }


class ScheduleFile:
    """Writes a schedule line by line; on a full or read-only disk it warns once and the run continues.

    Args:
        folder: of the run.
        head: the first line, once it is known.
        drain_steps: the engine's steps since the last call.
    """

    def __init__(self, folder: Path, head: Callable[[], dict[str, Any]], drain_steps: Callable[[], str]) -> None:
        self.log = ScheduleLog()
        self.path: Path | None = None  # None: not written yet
        self.continues: Mapping[str, Any] | None = None  # where the schedule of the run before was, after a resume
        self._folder: Path | None = folder  # None: no longer written
        self._head = head
        self._drain_steps = drain_steps

    def flush(self, weight_version: int) -> None:
        """Writes what has happened. Steps first: each is the effect of decisions before it."""
        steps = self._drain_steps()
        decisions = self.log.drain()
        if self._folder is None or not (decisions or steps):
            return
        lines = [json.dumps({"version": weight_version, "decisions": decisions, "steps": steps})]
        try:
            if self.path is None:
                head = self._head() | ({} if self.continues is None else {"continues": dict(self.continues)})
                self._folder.mkdir(parents=True, exist_ok=True)
                self.path = self._folder / f"schedule-{head['first_version']:06d}.jsonl"
                self.path.unlink(missing_ok=True)
                lines.insert(0, json.dumps(head))
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        except OSError as error:
            problem = write_problem(error, self.path or self._folder, sum(map(len, lines)))
            log.warning("The schedule cannot be written: %s. The run continues, but cannot be replayed.", problem)
            self._folder = None

    def marked(self) -> dict[str, Any] | None:
        """Where the schedule is when a checkpoint's state is taken, for `Schedule.read`."""
        number = self.log.mark()
        self.flush(self._head()["first_version"])
        return None if self.path is None else {"file": self.path.name, "mark": number}


@dataclass(frozen=True)
class Schedule:
    """A recorded schedule, from its start or from a mark on."""

    path: Path
    head: Mapping[str, Any]
    decisions: list[str]
    steps: str
    mark: int | None = None  # counted from 0; None is the start

    @classmethod
    def read(cls, source: Path, at: Mapping[str, Any] | None = None) -> Schedule:
        """
        Args:
            source: the file, or the folder of the run.
            at: where a checkpoint of that run continues; None is the start of the first file. The file of a run that
                was resumed from this checkpoint is read from its start; in a folder if it lacks the file of `at`.

        Raises:
            RolloutError: if there is no such file, or it is none of this format.
        """
        files = sorted(source.glob("schedule-*.jsonl")) if source.is_dir() else [source]
        if at is not None and source.is_dir():
            own = [file for file in files if file.name == at["file"]]
            files = own or [file for file in files if _read_lines(file)[0].get("continues") == at]
        if not files or not files[0].is_file():
            name = "schedule-*.jsonl" if at is None else f"{at['file']}, nor one that continues it"
            raise RolloutError(
                f"data.schedule={str(source)!r} has no {name}. Give the folder of an asynchronous run, or its file."
            )
        head, decisions, steps = _read_lines(files[0])
        if at is None or head.get("continues") == at:
            return cls(files[0], head, decisions, steps)
        places = [place for place, item in enumerate(decisions) if item == "k"]
        if int(at["mark"]) >= len(places):
            raise RolloutError(
                f"{files[0]} ends before the checkpoint that this run resumes from. Replay the run that wrote the "
                "checkpoint, or start without ckpt_path."
            )
        return cls(files[0], head, decisions[places[int(at["mark"])] + 1 :], steps, int(at["mark"]))

    def check(self, settings: RolloutSettings, run_seed: int) -> None:
        """Raises RolloutError if this run's settings cannot repeat the recorded decisions."""
        now = {"run_seed": run_seed, **{name: getattr(settings, name) for name in SETTINGS}}
        then = {"run_seed": self.head["run_seed"], **self.head["settings"]}
        different = [f"{name}={now[name]} (recorded {then[name]})" for name in now if now[name] != then.get(name)]
        if different:
            raise RolloutError(
                f"{self.path} was recorded with other settings: {', '.join(different)}. Set those of the recorded run."
            )


def _read_lines(path: Path) -> tuple[dict[str, Any], list[str], str]:
    try:
        with path.open(encoding="utf-8") as file:
            lines = [line for line in file if line.endswith("\n")]  # a killed run leaves half a line at the end
        head, *records = map(json.loads, lines)
        if head["format"] != FORMAT:
            raise ValueError(f"its format is {head['format']}, not {FORMAT}")
        decisions = [item for record in records for item in record["decisions"].split()]
        return head, decisions, " ".join(record["steps"] for record in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"{path} is not a schedule that this version can read: {error!r}.") from error
