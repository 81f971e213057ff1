"""Streams in bounded memory: lines, the body of an HTTP answer, and messages between event loops of two processes."""

from __future__ import annotations

import asyncio
import math
import pickle
import socket
import struct
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


_HEADER = struct.Struct("<?q")  # whether the message is pickled, its length in bytes
_NUMBERS = struct.Struct("<qq")
_BUFFER_BYTES = 1 << 20
_MAX_BYTES = 1 << 36


class BadMessage(Exception):
    """A channel received data that is not one of its messages."""


class Channel:
    """One end; messages arrive in the order in which they were sent. Belongs to the event loop that opened it.

    Sending never waits: what the other process does not read stays in memory here; after its end it is ignored.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        """Owns one end of a `socket.socketpair`, and closes it."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER_BYTES))

    def send(self, *message: object) -> None:
        """Sends a tuple as a pickle: the other process trusts this one."""
        self._write(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), is_pickled=True)

    def send_bytes(self, key: int, number: int, data: bytes) -> None:
        """Sends the tuple of these three without a pickle."""
        self._write(_NUMBERS.pack(key, number) + data, is_pickled=False)

    def _write(self, data: bytes, *, is_pickled: bool) -> None:
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(is_pickled, len(data)) + data)

    async def receive(self) -> tuple[Any, ...] | None:
        """The next message; None once the other process has closed its end, or has ended. Raises BadMessage."""
        data = b""
        try:
            is_pickled, length = _HEADER.unpack(data := await self._reader.readexactly(_HEADER.size))
            if length > _MAX_BYTES:
                raise BadMessage(f"the length {length}")
            data = await self._reader.readexactly(length)
            return tuple(pickle.loads(data)) if is_pickled else (*_NUMBERS.unpack_from(data), data[_NUMBERS.size :])
        except (asyncio.IncompleteReadError, OSError):
            return None
        except Exception as error:  # unpickling raises anything
            raise BadMessage(f"{data[:100]!r} ({error!r})") from error

    def close(self) -> None:
        self._writer.close()


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


# A balancer that has no server just now, or a server that takes no more: the same request may succeed a little later.
BUSY = (408, 425, 429, 502, 503, 504)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """How long an HTTP answer asks to wait, by seconds or a date; 0 if it does not say."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < math.inf else 0.0
