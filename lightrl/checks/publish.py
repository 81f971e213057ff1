"""publish: a file or folder gets its name when it is complete, in one step; SHA-256 sums show whether it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

SUMS_FILE = "sha256sums.txt"


def publish(part: Path, place: Path) -> None:
    """Renames a complete file or folder to `place` in one step, so what has that name is always whole.

    The names are on the disk when this returns; the files' contents are synced by their writers.
    """
    if part.is_dir():
        _sync_names(part)
    _rename(part, place)
    _sync_names(place.parent)


def restore(place: Path) -> None:
    """Gives a folder its name back if a `publish` of a system without exchanging renames was killed in the middle."""
    if not place.exists() and _replaced(place).exists():
        _replaced(place).rename(place)


def sync_files(folder: Path) -> None:
    """Waits until the contents of all files in a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _replaced(place: Path) -> Path:
    return place.with_name(f"{place.name}.replaced")


def _sync_names(folder: Path) -> None:
    with contextlib.suppress(OSError):  # a file system that cannot sync folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _rename(part: Path, place: Path) -> None:
    if place.is_dir() and not place.is_symlink():  # a rename cannot replace a folder that is not empty
        if not _swap(part, place):
            # Two steps: if killed between them, the old folder stays next to the new one, and `restore` returns it.
            old = _replaced(place)
            remove_path(old)
            place.rename(old)
            part.rename(place)
            remove_path(old)
            return
        remove_path(part)
    elif part.is_dir() and (place.is_symlink() or place.exists()) and _swap(part, place):
        remove_path(part)
    else:
        if part.is_dir():
            place.unlink(missing_ok=True)
        part.replace(place)


def remove_path(path: Path) -> None:
    """Removes a file, a folder or a link, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swap(left: Path, right: Path) -> bool:
    """Exchanges two names in one step; False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    with contextlib.suppress(OSError, AttributeError):
        rename = ctypes.CDLL(None, use_errno=True).renameat2
        return bool(rename(here, os.fsencode(left), here, os.fsencode(right), exchange) == 0)
    return False


def write_sums(folder: Path, names: Iterable[str] | None = None) -> None:
    """Writes the sums of these files of a folder; None means all of them."""
    chosen = sorted(path.name for path in folder.iterdir()) if names is None else names
    with (folder / SUMS_FILE).open("w", encoding="utf-8") as file:
        file.writelines(f"{_sum_of(folder / name)}  {name}\n" for name in chosen)
        file.flush()
        os.fsync(file.fileno())


def check_sums(folder: Path, fix: str) -> None:
    """Raises ValueError, with the `fix` at its end, for a file that is missing or has other bytes than its sum says."""
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
        while chunk := stream.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
