"""Files and folders that are whole or absent: written beside their place, then renamed; in the background if asked."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from lightrl.checks.disk_errors import write_problem


class BackgroundWrites:
    """Runs writes one after another in a thread while training continues; the next call raises their errors.

    At most two wait, so that no more than two copies of the state are in memory.
    """

    def __init__(self) -> None:
        self._pending: deque[Future[None]] = deque()
        self._thread: ThreadPoolExecutor | None = None
        self._has_failed = False

    def add(self, write: Callable[[], None]) -> None:
        """Queues `write`; waits while two others are pending. Raises the error of an earlier one."""
        while len(self._pending) > 1 or (self._pending and self._pending[0].done()):
            self._pending.popleft().result()
        self._submit(write)

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint after the pending writes: until then it may be the last whole one."""

        def remove() -> None:
            if not self._has_failed:
                remove_checkpoint(Path(path))

        if self._pending:
            self._submit(remove)
        else:
            remove()

    def wait(self) -> None:
        """Waits until everything is written; raises the first error."""
        try:
            while self._pending:
                self._pending.popleft().result()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._thread = None

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "checkpoint")
        future = self._thread.submit(task)
        future.add_done_callback(self._note_failure)  # runs before the next task starts
        self._pending.append(future)

    def _note_failure(self, future: Future[None]) -> None:
        self._has_failed = self._has_failed or future.exception() is not None


def write_error(error: BaseException, place: Path, requirement: str, num_bytes: int | None = None) -> OSError:
    """The error to raise if a checkpoint could not be written; `requirement` is what the disk needs besides space."""
    return OSError(
        f"Checkpoint {place} could not be written: {write_problem(error, place, num_bytes)}. The disk needs space and "
        f"{requirement}. Free some space, or set another default_root_dir. An earlier checkpoint there is still whole."
    )


def publish(part: Path, place: Path) -> None:
    """Renames a complete file or folder to `place` in one step, so what has that name is always whole."""
    if place.is_dir() and not place.is_symlink():  # a rename cannot replace a folder that is not empty
        if not _swap(part, place):
            # Two steps: if killed between them, the old folder is left beside its place.
            old = place.with_name(f"{place.name}.replaced")
            remove_checkpoint(old)
            place.rename(old)
            part.rename(place)
            remove_checkpoint(old)
            return
        remove_checkpoint(part)
    elif part.is_dir() and (place.is_symlink() or place.exists()) and _swap(part, place):
        remove_checkpoint(part)
    else:
        if part.is_dir():
            place.unlink(missing_ok=True)
        part.replace(place)


def write_whole(place: Path, text: str) -> None:
    """Writes a small file that others may read at any moment."""
    part = place.with_name(f"{place.name}.part")
    part.write_text(text, encoding="utf-8", errors="backslashreplace")
    part.replace(place)


def remove_checkpoint(path: Path) -> None:
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
