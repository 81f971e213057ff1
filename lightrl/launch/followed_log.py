"""FollowedLog: a growing log file, shown line by line with a prefix."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


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
        self._rest = b""  # of a line whose end has not come

    def follow(self) -> None:
        """Shows the lines that are complete by now."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            new = file.read()
        self._position += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._write(f"{self._prefix}{line.decode(errors='replace')}\n")
