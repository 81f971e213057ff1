"""Rows of a data file or a hub dataset, with errors that name the file and the row.

Data of any size: lines of a .jsonl file are found at the start and parsed when they are read; `datasets` maps Parquet
files and hub datasets into memory, from its cache. Files .json and .csv are read whole (text_files.py). Row numbers in
messages count from 1.
"""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import mmap
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from lightrl.data.lazy import LazySequence
from lightrl.data.text_files import FILE_SUFFIXES, file_suffix, mapped, parsed_row, read_csv, read_json, refuse_pointer

if TYPE_CHECKING:
    from lightrl.data.mixture import DataSource
    from lightrl.trajectory import Prompt

logger = logging.getLogger(__name__)

Row: TypeAlias = dict[str, Any]


class LocatedRow(NamedTuple):
    """A row of a split."""

    row: Row
    source: DataSource
    where: str  # names it in messages
    prompt_id: str  # unique in the split


# What becomes of a row: its prompt, None if it is dropped, what is wrong with it.
Made: TypeAlias = "Prompt | ValueError | None"

_LONGEST_BLANK = 16  # a longer line of spaces is refused as invalid JSON
_PROGRESS_S = 5.0  # between two messages while a large file is scanned


def read_rows(
    source: str,
    *,
    name: str | None = None,
    split: str = "train",
    max_rows: int | None = None,
    arguments: Mapping[str, Any] | None = None,
) -> Sequence[Row]:
    """The first rows of a dataset, each a dict of JSON-able columns, by index.

    Args:
        source: a local `.jsonl`, `.json` (list of objects), `.parquet` or `.csv` file; a hub name or a local dataset
            folder, for `datasets.load_dataset`; or the dotted path of a function that makes rows from `split` and
            `arguments`, such as `my_project.data.riddles`.
        name: the dataset's configuration; for hub names and folders.
        split: the dataset's split; for hub names, folders and functions: a file is one split.
        max_rows: how many to read; None for all.
        arguments: of a function.

    Raises:
        ValueError: if the source does not exist, cannot be read, or has no rows.
    """
    path = Path(source).expanduser()
    function = None if path.exists() else function_of_rows(source)
    if arguments and function is None:
        raise ValueError(
            f"Data {source!r} got arguments {dict(arguments)}, but only functions take arguments. Remove them, or fix "
            "the function's dotted path."
        )
    if function is not None:
        rows: Sequence[Row] = _made_by(function, source, split, max_rows, arguments or {})
    elif path.is_file():
        rows = _read_file(path, max_rows)
    elif path.is_dir() or not _looks_local(source):
        rows = _read_dataset(source, name, split, max_rows)
    else:
        raise ValueError(_missing_file(path))
    if not rows:
        raise ValueError(f"Data {source!r} has no rows.")
    return rows


def require_column(row: Row, column: str, *, where: str) -> Any:
    """The row's value in a column that must not be missing or empty.

    Args:
        where: names the row in the error message, as in `Row 3 of 'train.jsonl'`.

    Raises:
        ValueError: if the column is missing, None or blank.
    """
    value = row.get(column)
    is_empty = value is None or value == [] or (isinstance(value, str) and not value.strip())
    if not is_empty:
        return value
    problem = f"has an empty column {column!r}" if column in row else f"has no column {column!r}"
    columns = ", ".join(repr(key) for key in row) or "none"
    raise ValueError(
        f"{where} {problem} (its columns: {columns}). Fix the row, or set prompt_column or answer_column to another "
        "column."
    )


def renamed(row: Row, columns: Mapping[str, str], *, where: str) -> Row:
    """The row with columns renamed, given new name → old name; raises ValueError if an old column is missing."""
    for new, old in columns.items():
        if old not in row:
            raise ValueError(
                f"{where} has no column {old!r} for columns={{{new!r}: {old!r}}} (its columns: "
                f"{', '.join(map(repr, row))})."
            )
    kept = {key: value for key, value in row.items() if key not in columns.values()}
    return kept | {new: row[old] for new, old in columns.items()}


def function_of_rows(source: str) -> Callable[..., Any] | None:
    """The function at a dotted path; None for names of files and hub datasets."""
    module, _, name = source.rpartition(".")
    if not module or not all(part.isidentifier() for part in source.split(".")) or file_suffix(source) in FILE_SUFFIXES:
        return None
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise ValueError(f"Data {source!r} cannot be imported: {error}.") from error
    return function if callable(function) else None


def _made_by(
    function: Callable[..., Any], source: str, split: str, max_rows: int | None, arguments: Mapping[str, Any]
) -> list[Row]:
    try:
        rows = list(islice(function(split=split, **arguments), max_rows))
    except TypeError as error:
        raise ValueError(
            f"Data {source!r} with split={split!r} and arguments={dict(arguments)} raised {error!r}. The function must "
            "take `split` and these arguments and return dicts."
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"Data {source!r} must return dicts of columns, got rows that are not dicts.")
    return [json_able(dict(row)) for row in rows]


def _read_file(path: Path, max_rows: int | None) -> Sequence[Row]:
    suffix = file_suffix(path)
    if suffix == ".jsonl":
        return _JsonLines(path, max_rows)
    if suffix == ".json":
        return list(islice(read_json(path), max_rows))
    if suffix == ".csv":
        return list(islice(read_csv(path), max_rows))
    if suffix == ".parquet":
        refuse_pointer(path)
        return _read_dataset("parquet", None, "train", max_rows, data_files=str(path))
    raise ValueError(
        f"Data file '{path}' must end in one of {', '.join(FILE_SUFFIXES)}, not {path.suffix!r}. Convert or rename it."
    )


class _JsonLines(LazySequence[Row]):
    """The objects of a .jsonl file, each parsed when it is read; blank lines do not count.

    The file is mapped into memory, and an index holds 8 bytes for each line.
    """

    def __init__(self, path: Path, max_rows: int | None = None) -> None:
        self.path = path
        self._content = mapped(path)
        self._starts = _line_starts(self._content, str(path), max_rows)

    def __len__(self) -> int:
        return len(self._starts)

    def make(self, index: int) -> Row:
        start = self._starts[index]
        end = self._content.find(b"\n", start)
        line = self._content[start : len(self._content) if end < 0 else end]
        return parsed_row(line, lambda: self._where(start))

    def _where(self, start: int) -> str:
        number = self._content[:start].count(b"\n") + 1
        return f"Line {number} of '{self.path}'"


def _line_starts(content: mmap.mmap | bytes, name: str, max_rows: int | None) -> array[int]:
    """The offsets of the lines that are not blank."""
    starts = array("Q")
    start = 0
    said_at = time.monotonic()
    while start < len(content) and (max_rows is None or len(starts) < max_rows):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if end - start > _LONGEST_BLANK or content[start:end].strip():
            starts.append(start)
        start = end + 1
        if len(starts) % 65536 == 0 and time.monotonic() - said_at > _PROGRESS_S:
            said_at = time.monotonic()
            logger.info("Reading %s: %d of %d MiB, %d rows.", name, start >> 20, len(content) >> 20, len(starts))
    return starts


def _read_dataset(
    source: str, name: str | None, split: str, max_rows: int | None, *, data_files: str | None = None
) -> Sequence[Row]:
    import datasets

    try:
        dataset = datasets.load_dataset(source, name, split=split, data_files=data_files)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        if data_files is not None:
            raise ValueError(f"Data file {data_files!r} is not valid Parquet: {error.__cause__ or error}.") from error
        raise ValueError(dataset_problem(source, name, split, error)) from error
    return _TableRows(dataset, max_rows)


def dataset_problem(source: str, name: str | None, split: str, error: BaseException) -> str:
    """Why `datasets` cannot load a source, and what to do."""
    return (
        f"Dataset {source!r} (name={name!r}, split={split!r}) cannot be loaded: {error}. It must be a local "
        f"{', '.join(FILE_SUFFIXES)} file or a hub name. Fix the name, or go online."
    )


class _TableRows(LazySequence[Row]):
    """The rows of a `datasets.Dataset`, which stay in its memory-mapped file."""

    def __init__(self, dataset: Any, max_rows: int | None) -> None:
        self._dataset = dataset
        self._num_rows = len(dataset) if max_rows is None else min(max_rows, len(dataset))

    def __len__(self) -> int:
        return self._num_rows

    def make(self, index: int) -> Row:
        return json_able(dict(self._dataset[index]))


def json_able(row: Row) -> Row:
    """The row with dates and the like as text: fields go to reward workers as JSON."""
    try:
        json.dumps(row)
    except TypeError:
        return dict(json.loads(json.dumps(row, default=str)))
    return row


def _looks_local(source: str) -> bool:
    is_path = source.startswith((".", "/", "~")) or source.count("/") > 1
    return is_path or file_suffix(source) in FILE_SUFFIXES


def _missing_file(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(entry.name for entry in folder.iterdir())
    nearest = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    nearest = nearest or [name for name in names if name.endswith(FILE_SUFFIXES)][:5] or names[:5]
    content = f"'{folder}' contains {', '.join(nearest)}" if nearest else f"the folder '{folder}' is empty"
    return f"Data file '{path}' does not exist. It must be a {', '.join(FILE_SUFFIXES)} file or a hub name; {content}."
