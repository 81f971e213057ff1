"""Reads lines and HTTP bodies in bounded memory, and exchanges messages between the event loops of two processes."""

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
    """A channel received data that is not a valid message."""


class Channel:
    """One end of a channel; belongs to the event loop that opened it. Messages arrive in the order they were sent.

    Sending never waits. Unread messages stay in this process's memory and are dropped when the other process exits.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        """Opens a channel on one end of a `socket.socketpair`; `close` closes that end."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER_BYTES))

    def send(self, *message: object) -> None:
        """Pickles and sends a tuple; the other process trusts this one."""
        self._write(pickle.dumps(message, pickle.HIGHEST_PROTOCOL), is_pickled=True)

    def send_bytes(self, key: int, number: int, data: bytes) -> None:
        """Sends these three values as a tuple without pickling them."""
        self._write(_NUMBERS.pack(key, number) + data, is_pickled=False)

    def _write(self, data: bytes, *, is_pickled: bool) -> None:
        if not self._writer.is_closing():
            self._writer.write(_HEADER.pack(is_pickled, len(data)) + data)

    async def receive(self) -> tuple[Any, ...] | None:
        """Returns the next message; None once the other process has closed its end or exited. Raises BadMessage."""
        data = b""
        try:
            is_pickled, length = _HEADER.unpack(data := await self._reader.readexactly(_HEADER.size))
            if length > _MAX_BYTES:
                raise BadMessage(f"the length {length}")
            data = await self._reader.readexactly(length)
            return tuple(pickle.loads(data)) if is_pickled else (*_NUMBERS.unpack_from(data), data[_NUMBERS.size :])
        except (asyncio.IncompleteReadError, OSError):
            return None
        except Exception as error:  # unpickling may raise anything
            raise BadMessage(f"{data[:100]!r} ({error!r})") from error

    def close(self) -> None:
        self._writer.close()


_MAX_LINE_BYTES = 1 << 16


class LineBuffer:
    """Splits a stream into lines, and keeps an unfinished line until it ends or reaches 64 KiB."""

    def __init__(self) -> None:
        self._rest = b""

    def lines(self, data: bytes) -> list[bytes]:
        """Returns the lines that the stream's next piece completes; b"" ends the stream and its last line."""
        if b"\n" not in data and 0 < len(data) < _MAX_LINE_BYTES - len(self._rest):
            self._rest += data
            return []
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) >= _MAX_LINE_BYTES):
            lines.append(self._rest)
            self._rest = b""
        return lines


async def body_of(response: aiohttp.ClientResponse, max_bytes: int) -> bytes | None:
    """Returns the whole body, or None as soon as it exceeds `max_bytes`. The request sets the deadline."""
    if response.content_length is not None and response.content_length <= max_bytes:
        return await response.read()
    parts, num_bytes = [], response.content_length or 0
    while num_bytes <= max_bytes and (part := await response.content.readany()):
        parts.append(part)
        num_bytes += len(part)
    return b"".join(parts) if num_bytes <= max_bytes else None


# HTTP status codes of an unavailable or overloaded server or load balancer: a retry may succeed.
BUSY = (408, 425, 429, 502, 503, 504)


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the seconds until `Retry-After`, a number or a date, allows a retry; 0 if it is missing or invalid."""
    value = headers.get("Retry-After", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return 0.0
    return seconds if 0 < seconds < math.inf else 0.0
