"""Text files of rows, .jsonl, .json and .csv, also gzipped; what cannot be read is named with file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import mmap
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv")

_BOM = b"\xef\xbb\xbf"
_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_POINTER = b"version https://git-lfs.github.com/"
_LONGEST_FIELD = 2**31 - 1  # of a CSV file; the module's own limit is 128 KiB
_TO_UTF_8 = "It must be UTF-8: convert it with `iconv -f <its encoding> -t utf-8`."


def file_suffix(path: str | Path) -> str:
    """`.jsonl` of `train.jsonl` and of `train.jsonl.gz`."""
    path = Path(path)
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def refuse_pointer(path: Path) -> None:
    """Raises ValueError for what Git LFS leaves in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise ValueError(f"Data file '{path}' is a pointer of Git LFS, not the data. Run `git lfs pull`.")


def mapped(path: Path) -> mmap.mmap | bytes:
    """The content of a text file, mapped into memory, unpacked if it is gzipped; a byte-order mark becomes spaces.

    Raises:
        ValueError: if it is UTF-16, a broken archive or a pointer of Git LFS.
    """
    refuse_pointer(path)
    with path.open("rb") as file:
        start = file.read(3)
        if start[:2] in _UTF_16:
            raise ValueError(f"Data file '{path}' is UTF-16. {_TO_UTF_8}")
        if start[:2] != b"\x1f\x8b" and start != _BOM:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if start else b""  # none can be empty
    with tempfile.TemporaryFile() as copy:
        try:
            with gzip.open(path) if start != _BOM else path.open("rb") as file:
                shutil.copyfileobj(file, copy)
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise ValueError(f"Data file '{path}' cannot be unpacked: {error}. Write it again.") from error
        copy.seek(0)
        if copy.read(3) == _BOM:
            copy.seek(0)
            copy.write(b"   ")
        copy.flush()
        return mmap.mmap(copy.fileno(), 0, access=mmap.ACCESS_READ) if copy.tell() else b""


def parsed_row(line: bytes, where: Callable[[], str]) -> dict[str, Any]:
    """The object of a line of JSON.

    Args:
        where: names the line in messages.

    Raises:
        ValueError: if it is not UTF-8, not JSON, not an object, too deep, or has half a character.
    """
    try:
        row = json.loads(line.decode())
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where()} is not UTF-8 (byte 0x{line[error.start]:02x}). {_TO_UTF_8}") from error
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"{where()} has half a character, {half!r}: a lone surrogate. Remove it.") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where()} is not valid JSON: {_problem(error)}.") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where()} must be a JSON object, got a {type(row).__name__}.")
    return row


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .jsonl file, in order; raises ValueError at the first that is none."""
    content, start, number = mapped(path), 0, 0
    while start < len(content):
        end = content.find(b"\n", start)
        end = len(content) if end < 0 else end
        number += 1
        line = content[start:end]
        if line.strip():
            yield parsed_row(line, lambda number=number: f"Line {number} of '{path}'")  # type: ignore[misc]
        start = end + 1


def read_json(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .json file; raises ValueError if it is not a list of objects."""
    try:
        rows = json.loads(_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ValueError) and str(path) in str(error):
            raise
        raise ValueError(
            f"Data file '{path}' is not valid JSON: {_problem(error)}. If it has one object per line, name it .jsonl."
        ) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"Data file '{path}' must be a JSON list of objects.")
    return iter(rows)


def read_csv(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a .csv file, whose first line names the columns; raises ValueError at a row that does not fit it."""
    csv.field_size_limit(_LONGEST_FIELD)
    reader = csv.DictReader(io.StringIO(_text(path), newline=""), strict=True)
    try:
        names = reader.fieldnames or []
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"Data file '{path}' has two columns {twice[0]!r}. Rename one of them.")
        for row in reader:
            if None in row or None in row.values():
                num = sum(value is not None for value in row.values()) + len(row.get(None) or [None]) - 1
                raise ValueError(
                    f"Line {reader.line_num} of '{path}' has {num} columns, the first line {len(names)}. Quote what "
                    "has a comma or a line break."
                )
            yield dict(row)
    except csv.Error as error:
        raise ValueError(f"Line {reader.line_num} of '{path}' is not valid CSV: {error}. Close its quotes.") from error


def _text(path: Path) -> str:
    content = mapped(path)[:]
    try:
        return content.decode().lstrip()
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        problem = f"Line {number} of '{path}' is not UTF-8 (byte 0x{content[error.start]:02x}). {_TO_UTF_8}"
        raise ValueError(problem) from error


def _problem(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "its lists and objects are nested too deeply"
    return "a number has too many digits" if "set_int_max_str_digits" in str(error) else str(error)
