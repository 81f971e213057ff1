"""Rows of a data file, a hub dataset or a function, by index, with errors that name the file and the line or row.

Data may have any size: lines of a .jsonl file are located at the start and parsed when read; `datasets` maps Parquet,
Arrow and CSV files and hub datasets into memory, from its cache. CSV values remain text. A .json file is read whole. A
.jsonl file above 64 MiB is mapped into memory, so it must not change in place during a run. Text files may be gzipped.
Messages name a row in a .jsonl or .csv file by its line, and other rows by number; both count from 1.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import logging
import math
import mmap
import re
import shutil
import tempfile
import time
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import nearest_files
from lightrl.checks.printable import count_text
from lightrl.trajectory import JsonMapping, JsonObject

if TYPE_CHECKING:
    from lightrl.data.mixture import DataSource

logger = logging.getLogger(__name__)

Row: TypeAlias = JsonObject
NamedRow: TypeAlias = tuple[str, Row | ValueError]  # a row's name for error messages, and the row or its error

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow", ".csv")

_BOM = b"\xef\xbb\xbf"
_BREAK = re.compile("\r\n|\r|\n")
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_POINTER = b"version https://git-lfs.github.com/"
_MAX_COPIED = 64 * 2**20  # bytes; a smaller text file is read whole, so later changes to the file have no effect
_LONGEST_FIELD = 2**31 - 1  # bytes in a CSV file; the csv module's default is 128 KiB
_LONGEST_BLANK = 16  # a longer line is never skipped as blank
_PROGRESS_S = 5.0  # interval between log messages while a large file is scanned
_TO_UTF_8 = "It must be UTF-8: convert it with `iconv -f <its encoding> -t utf-8`."


@dataclass(eq=False)
class Rows(Sequence[Row]):
    """Rows by index; each is read when it is requested, and not cached."""

    num_rows: int
    read: Callable[[int], Row]
    name: Callable[[int], str] | None = None  # names a row in messages; None uses its number

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: Any) -> Any:
        """Returns a row, or a list of rows for a slice."""
        selected = range(self.num_rows)[index]
        return [self.read(row) for row in selected] if isinstance(selected, range) else self.read(selected)


def read_rows(
    source: str,
    *,
    name: str | None = None,
    split: str = "train",
    max_rows: int | None = None,
    arguments: JsonMapping | None = None,
) -> Sequence[Row]:
    """Returns the first rows of a dataset by index, each a dict of JSON-able columns.

    Args:
        source: a local `.jsonl`, `.json` (list of objects), `.parquet`, `.arrow` or `.csv` file; a hub name or a local
            dataset folder, for `datasets.load_dataset`; a folder of tasks; or the dotted path to a function that makes
            rows from `split` and `arguments`, for example `my_project.data.riddles`.
        name: the dataset's configuration; for hub names and folders.
        split: the dataset's split; for hub names, folders and functions, since a file is one split.
        max_rows: how many rows to read; None for all.
        arguments: keyword arguments for a function.

    Raises:
        ValueError: if the source does not exist, cannot be read, or has no rows.
    """
    path = Path(source).expanduser()
    if (function := function_of_rows(source)) is not None:
        rows: Sequence[Row] = _rows_of_function(function, source, split, max_rows, arguments or {})
    elif path.is_file():
        rows = _read_file(path, max_rows)
    elif path.is_dir() or not _looks_local(source):
        rows = _mapped_rows(load_dataset(source, name, split), max_rows)
    else:
        needed = f"It must be a {', '.join(FILE_SUFFIXES)} file or a hub name. {nearest_files(path, *FILE_SUFFIXES)}"
        raise ValueError(f"Data file '{path}' does not exist. {needed}")
    if not rows:
        raise ValueError(f"Data {source!r} has no rows.")
    return rows


def check_source(source: DataSource) -> None:
    """Raises ValueError for a setting that has no effect on this kind of source."""
    path = Path(source.source).expanduser()
    kind, allowed = "a hub dataset or a folder: only functions and task folders take arguments", ["name", "split"]
    if function_of_rows(source.source) is not None:
        kind, allowed = ("a task folder", ["arguments"]) if path.is_dir() else ("a function", ["split", "arguments"])
    elif file_suffix(path) in FILE_SUFFIXES:
        kind, allowed = "a file: only functions and task folders take arguments, and only hub datasets have a name", []
    for name in ("name", "split", "arguments"):
        if name not in allowed and (value := getattr(source, name)):
            raise ValueError(f"{name}={value!r} of data {source.source!r} has no effect on {kind}. Remove it.")


def column_of(row: Row, column: str) -> object:
    """Returns the value of a column or a dotted path like `reward_model.ground_truth`; raises KeyError if missing."""
    name, _, rest = column.partition(".")
    is_path = column not in row and rest and isinstance(row.get(name), dict)
    return column_of(row[name], rest) if is_path else row[column]


def require_column(row: Row, column: str, setting: str, *, where: str, may_be_empty: bool = False) -> object:
    """Returns the value of a column or a dotted path; raises ValueError if it is missing, or None, NaN, [] or blank.

    Args:
        setting: the setting that names the column.
        where: names the row in the error message, as in `Row 3 of 'train.jsonl'`.
    """
    problem = f"has an empty column {column!r}"
    try:
        value = column_of(row, column)
        is_blank = is_missing(value) or value == [] or (isinstance(value, str) and not value.strip())
        if may_be_empty or not is_blank:
            return value
    except KeyError:
        problem = f"has no column {column!r}"
    columns = ", ".join(repr(key) for key in row) or "none"
    raise ValueError(
        f"{where} {problem} (its columns: {columns}). Fix the row, or set {setting} to another column, or to the "
        "dotted path to a value in one."
    )


def is_missing(value: object) -> bool:
    """Whether the value is an empty cell: None, or pandas' NaN."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def rename_columns(row: Row, columns: Mapping[str, str], *, where: str) -> Row:
    """Renames columns, given as new name → old name or dotted path; raises ValueError if an old column is missing."""
    result = {key: value for key, value in row.items() if key not in columns.values()}
    for new, old in columns.items():
        try:
            result[new] = column_of(row, old)
        except KeyError as error:
            problem = f"has no column {old!r} for columns={{{new!r}: {old!r}}}"
            raise ValueError(f"{where} {problem} (its columns: {', '.join(map(repr, row))}).") from error
    return result


def function_of_rows(source: str) -> Callable[..., Any] | None:
    """Returns the function at a dotted path, or one that reads a folder of tasks; None for files and hub datasets."""
    if (path := Path(source).expanduser()).exists():
        return partial(entry_point("task folders"), folder=source) if any(path.glob("*/task.toml")) else None
    module, _, name = source.rpartition(".")
    if not module or not all(part.isidentifier() for part in source.split(".")) or file_suffix(source) in FILE_SUFFIXES:
        return None
    try:
        function = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return None
        raise ValueError(f"The data function {source!r} cannot be imported: {error}.") from error
    return function if callable(function) else None


def _rows_of_function(
    function: Callable[..., Any], source: str, split: str, max_rows: int | None, arguments: JsonMapping
) -> list[Row]:
    try:
        rows = list(islice(function(split=split, **arguments), max_rows))
    except TypeError as error:
        raise ValueError(
            f"Data {source!r} with split={split!r} and arguments={dict(arguments)} raised {error!r}. The function must "
            "accept `split` and these arguments and return dicts."
        ) from error
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"Data {source!r} must return dicts of columns, got rows that are not dicts.")
    return [json_able(dict(row)) for row in rows]


def _read_file(path: Path, max_rows: int | None) -> Sequence[Row]:
    suffix = file_suffix(path)
    if suffix == ".jsonl":
        content = _map_file(path)
        starts, skipped = array("Q"), array("Q")  # each row's offset; for each blank line, the number of rows before it
        for number, start in islice(_line_starts(content, path), max_rows):
            skipped.extend([len(starts)] * (number - 1 - len(starts) - len(skipped)))
            starts.append(start)

        def name(index: int) -> str:
            return f"Line {index + 1 + bisect_right(skipped, index)} of '{path}'"

        return Rows(len(starts), lambda index: _row_at(content, starts[index], name(index)), name)
    if suffix == ".json":
        return [row for _, row in islice(read_json(path), max_rows) if isinstance(row, dict)]
    if suffix == ".csv":
        return _mapped_csv(path, max_rows)
    if suffix in FILE_SUFFIXES:
        refuse_pointer(path)
        return _mapped_rows(load_dataset(suffix[1:], None, "train", data_files=str(path)), max_rows)
    raise ValueError(f"Data file '{path}' must end in {', '.join(FILE_SUFFIXES)}, not {path.suffix!r}. Convert it.")


def _mapped_csv(path: Path, max_rows: int | None) -> Sequence[Row]:
    import datasets

    if next(read_csv(path), None) is None:
        return []  # `datasets` refuses a file without rows
    stat = path.stat()
    version = f"{path.resolve()}, {stat.st_size} bytes of {stat.st_mtime_ns}"
    arguments = {"path": path, "max_rows": max_rows, "version": version}
    try:
        dataset = datasets.Dataset.from_generator(_csv_rows, gen_kwargs=arguments)
    except datasets.exceptions.DatasetGenerationError as error:
        raise ValueError(str(error.__cause__ or error)) from error

    def read(index: int) -> Row:
        row: Row | str = json.loads(dataset[index]["row"])
        if isinstance(row, str):
            raise ValueError(row)
        return row

    return Rows(len(dataset), read, lambda index: str(dataset[index]["name"]))


def _csv_rows(path: Path, max_rows: int | None, version: str) -> Iterator[dict[str, str]]:
    """Yields each row's name, and the row or its error as JSON; `version` keeps `datasets` from using a stale cache."""
    for name, row in islice(read_csv(path), max_rows):
        yield {"name": name, "row": json.dumps(row if isinstance(row, dict) else str(row))}


def _mapped_rows(dataset: Any, max_rows: int | None) -> Rows:
    """Returns the rows of a `datasets.Dataset`, which stay in its memory-mapped file."""
    num_rows = len(dataset) if max_rows is None else min(max_rows, len(dataset))
    return Rows(num_rows, lambda index: json_able(without_padding(dict(dataset[index]))))


def load_dataset(
    source: str, name: str | None, split: str, *, data_files: str | None = None, streaming: bool = False
) -> Any:
    """Calls `datasets.load_dataset`; raises a ValueError that names the source or file if it cannot be loaded."""
    import datasets

    try:
        return datasets.load_dataset(source, name, split=split, data_files=data_files, streaming=streaming)
    except (OSError, ValueError, IndexError, datasets.exceptions.DatasetsError) as error:  # "/" raises IndexError
        if data_files is not None:
            problem = f"cannot be read as {source.title()}: {error.__cause__ or error}"
            raise ValueError(f"Data file {data_files!r} {problem}.") from error
        problem = f"Dataset {source!r} (name={name!r}, split={split!r}) cannot be loaded: {error}. "
        needed = f"It must be a local {', '.join(FILE_SUFFIXES)} file or a hub name. Fix the name, or go online."
        raise ValueError(problem + needed) from error


def json_able(row: Row) -> Row:
    """Returns the row with dates and similar values as text, because reward workers get fields as JSON."""
    try:
        json.dumps(row)
    except TypeError:
        return dict(json.loads(json.dumps(row, default=str)))
    return row


def without_padding(value: Any, *, is_listed: bool = False) -> Any:
    """Removes the null values that Arrow adds so that all dicts in a list, such as messages, have the same keys."""
    if isinstance(value, list):
        return [without_padding(item, is_listed=True) for item in value]
    if not isinstance(value, dict):
        return value
    items = ((key, item) for key, item in value.items() if item is not None or not is_listed)
    return {key: without_padding(item, is_listed=is_listed) for key, item in items}


def _looks_local(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or file_suffix(source) in FILE_SUFFIXES


def file_suffix(path: str | Path) -> str:
    """Returns `.jsonl` for `train.jsonl` and for `train.jsonl.gz`."""
    path = Path(path)
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def refuse_pointer(path: Path) -> None:
    """Raises ValueError if the file is a Git LFS pointer."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"Data file '{path}' is a Git LFS pointer, not the data. Run `git lfs pull`.")


def _map_file(path: Path) -> mmap.mmap | bytes:
    """Returns a text file's content, decompressed if it is gzipped, as bytes, or as a memory map if it is large."""
    refuse_pointer(path)
    with path.open("rb") as file:
        start = file.read(3)
        if start[:2] in _UTF_16:
            raise ValueError(f"Data file '{path}' is UTF-16. {_TO_UTF_8}")
        if start[:2] != b"\x1f\x8b":  # not gzipped
            if path.stat().st_size <= _MAX_COPIED:
                return start + file.read()
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    with tempfile.TemporaryFile() as copy:
        try:
            with gzip.open(path) as file:
                shutil.copyfileobj(file, copy)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise ValueError(f"Data file '{path}' cannot be unpacked: {error}. Create it again.") from error
        copy.flush()
        return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) if copy.tell() else b""


def read_lines(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of a .jsonl file, in order, and a ValueError for each invalid line."""
    content = _map_file(path)
    for number, start in _line_starts(content, path):
        name = f"Line {number} of '{path}'"
        try:
            yield name, _row_at(content, start, name)
        except ValueError as error:
            yield name, error


def _line_starts(content: mmap.mmap | bytes, path: Path) -> Iterator[tuple[int, int]]:
    """Yields the number (from 1) and the offset of each line that is not blank."""
    start, num_lines, reported_at = 0, 0, time.monotonic()
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        if end - start > _LONGEST_BLANK or content[start:end].removeprefix(_BOM).strip():
            yield num_lines + 1, start
        start = end + 1
        num_lines += 1
        if num_lines % 65536 == 0 and time.monotonic() - reported_at > _PROGRESS_S:
            reported_at = time.monotonic()
            logger.info("Reading %s: %d of %d MiB, %d lines.", path, start >> 20, len(content) >> 20, num_lines)


def _row_at(content: mmap.mmap | bytes, start: int, name: str) -> Row:
    """Parses the line that starts at an offset; raises ValueError if it is not a JSON object."""
    end = content.find(b"\n", start)
    try:
        return _parse_row(content[start : len(content) if end < 0 else end])
    except ValueError as error:
        raise ValueError(f"{name} {error}") from error


def _parse_row(line: bytes) -> Row:
    """Parses a line; raises ValueError if it is not UTF-8 or JSON, not an object, too deep, or has lone surrogates."""
    try:
        row = json.loads(line.removeprefix(_BOM).decode())
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte 0x{error.object[error.start]:02x}). {_TO_UTF_8}") from error
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start]
        raise ValueError(f"contains a lone surrogate, {surrogate!r}. Remove it.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not valid JSON: {_problem(error)}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, got a {type(row).__name__}.")
    return row


def read_json(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of a .json file; raises ValueError if it is not a list of objects."""
    text = _text(path)
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"Data file '{path}' is not valid JSON: {_problem(error)}. If it has one object per line, name it .jsonl."
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"Data file '{path}' must be a JSON list of objects.")
    return ((f"Row {number} of '{path}'", row) for number, row in enumerate(rows, start=1))


def read_csv(path: Path) -> Iterator[NamedRow]:
    """Yields the rows of a .csv file, and a ValueError for each row with more or fewer columns than the first line.

    Raises ValueError if two columns have the same name, or for invalid CSV, after which no row can be read.
    """
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        names = reader.fieldnames or []
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Data file '{path}' has two columns named {repeated[0]!r}. Rename one of them.")
        for row in reader:
            extra: Any = row.pop(None, [])  # values beyond the named columns
            values = [value for value in (*row.values(), *extra) if value is not None]
            name = f"Line {reader.line_num - sum(len(_BREAK.findall(value)) for value in values)} of '{path}'"
            num = count_text(len(values), "column")
            wrong = f"{name} has {num}, but the first line has {len(names)}. Quote values with commas or line breaks."
            yield name, dict(row) if len(values) == len(names) else ValueError(wrong)
    except csv.Error as error:
        raise ValueError(f"Line {reader.line_num + 1} of '{path}' is not valid CSV: {error}. Close quotes.") from error


def _text(path: Path) -> str:
    content = _map_file(path)[:]
    try:
        return content.removeprefix(_BOM).decode().lstrip()
    except UnicodeDecodeError as error:
        number = error.object[: error.start].count(b"\n") + 1
        problem = f"Line {number} of '{path}' is not UTF-8 (byte 0x{error.object[error.start]:02x}). {_TO_UTF_8}"
        raise ValueError(problem) from error


def _problem(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "its lists and objects are nested too deeply"
    return "a number has too many digits" if "set_int_max_str_digits" in str(error) else str(error)


TEXT_READERS: dict[str, Callable[[Path], Iterator[NamedRow]]] = {
    ".jsonl": read_lines,
    ".json": read_json,
    ".csv": read_csv,
}
