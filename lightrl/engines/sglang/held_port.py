"""HeldPort: a port that is kept for a server until the server listens there itself, which may be a minute later."""

from __future__ import annotations

import socket
import sys

from lightrl.errors import EngineError


class HeldPort:
    """A port of this machine that only a program which is told its number gets, until `close`.

    A socket is bound to it and does not listen. Linux then gives the port to no outgoing connection and to nobody who
    asks for any free one, yet lets a server bind it that sets SO_REUSEADDR, as asyncio, uvicorn and http.server do.
    Other systems refuse that server too: there the port is only looked up, and may be lost until the server is up.

    Args:
        host: the address that the server will listen on.
        port: 0 for a free one.

    Raises:
        EngineError: if somebody listens on this port, or the host is no address of this machine.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise EngineError(
                f"No server can listen at {host}:{port}: {error}, expected an address of this machine and a port that "
                "nobody uses. Change host or port, or leave the port out for a free one."
            ) from error
        self.number = int(self._socket.getsockname()[1])
        if sys.platform != "linux":
            self.close()

    def close(self) -> None:
        """Lets go of it. May be called twice."""
        self._socket.close()
