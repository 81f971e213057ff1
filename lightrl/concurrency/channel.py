"""Channel: pickled messages between the event loops of this process and one that it started and trusts as itself."""

from __future__ import annotations

import asyncio
import pickle
import socket
from typing import Any

_LENGTH_BYTES = 8
_BUFFER_BYTES = 1 << 20


class Channel:
    """One end; messages arrive in the order in which they were sent. Belongs to the event loop that opened it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, end: socket.socket) -> Channel:
        """Owns one end of a `socket.socketpair`, and closes it."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=_BUFFER_BYTES))

    def send(self, *message: Any) -> None:
        """Never waits: what the other process does not read stays in memory here; after its end it is ignored."""
        self.send_pickled(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))

    def send_pickled(self, data: bytes) -> None:
        """A tuple that is pickled already."""
        if not self._writer.is_closing():
            self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    async def receive(self) -> tuple[Any, ...] | None:
        """The next message; None once the other process has closed its end, or has ended."""
        try:
            length = await self._reader.readexactly(_LENGTH_BYTES)
            data = await self._reader.readexactly(int.from_bytes(length, "little"))
        except (asyncio.IncompleteReadError, OSError):
            return None
        return tuple(pickle.loads(data))

    def close(self) -> None:
        self._writer.close()
