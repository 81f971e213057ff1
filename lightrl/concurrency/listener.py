"""Listener: accepts a server's connections, and limits connections from clients without the key."""

from __future__ import annotations

import asyncio
import resource
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp import web

BACKLOG = 1024  # many clients may connect at the same time
_HEADERS_S = 30.0  # deadline for a connection's first request with the key
UNDER_PRESSURE_S = 1.0  # the same deadline while other connections are waiting


class Listener:
    """Limits open connections to three quarters of this process's file limit, and those without the key to an eighth.

    More connections wait in the kernel's queue, so that clients that send nothing cannot use up the limit.
    """

    def __init__(self) -> None:
        self._keyless: dict[asyncio.WriteTransport, float] = {}  # connection without a key → when it was opened

    def note_key(self, request: web.Request) -> None:
        """Records that this request had the key, so that its connection stays open."""
        if request.transport is not None:
            self._keyless.pop(request.transport, None)

    async def accept(self, listening: socket.socket, server: web.Server) -> None:
        """Passes the connections from a listening socket to the server until cancelled."""
        loop, num_files = asyncio.get_running_loop(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        num_files = 2**16 if num_files == resource.RLIM_INFINITY else num_files
        listening.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(listening)
            except OSError:  # the client has left, or the file limit is reached
                await asyncio.sleep(UNDER_PRESSURE_S)
                continue
            try:
                while len(self._keyless) >= num_files // 8 or len(server.connections) >= num_files * 3 // 4:
                    self._close_keyless(UNDER_PRESSURE_S)
                    await asyncio.sleep(UNDER_PRESSURE_S / 10)
                transport, _ = await loop.connect_accepted_socket(server, connection)
            except BaseException:  # e.g. a cancellation; re-raised below
                connection.close()
                raise
            self._keyless[transport] = loop.time()
            loop.call_later(_HEADERS_S, self._close_keyless, _HEADERS_S)

    def _close_keyless(self, age_s: float) -> None:
        """Closes connections that have been open this long without sending the key."""
        now = asyncio.get_running_loop().time()
        for transport, since in list(self._keyless.items()):
            if transport.is_closing() or now - since >= age_s:
                transport.abort()
                del self._keyless[transport]
