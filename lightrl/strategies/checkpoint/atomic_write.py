"""Writes files and folders completely or not at all: next to the target, then renamed. Can write in a thread."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lightrl.checks.files import remove_path, write_problem
from lightrl.concurrency.in_thread import submit

if TYPE_CHECKING:
    from typing_extensions import Buffer

log = logging.getLogger(__name__)

_STEP_S = 0.1  # seconds between checks of a pending write
_WARN_EVERY_S = 60.0
_SYNC_BYTES = 64 * 2**20


class Progress:
    """The progress of a write to disk, for a thread that waits for it."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_at_disk = 0  # how deeply `at_disk` is nested; 0 while the writer waits for other ranks

    @contextlib.contextmanager
    def at_disk(self) -> Iterator[None]:
        self.num_at_disk += 1
        try:
            yield
        finally:
            self.num_at_disk -= 1


class TrackedFile(io.FileIO):
    """A new file that reports progress and syncs as it grows, so that the final sync is short."""

    def __init__(self, path: Path, progress: Progress) -> None:
        super().__init__(path, "wb")
        self._progress = progress
        self._num_unsynced = 0

    def write(self, data: Buffer) -> int:
        num = super().write(data) or 0
        self._num_unsynced += num
        if self._num_unsynced >= _SYNC_BYTES:
            os.fsync(self.fileno())
            self._num_unsynced = 0
        self._progress.num_bytes += num
        return num


@dataclass(frozen=True)
class _Write:
    place: Path
    progress: Progress
    done: Future[None]


class BackgroundWrites:
    """Runs writes one after another in daemon threads, so that a hung disk blocks neither Ctrl-C nor the exit.

    A write may take any time while the disk makes progress. Without progress for `stall_s` (`stall_at_end_s` while an
    error or Ctrl-C is ending the run), the write fails and ends the run. At most two writes, each with a copy of the
    state, are pending.
    """

    def __init__(self, *, stall_s: float = 600.0, stall_at_end_s: float = 60.0) -> None:
        self._stall_s = stall_s
        self._stall_at_end_s = stall_at_end_s
        self._pending: deque[_Write] = deque()
        self._hung: _Write | None = None  # abandoned, but its thread may still run
        self._last: Future[None] | None = None
        self._has_failed = False

    def add(self, place: Path, write: Callable[[Progress], None]) -> None:
        """Queues `write`; waits while two other writes are pending. Raises the error of a failed earlier write."""
        while len(self._pending) > 1 or (self._pending and self._pending[0].done.done()):
            self._finish_first()
        self._submit(place, write)

    def run(self, place: Path, write: Callable[[Progress], None]) -> None:
        """Runs `write` after all pending writes, and waits for it; raises the first error."""
        self._submit(place, write)
        self.wait()

    def remove(self, path: str | Path) -> None:
        """Removes a checkpoint after the pending writes, since until then it may be the last complete one."""

        def remove(progress: Progress) -> None:
            if not self._has_failed:
                with progress.at_disk():
                    remove_path(Path(path))

        if self._pending:
            self._submit(Path(path), remove)
        else:
            remove(Progress())

    def wait(self) -> None:
        """Waits until everything is written; raises the first error."""
        while self._pending:
            self._finish_first()

    def _submit(self, place: Path, task: Callable[[Progress], None]) -> None:
        """Starts a thread that waits for the previous write and then runs `task`."""
        if self._hung is not None and not self._hung.done.done():
            raise _stall_error(place, f"an earlier write to {self._hung.place} is still hanging")
        progress, before = Progress(), self._last

        def work() -> None:
            if before is not None:
                wait([before])
            try:
                task(progress)
            except BaseException:  # re-raised for the thread that waits for this write
                self._has_failed = True
                raise

        self._last = submit(work, name="lightrl-checkpoint")
        self._pending.append(_Write(place, progress, self._last))

    def _finish_first(self) -> None:
        """Waits for the first write and raises its error; the write stays pending if Ctrl-C interrupts the wait."""
        self._wait_for(self._pending[0])
        self._pending.popleft().done.result()

    def _wait_for(self, write: _Write) -> None:
        """Waits in steps, so that signals are handled. Warns if the disk hangs, and later abandons the write."""
        is_ending = sys.exc_info()[0] is not None  # called while an error or Ctrl-C is handled
        limit_s = self._stall_at_end_s if is_ending else self._stall_s
        stalled_s, num_bytes, warns_at_s = 0.0, -1, _WARN_EVERY_S
        while not wait([write.done], _STEP_S).done:
            progress = write.progress
            if progress.num_bytes != num_bytes or not progress.num_at_disk:  # it waits for other ranks
                stalled_s, num_bytes, warns_at_s = 0.0, progress.num_bytes, _WARN_EVERY_S
                continue
            stalled_s += _STEP_S  # counts waits, not clock time, which passes while the process is suspended
            if stalled_s >= limit_s:
                self._hung = write
                self._pending.clear()
                raise _stall_error(write.place, f"the disk has accepted no data for {limit_s:g} s")
            if stalled_s >= warns_at_s:
                log.warning("Checkpoint %s: the disk has accepted no data for %.0f s.", write.place, stalled_s)
                warns_at_s += _WARN_EVERY_S


def _stall_error(place: Path, reason: str) -> OSError:
    return OSError(
        f"Checkpoint {place} was not written: {reason}. Check the disk, or set a different default_root_dir. Earlier "
        "checkpoints, if any, are intact."
    )


def write_error(error: BaseException, place: Path, requirement: str, num_bytes: int | None = None) -> OSError:
    """Builds the error for a failed checkpoint write; `requirement` is what the disk needs besides space."""
    return OSError(
        f"Checkpoint {place} could not be written: {write_problem(error, place, num_bytes)}. The disk needs space and "
        f"{requirement}. Free some space, or set a different default_root_dir. Earlier checkpoints, if any, are intact."
    )


@contextlib.contextmanager
def logged_behind_failure() -> Iterator[None]:
    """Logs an OSError from inside the context, instead of raising it, if an earlier error (not Ctrl-C) ends the run."""
    failure = sys.exc_info()[1]
    try:
        yield
    except OSError as error:
        if not isinstance(failure, Exception):
            raise
        log.error("%s", error)
