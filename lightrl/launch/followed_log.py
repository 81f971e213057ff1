"""FollowedLog: a growing log file, shown line by line with a prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lightrl.concurrency.line_buffer import LineBuffer

_READ_BYTES = 1 << 20


class FollowedLog:
    """Shows what is appended to a file from now on, or `from_start`.

    Args:
        path: need not exist yet.
        prefix: before each line.
        write: gets the lines.
    """

    def __init__(self, path: Path, prefix: str, write: Callable[[str], object], *, from_start: bool = False) -> None:
        self._path, self._prefix, self._write = path, prefix, write
        self._position = path.stat().st_size if path.exists() and not from_start else 0
        self._buffer = LineBuffer()

    def follow(self) -> None:
        """Shows the lines that are complete by now."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            while new := file.read(_READ_BYTES):
                self._position += len(new)
                for line in self._buffer.lines(new):
                    self._write(f"{self._prefix}{line.decode(errors='replace')}\n")
