"""Kills or stops each actor in each phase of a run, and checks what happens to the run.

    python -m benchmarks.kill_matrix [--cells WORDS,WORDS] [--write benchmarks/faults.md]

A cell is a separate run of kill_run.py. If the run does not continue, it is resumed from its last checkpoint. A row
says what happened, whom the output names, and how many seconds after the signal the run continued or had ended; how
many trajectories are missing from the trajectory log or occur in two of its iterations; and whether the weights equal
those of an undisturbed run. The command fails if a cell's result differs from the one declared below. `--write`
replaces the table between two markers of a Markdown file; with `--cells`, only the lines of these actors.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import kill_run
from benchmarks.in_fork import in_fork
from benchmarks.kill_run import AFTER, BLOCK, KILL, MOMENT, NOTICES, PHASES, RAISE, STOP, WEIGHTS, Cell
from benchmarks.report import Report
from benchmarks.sync_faults import write_table
from lightrl.engines.servers.processes.process import HeldPort

LONGEST_S = 90.0  # of a run that takes 5 s; longer is a hang
STOPPED_S = 2.0  # until a stopped trainer runs again
_WIDTH = 120  # characters of a message in the table
GOES_ON, ENDS, KILLED, HANGS = "goes on", "ends", "killed", "hangs"
MARKERS = ("<!-- python -m benchmarks.kill_matrix --write benchmarks/faults.md -->", "<!-- end of the matrix -->")


@dataclass(frozen=True)
class Expected:
    """A cell's expected result: the outcome, who is named (a pattern; empty for nobody), and how many are dropped."""

    outcome: str
    named: str = ""
    dropped: int = 0


_SERVER = r"The server at http://\S+ is lost"
_BY_ACTOR: dict[tuple[str, str], Expected] = {
    ("trainer", KILL): Expected(KILLED),
    ("trainer", STOP): Expected(GOES_ON),
    ("rank", KILL): Expected(ENDS, "Rank 1 was killed"),
    ("rank", STOP): Expected(ENDS, "Rank 1 has not reported"),
    ("server", KILL): Expected(GOES_ON, _SERVER),
    ("server", STOP): Expected(GOES_ON, _SERVER),
    ("reward worker", KILL): Expected(GOES_ON),
    ("reward worker", STOP): Expected(GOES_ON, "reward.*held", 1),
    ("environment", KILL): Expected(GOES_ON),
    ("environment", STOP): Expected(GOES_ON, r"Echo\.step did not finish", 1),
    ("workflow worker", KILL): Expected(GOES_ON, "workflow worker . ended with signal SIGKILL"),
    ("workflow worker", STOP): Expected(GOES_ON),
    ("controller thread", RAISE): Expected(ENDS, "rollout.*MemoryError"),
    ("controller thread", BLOCK): Expected(ENDS, "rollout event loop did not answer"),
}
_IN_PHASE: dict[tuple[str, str, str], Expected] = {
    ("reward worker", "reward", KILL): Expected(GOES_ON, "reward.*held", 1),
    ("reward worker", "score", KILL): Expected(GOES_ON, "reward.*held", 1),
    ("environment", "rollout", KILL): Expected(GOES_ON, r"Echo\.step raised", 1),
    ("workflow worker", "rollout", STOP): Expected(GOES_ON, "workflow worker . .* did not answer"),
    ("controller thread", "sync", BLOCK): Expected(GOES_ON),  # of a sync `sync_s` decides; it is longer than the block
}
CELLS = tuple(Cell(actor, phase, kind) for actor, kind in _BY_ACTOR for phase in PHASES)


def expected(cell: Cell) -> Expected:
    usual = _BY_ACTOR[cell.actor, cell.signal]
    return _IN_PHASE.get((cell.actor, cell.phase, cell.signal), usual)


class Matrix:
    """Runs cells in forks of this process, which has imported everything and has no other threads.

    Args:
        folder: the runs' folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._whole: dict[int, Any] = {}  # by the number of ranks: the last weights of a run without a fault

    def row(self, cell: Cell) -> dict[str, Any]:
        """Runs the cell; returns the row of the table, with `problems` if it differs from what is expected."""
        folder = self.folder / "-".join((cell.actor, cell.phase, cell.signal)).replace(" ", "-")
        folder.mkdir()
        codes, ended_at = self._play(folder, cell)
        outcome, output = _outcome(cell, codes), (folder / "output.txt").read_text()
        notices = _notices(folder / NOTICES)
        witness = json.loads((folder / MOMENT).read_text()) if (folder / MOMENT).exists() else {}
        after = folder / AFTER
        resumed: list[int | None] = []
        if outcome in (ENDS, KILLED):
            resumed, _ = self._play(folder, None, ranks=cell.ranks, resumes=True)
        lost, twice = count_ids(folder / "trajectories")
        weights = folder / WEIGHTS
        same = weights.exists() and _equal(torch.load(weights), self._weights_of_whole(cell.ranks))
        want = expected(cell)
        said = [*notices, *((ended_at, line.strip()) for line in output.splitlines())] if want.named else []
        noticed_at, named = next((one for one in said if re.search(want.named, one[1])), (None, ""))
        problems = {
            "the witness saw another phase": witness.get("phase") != cell.phase,
            f"it {outcome}, expected: {want.outcome}": outcome != want.outcome,
            "nobody is named": bool(want.named) and not named,
            "the resumed run failed": any(code != 0 for code in resumed),
            f"{lost} lost, expected: {want.dropped}": lost != want.dropped,
            f"{twice} trained on twice": twice > 0,
            "other weights than of a run without a fault": not want.dropped and not same,
        }
        until = noticed_at or (float(after.read_text()) if outcome == GOES_ON and after.exists() else ended_at)
        return {
            "actor": cell.actor, "phase": cell.phase, "signal": cell.signal, "outcome": outcome, "named": named[:300],
            "seconds": None if outcome == KILLED or not witness else round(until - witness["at"], 1),
            "lost": lost, "twice": twice, "same_weights": same,
            "problems": [text for text, is_so in problems.items() if is_so],
        }  # fmt: skip

    def _weights_of_whole(self, ranks: int) -> Any:
        if ranks not in self._whole:
            folder = self.folder / f"whole-{ranks}"
            folder.mkdir()
            codes, _ = self._play(folder, None, ranks=ranks)
            if any(codes):
                raise RuntimeError(f"A run without a fault failed:\n{(folder / 'output.txt').read_text()}")
            self._whole[ranks] = torch.load(folder / WEIGHTS)
        return self._whole[ranks]

    def _play(
        self, folder: Path, cell: Cell | None, *, ranks: int | None = None, resumes: bool = False
    ) -> tuple[list[int | None], float]:
        """Returns exit codes by rank, None if it had to be killed, and the time when the last other one ended."""
        size = ranks or (cell.ranks if cell else 1)
        port = HeldPort("127.0.0.1")
        children = [_fork(folder, cell, rank, size, port.number, resumes) for rank in range(size)]
        codes: list[int | None] = [None] * size
        deadline, ended_at = time.monotonic() + LONGEST_S, time.monotonic()
        while None in codes and time.monotonic() < deadline:
            for rank, pid in enumerate(children):
                if codes[rank] is None and (done := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank], ended_at = os.waitstatus_to_exitcode(done[1]), time.monotonic()
                    deadline = min(deadline, ended_at + 4 * kill_run.HANG_S)  # for the others
            if cell is not None and cell.signal == STOP and cell.actor == "trainer" and (folder / MOMENT).exists():
                time.sleep(STOPPED_S)
                os.kill(children[0], signal.SIGCONT)
                cell = None
            time.sleep(0.01)
        for rank, pid in enumerate(children):
            if codes[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        port.close()
        return codes, ended_at


def _outcome(cell: Cell, codes: Sequence[int | None]) -> str:
    watched = [code for rank, code in enumerate(codes) if not (cell.actor == "rank" and rank == 1)]
    if None in watched:
        return HANGS
    if watched == [-signal.SIGKILL]:
        return KILLED
    return GOES_ON if not any(watched) else ENDS


def _fork(folder: Path, cell: Cell | None, rank: int, size: int, port: int, resumes: bool) -> int:
    """Returns the process id of a child that runs one rank."""
    variables = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0,
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "kill_matrix"}  # fmt: skip
    return in_fork(
        lambda: kill_run.play(folder, cell, rank=rank, ranks=size, resumes=resumes),
        folder / "output.txt",
        variables if size > 1 else {},
    )


def _notices(file: Path) -> list[tuple[float, str]]:
    """Returns the run's warnings, each with its time on the monotonic clock."""
    return [(at, text) for at, text in map(json.loads, file.read_text().splitlines() if file.exists() else [])]


def count_ids(folder: Path) -> tuple[int, int]:
    """Counts trajectories of the run that are in no iteration's file, and in more than one."""
    per_iteration, size = kill_run.PROMPTS, kill_run.GROUP_SIZE
    counts: Counter[tuple[int, int]] = Counter()
    for path in sorted(folder.glob("iteration-*.jsonl")):
        trajectories = [json.loads(line)["trajectory"] for line in path.read_text().splitlines()]
        counts.update({(item["group_id"], item["sample"]) for item in trajectories})
    whole = {(group, sample) for group in range(per_iteration * kill_run.ITERATIONS) for sample in range(size)}
    return len(whole - counts.keys()), sum(count > 1 for count in counts.values())


def _equal(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of benchmarks/faults.md: a line per actor and signal, with phases of equal results joined."""
    lines = [
        "| actor | signal | in phase | the run | seconds | lost | twice | same weights | the output names |",
        "|---|---|---|---|--:|--:|--:|---|---|",
    ]
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        what = re.sub(r"http://\S+|\d+", "…", expected(Cell(row["actor"], row["phase"], row["signal"])).named)
        key = (row["actor"], row["signal"], row["outcome"], row["lost"], row["twice"], row["same_weights"], what)
        alike.setdefault(key, []).append(row)
    for (actor, kind, outcome, lost, twice, same, _), group in alike.items():
        seconds = sorted(row["seconds"] for row in group if row["seconds"] is not None)
        span = "–" if not seconds else f"{seconds[0]}" if len(group) == 1 else f"{seconds[0]} to {seconds[-1]}"
        phases = "each" if len(group) == len(PHASES) else ", ".join(row["phase"] for row in group)
        run = {ENDS: "ends; the resumed one finishes", KILLED: "is resumed and finishes"}.get(outcome, outcome)
        named = re.sub(r"127\.0\.0\.1:\d+", "…", next((row["named"] for row in group if row["named"]), ""))
        named = named if len(named) <= _WIDTH else f"{named[:_WIDTH]} …"
        cells = [actor, kind, phases, run, span, lost, twice, "yes" if same else "no", f"`{named}`" if named else "–"]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def with_lines_of_others(file: Path, table: str, actors: set[str]) -> str:
    """Returns the table with the file's lines about other actors added, in the order of the cells."""
    old = file.read_text().partition(MARKERS[0])[2].partition(MARKERS[1])[0].splitlines()
    head, lines = table.splitlines()[:2], table.splitlines()[2:]
    for actor in dict.fromkeys(cell.actor for cell in CELLS):
        head += [line for line in (lines if actor in actors else old) if line.startswith(f"| {actor} |")]
    return "\n".join(head)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kill_matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--cells", default="", help="only those whose `actor phase signal` has one of these texts")
    parser.add_argument(
        "--write", type=Path, help="a Markdown file whose table, or lines of these cells' actors, are replaced"
    )
    parser.add_argument("--keep", type=Path, help="a folder for the runs, which are kept")
    options = parser.parse_args(argv)
    words = options.cells.split(",")
    chosen = [cell for cell in CELLS if any(word in f"{cell.actor} {cell.phase} {cell.signal}" for word in words)]
    actors = {cell.actor for cell in chosen}
    if options.write and len(chosen) != sum(cell.actor in actors for cell in CELLS):
        parser.error("--write needs all cells of an actor: give --cells a whole actor, or leave it out.")
    report = Report("kill_matrix")
    with contextlib.ExitStack() as stack:
        folder = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(exist_ok=True)
        matrix = Matrix(folder)
        rows = [report.add("cell", **matrix.row(cell)) for cell in chosen]
    report.finish(["actor", "phase", "signal", "outcome", "seconds", "lost", "twice", "problems"])
    if options.write:
        write_table(options.write, with_lines_of_others(options.write, markdown(rows), actors), MARKERS)
    if any(row["problems"] for row in rows):
        raise SystemExit("Some cells gave something else than expected; see `problems`.")


if __name__ == "__main__":
    main()
