"""SHA-256 sums of a folder's files, as `sha256sum` writes them: whether a file still has the bytes it was given."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SUMS_FILE = "sha256sums.txt"
_CHUNK_BYTES = 2**20


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Writes the sums of these files of a folder; None means all of them."""
    chosen = sorted(path.name for path in folder.iterdir()) if names is None else names
    with (folder / SUMS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(f"{_sum_of(folder / name)}  {name}\n" for name in chosen)
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path, fix: str) -> None:
    """Compares a folder's files with their sums; does nothing if it has none.

    Args:
        fix: what to do, the end of the message.

    Raises:
        ValueError: if a file is missing, or has other bytes than were written; it names the file.
    """
    if not (folder / SUMS_FILE).is_file():
        return
    for line in (folder / SUMS_FILE).read_text(encoding="utf-8", errors="replace").splitlines():
        expected_sum, _, name = line.partition("  ")
        file = folder / name
        if not file.is_file() or _sum_of(file) != expected_sum:
            state = "has other bytes than were written" if file.is_file() else "is missing"
            raise ValueError(f"{str(file)!r} {state}, by its SHA-256 in {SUMS_FILE}. {fix}")


def _sum_of(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
