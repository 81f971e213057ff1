"""HeldPort: keeps a port free for a server that will listen there, maybe a minute later."""

from __future__ import annotations

import socket
import sys

from lightrl.errors import EngineError


class HeldPort:
    """A port of this machine that only a program which knows its number can use, until `close`.

    A socket is bound to it and does not listen. Linux then assigns the port to no outgoing connection and to no program
    that asks for any free one, yet a server can bind it that sets SO_REUSEADDR, as asyncio, uvicorn and http.server do.
    Other systems refuse that server too: there the port is only looked up, and another program may take it.

    Args:
        host: the address that the server will listen on.
        port: 0 for a free one.

    Raises:
        EngineError: if another program listens on this port, or the host is not an address of this machine.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise EngineError(
                f"No server can listen at {host}:{port}: {error}. Set host to an address of this machine, and port to "
                "a free one, or omit it."
            ) from error
        self.number = int(self._socket.getsockname()[1])
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Releases the port. May be called twice."""
        self._socket.close()
