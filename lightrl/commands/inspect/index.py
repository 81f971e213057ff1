"""The table of a run's trajectories: an SQLite file in the user's cache, built from the first bytes of each line.

Dropped trajectories are also rows; their `finish` column has the reason. Drops due to a failed reward or agent come
from the failure files and have tokens; other drops come from the problem files.

TrajectoryLog writes the table's columns before the trajectory, so a long line costs no more than a short one. A thread
reads files whose size or time has changed, newest first; other threads can read the table at the same time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import mmap
import os
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from lightrl.checks.printable import did_you_mean
from lightrl.commands.inspect.run_folder import Json, open_file

_NUMBERS = ("iteration", "group", "sample", "reward", "advantage", "length", "staleness")
_TEXTS = ("prompt", "prompt_text", "excerpt")  # columns that are searched for words
COLUMNS = (*_NUMBERS, "finish", *_TEXTS)
_MAX_WORDS = 100
_MAX_LINE_BYTES = 2**28
_SCHEMA_VERSION = 4
_CREATE = """
CREATE TABLE IF NOT EXISTS files (name TEXT PRIMARY KEY, size INTEGER, time INTEGER, id INTEGER);
CREATE TABLE IF NOT EXISTS rows (file INTEGER, start INTEGER, size INTEGER, iteration INTEGER, "group" INTEGER,
    sample INTEGER, reward REAL, advantage REAL, length INTEGER, staleness INTEGER, finish TEXT, prompt TEXT,
    prompt_text TEXT, excerpt TEXT, is_hidden INTEGER);
CREATE VIEW IF NOT EXISTS shown AS SELECT rowid AS id, * FROM rows WHERE NOT is_hidden;
CREATE INDEX IF NOT EXISTS rows_of_file ON rows (file);
CREATE INDEX IF NOT EXISTS rows_of_iteration ON rows (iteration, "group");
CREATE INDEX IF NOT EXISTS rows_by_reward ON rows (reward);
CREATE INDEX IF NOT EXISTS rows_by_advantage ON rows (advantage);
CREATE INDEX IF NOT EXISTS rows_by_length ON rows (length);
"""
_HIDE = """
WITH dropped AS (SELECT rowid AS id, "group", excerpt FROM rows WHERE finish LIKE 'dropped%'),
    kept AS (SELECT excerpt, count(*) AS num FROM dropped WHERE "group" IS NOT NULL GROUP BY excerpt),
    problems AS (SELECT id, excerpt, row_number() OVER (PARTITION BY excerpt ORDER BY id) AS place FROM dropped
        WHERE "group" IS NULL)
UPDATE rows SET is_hidden = 1 WHERE rowid IN
    (SELECT id FROM problems JOIN kept ON kept.excerpt = problems.excerpt WHERE place <= num)
"""
_CONDITION = re.compile(r"^([A-Za-z_]+)(<=|>=|!=|=|<|>)(.*)$")
_COLUMNS = ", ".join(f'"{name}"' for name in COLUMNS)


class TrajectoryIndex:
    """The trajectory table of one run, in the user's cache or in `cache`; one thread at a time may call `update`."""

    def __init__(self, folder: Path, cache: Path | None = None) -> None:
        self._folder = folder
        name = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:24]
        cache = cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightrl" / "inspect"
        cache.mkdir(parents=True, exist_ok=True)
        self._path = cache / f"{name}-{_SCHEMA_VERSION}.sqlite"
        self._updating = threading.Lock()
        self.num_missing = 0  # files not read yet
        with closing(self._connect()) as database:
            database.executescript(_CREATE)

    def update(self, *, max_files: int | None = None) -> int:
        """Reads new and changed files, newest first; returns how many remain."""
        with self._updating, closing(self._connect()) as database:
            files = database.execute("SELECT * FROM files")
            indexed = {name: (size, time, number) for name, size, time, number in files}
            stats = dict(_entries(self._folder))
            changed = [
                name for name in sorted(stats, reverse=True) if indexed.get(name, (0, 0))[:2] != _stamp(stats[name])
            ]
            self.num_missing = len(changed)
            with database:
                for name in indexed.keys() - stats.keys():
                    _forget(database, name, indexed[name][2])
            next_id = max((number for _, _, number in indexed.values()), default=0) + 1
            for start in range(0, min(len(changed), max_files or len(changed)), 64):
                batch = changed[start : start + 64][:max_files]
                with database:
                    for name in batch:
                        if name in indexed:
                            _forget(database, name, indexed[name][2])
                        with contextlib.suppress(OSError):  # not a file that a run writes
                            _add(database, self._folder / name, next_id, name, _stamp(stats[name]))
                        next_id += 1
                self.num_missing -= len(batch)
            with database:  # a problem and a failure file's row with the same text are one drop: hide the problem
                database.execute("UPDATE rows SET is_hidden = 0 WHERE is_hidden")
                database.execute(_HIDE)
            return self.num_missing

    def page(
        self, query: str = "", sort: str = "iteration", *, descending: bool = True, offset: int = 0, limit: int = 100
    ) -> Json:
        """Returns one page of the rows that match, and the total number of matches.

        Args:
            query: words that the prompt or the completion must contain, and conditions: `reward<0.5`.

        Returns:
            `total`, `rows`, and `notes` on parts of the query that look like conditions but are not.
        """
        if sort not in COLUMNS:
            raise ValueError(f"sort must be one of {', '.join(COLUMNS)}, got {sort!r}.")
        where, values, notes = condition(query)
        direction = "DESC" if descending else "ASC"
        tie = "ASC" if sort == "iteration" else direction  # keeps an iteration's trajectories in order
        with closing(self._connect()) as database:
            (total,) = database.execute(f"SELECT count(*) FROM shown {where}", values).fetchone()
            rows = database.execute(
                f'SELECT id, {_COLUMNS} FROM shown {where} ORDER BY "{sort}" {direction}, id {tie} LIMIT ? OFFSET ?',
                [*values, max(0, min(limit, 1000)), offset],
            )
            return {"total": total, "rows": _dicts(rows), "notes": notes}

    def sample(self, num: int) -> list[Json]:
        """Returns at most `num` rows: the same number from each iteration, in whole groups if a group fits."""
        with closing(self._connect()) as database:
            total, iterations, size = database.execute(
                "SELECT count(*), count(DISTINCT iteration), max(sample) + 1 FROM shown"
            ).fetchone()
            num_each = num if total <= num else max(1, num // iterations)
            num_each -= num_each % size if size and num_each > size else 0
            order = 'PARTITION BY iteration ORDER BY "group" IS NULL, "group", sample'
            samples = database.execute(
                f"SELECT id, {_COLUMNS} FROM (SELECT *, row_number() OVER ({order}) AS place FROM shown) "
                "WHERE place <= ? ORDER BY place, iteration",
                [num_each],
            )
            rows = _dicts(samples)
        return rows if len(rows) <= num else [rows[place * (len(rows) - 1) // (num - 1)] for place in range(num)]

    def line(self, row_id: int) -> Json:
        """Returns a row's record as TrajectoryLog wrote it; raises LookupError if it is missing or was replaced."""
        with closing(self._connect()) as database:
            row = database.execute(
                "SELECT name, start, rows.size FROM rows JOIN files ON files.id = rows.file WHERE rows.rowid = ?",
                [row_id],
            ).fetchone()
        if row is None:
            raise LookupError(f"There is no trajectory {row_id}: its iteration was replaced. Load the table again.")
        with open_file(self._folder / row[0]) as file:
            file.seek(row[1])
            record: Json = json.loads(file.read(row[2]))
        return record

    def group_of(self, iteration: int, group: int) -> list[Json]:
        page = self.page(f"iteration={iteration} group={group}", "sample", descending=False, limit=1000)
        return list(page["rows"])

    def _connect(self) -> sqlite3.Connection:
        database = sqlite3.connect(self._path, timeout=30.0)
        database.execute("PRAGMA synchronous = OFF")  # a lost index can be rebuilt
        database.execute("PRAGMA journal_mode = WAL")  # allows reading while the table grows
        return database


def _dicts(rows: Iterable[Sequence[object]]) -> list[Json]:
    return [dict(zip(("id", *COLUMNS), row, strict=True)) for row in rows]


def condition(query: str) -> tuple[str, list[object], list[str]]:
    """Returns a query as an SQL WHERE clause, its values, and notes on words that look like conditions but are not."""
    clauses: list[str] = []
    values: list[object] = []
    notes: list[str] = []
    words = query.split()
    if len(words) > _MAX_WORDS:
        raise ValueError(f"A query must have at most {_MAX_WORDS} words, got {len(words)}.")
    for word in words:
        name, sign, text = match.groups() if (match := _CONDITION.match(word)) else ("", "", "")
        number = finite_number(text)
        if name in _NUMBERS and number is not None:
            clauses.append(f'"{name}" {sign} ?')
            values.append(number)
        elif word == "dropped" or (name == "finish" and sign in ("=", "!=")):
            clauses.append(f"finish {'NOT ' if sign == '!=' else ''}LIKE ?")
            values.append(f"{text if match else word}%")
        elif name not in _NUMBERS or text:  # ignores a condition whose number is still being typed
            clauses.append(f"({' OR '.join(f'instr(lower({column}), ?)' for column in _TEXTS)})")
            values += [word.encode().lower().decode()] * len(_TEXTS)  # ASCII only, like SQLite's lower
            notes += [_why_searched_as_text(word, name, text)] if match else []
    return ("WHERE " + " AND ".join(clauses) if clauses else ""), values, notes


def finite_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _why_searched_as_text(word: str, column: str, value: str) -> str:
    """Explains what is wrong with a word that looks like a condition, such as `reward>abc`."""
    columns = (*_NUMBERS, "finish")
    if column == "finish":
        reason = "finish takes = or !=."
    elif column in columns:
        reason = f"{value} is not a number."
    else:
        hint = did_you_mean(column.lower(), columns, num=1) or f" Columns: {', '.join(columns)}."
        reason = f"There is no column {column}.{hint}"
    return f"{word} is searched as text. {reason}"


def _entries(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    for name, start in (("trajectories", "iteration-"), ("problems", "rank-"), (".", "failed_")):
        for path in (folder / name).glob(f"{start}*.jsonl"):
            with contextlib.suppress(OSError):  # the run has removed it
                if path.name.isprintable():  # otherwise the run did not write it, and SQLite may refuse the name
                    yield f"{name}/{path.name}", path.lstat()


def _stamp(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _forget(database: sqlite3.Connection, name: str, number: int) -> None:
    database.execute("DELETE FROM rows WHERE file = ?", [number])
    database.execute("DELETE FROM files WHERE name = ?", [name])


def _add(database: sqlite3.Connection, path: Path, number: int, name: str, stamp: tuple[int, int]) -> None:
    database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", [name, *stamp, number])
    marks = ", ".join("?" * (4 + len(COLUMNS)))
    database.executemany(f"INSERT INTO rows VALUES ({marks})", _rows(path, number))


def _rows(path: Path, number: int) -> Iterator[Sequence[object]]:
    if path.stat().st_size == 0:
        return
    with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        start = 0
        while start < len(content):
            end = content.find(b"\n", start, start + _MAX_LINE_BYTES)
            if end < 0:
                return
            record = _columns(content, start, end)
            if record is not None:
                yield (number, start, end - start, *(_storable(record.get(name)) for name in COLUMNS), 0)
            start = end + 1


def _storable(value: object) -> object:
    """Makes a value storable: SQLite refuses lists, huge integers, and lone surrogates, which completions may have."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    return value if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) else None


def _columns(content: mmap.mmap, start: int, end: int) -> Json | None:
    """Reads the columns of a trajectory, finished or dropped, from the beginning of its line."""
    cut = content.find(b', "trajectory": ', start, end)
    try:
        record: Json = json.loads(content[start:end] if cut < 0 else content[start:cut] + b"}")
        if cut >= 0:
            return record if "finish" in record else None  # earlier releases wrote failed rewards without columns
        is_drop = record["kind"].startswith("dropped: ")
        dropped = {"iteration": record["iteration"], "finish": record["kind"], "excerpt": record["message"]}
        return dropped if is_drop else None
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        return None  # not a line that lightrl wrote
