"""docs/lightning-habits.md's tables: the exceptions, whose rows stand at the tests that prove them.

`python tests/trainer/habits.py --write docs/lightning-habits.md` writes them, without `--write FILE` to the terminal.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

ROOT = Path(__file__).parents[2]
MARKS = ("<!-- python tests/trainer/habits.py --write docs/lightning-habits.md -->", "<!-- end of the tables -->")
# In the order of the page: title → the file whose rows it has.
TABLES = {
    "Trainer flags": "test_lightning_flags",
    "Callbacks, loggers, profilers": "test_lightning_callbacks",
    "Modules, data, stages": "test_lightning_habits",
}

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Habit:
    """A row.

    Args:
        written: as the user writes it.
        does: what differs from Lightning, or the sentence that refuses it; the page leaves out a row without it.
        works: False if it is refused.
        file: of the test, without ending.
    """

    written: str
    does: str
    works: bool
    file: str


_rows: dict[tuple[str, str], Habit] = {}


def habit(written: str, does: str = "") -> Callable[[Test], Test]:
    """Above the test that shows that a habit works."""

    def keep(test: Test) -> Test:
        add(written, does, works=True, file=test.__module__)
        return test

    return keep


def works(file: str, cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """What a test shows of short runs, as its parameters: (as the user writes it, what differs, *the test's own)."""
    for written, does, *_ in cases:
        add(written, does, works=True, file=file)
    return [pytest.param(*case, id=written) for written, _, *case in cases]


def refused(file: str, cases: Sequence[tuple[str, Callable[[], Any], str]]) -> list[Any]:
    """What a test refuses, as its parameters: (as the user writes it, the trainer's flags, the whole sentence)."""
    for written, _, sentence in cases:
        add(written, sentence, works=False, file=file)
    return [pytest.param(flags, sentence, id=written) for written, flags, sentence in cases]


def add(written: str, does: str, *, works: bool, file: str) -> None:
    file = file.rpartition(".")[2]
    _rows[file, written] = Habit(written, does, works, file)


def all_habits() -> list[Habit]:
    for file in TABLES.values():
        importlib.import_module(file)
    return list(_rows.values())


def tables() -> str:
    """The exceptions as Markdown; what one sentence refuses is one row."""
    habits, lines = all_habits(), []
    for title, file in TABLES.items():
        written_by_sentence: dict[tuple[bool, str], list[str]] = {}
        for row in habits:
            if row.file == file and row.does:
                written_by_sentence.setdefault((not row.works, row.does), []).append(f"`{row.written}`")
        lines += [f"## {title}", "", "| in Lightning | | in lightrl |", "|---|---|---|"]
        for (is_refused, does), written in sorted(written_by_sentence.items(), key=lambda item: item[0][0]):
            lines.append(f"| {', '.join(written)} | {'**refused**' if is_refused else 'differs'} | {does} |")
        lines.append("")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.stdout.write(tables())
        return
    if len(arguments) != 2 or arguments[0] != "--write":
        raise SystemExit("usage: python tests/trainer/habits.py [--write FILE]")
    from benchmarks.sync_faults import write_table

    write_table(Path(arguments[1]), "\n" + tables().removesuffix("\n"), MARKS)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]
    import habits  # not this module under the name __main__, which the tests do not import

    habits.main(sys.argv[1:])
