"""The only way out of an agent's network namespace: its endpoint's port, which leads to the same port outside.

A socket belongs to the namespace in which it was made: the relay, which is outside, accepts the connections inside.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import threading

from .layers import die_with_parent


def open_door(port: int) -> int:
    """Forks the relay, a child that the guard kills with all others; returns where `send_port` sends the socket."""
    inner, outer = socket.socketpair()
    if os.fork() == 0:
        try:
            die_with_parent()
            inner.close()
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # the end of the guard's replies must be the guard's
            for descriptor in socket.recv_fds(outer, 1, 1)[1]:  # none if there is no namespace in the end
                _relay(socket.socket(fileno=descriptor), port)
        finally:
            os._exit(0)
    outer.close()
    return inner.detach()


def send_port(door: int, port: int | None) -> None:
    """Called within the namespace: brings its loopback up, and sends a socket that listens there to the relay."""
    with socket.socket(fileno=door) as channel, socket.socket() as listener:
        fcntl.ioctl(listener, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
        listener.bind(("127.0.0.1", port))
        listener.listen(128)
        socket.send_fds(channel, [b"\0"], [listener.fileno()])


def _relay(listener: socket.socket, port: int) -> None:
    while True:
        inside, _ = listener.accept()
        try:
            outside = socket.create_connection(("127.0.0.1", port))
        except OSError:  # the endpoint is closed
            inside.close()
            continue
        for pair in ((inside, outside), (outside, inside)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone; the other must not wait for it
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
