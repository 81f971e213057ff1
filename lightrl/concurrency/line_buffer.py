"""LineBuffer: the lines of a stream that is read piece by piece, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import aiohttp

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


async def body_of(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """The whole body; None if it is larger, as soon as that is known. The request has the deadline."""
    if response.content_length is not None and response.content_length <= max_bytes:
        return await response.read()
    parts, num_bytes = [], response.content_length or 0
    while num_bytes <= max_bytes and (part := await response.content.readany()):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts) if num_bytes <= max_bytes else None
