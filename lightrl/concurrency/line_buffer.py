"""LineBuffer: the lines of a stream that is read piece by piece, in bounded memory."""

from __future__ import annotations

_MAX_LINE_BYTES = 1 << 16


class LineBuffer:
    """Keeps the start of a line whose end has not come; from 64 KiB on it is a line of its own."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """The lines that end in this next piece of the stream; b"" is its end, and ends the last line."""
        if b"\n" not in data and 0 < len(data) < _MAX_LINE_BYTES - len(self._rest):
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= _MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        return lines
