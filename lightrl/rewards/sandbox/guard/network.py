"""Connects an agent's network namespace to its endpoint's port and, through a proxy, to allowed hosts.

A socket stays in the namespace that created it, so a relay outside can accept the agent's connections. The guard forks
the relay, and kills it with all other processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import re
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

from . import layers

_HOST = "127.0.0.1"
MAX_CONNECTIONS = 200  # per listener; further connections wait. Two listeners use 800 of the usual 1024 descriptors.
_PAUSE_S = 0.1
_MAX_HEAD_BYTES = 1 << 16
_HEAD_S = 30.0
_CONNECT_S = 30.0
_PORTS = (80, 443)  # allowed for a host without a port
_NAME = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]+", re.ASCII)


def open_relay(port: int, hosts: Iterable[str]) -> int:
    """Forks the relay; returns the descriptor through which `send_ports` sends it sockets."""
    inner, outer = socket.socketpair()
    if os.fork() == 0:
        try:
            layers.die_with_parent()
            inner.close()
            os.dup2(os.open(os.devnull, os.O_RDWR), 1)  # only the guard may keep its reply pipe open
            listeners = [socket.socket(fileno=number) for number in socket.recv_fds(outer, 1, 2)[1]]
            reaches = (lambda _: socket.create_connection((_HOST, port)), Proxy(hosts).reach)
            serving = [threading.Thread(target=serve, args=pair) for pair in zip(listeners, reaches, strict=False)]
            for thread in serving:  # none if entering the namespace failed
                thread.start()
            for thread in serving:
                thread.join()
        finally:
            os._exit(0)
    outer.close()
    return inner.detach()


def send_ports(relay: int, port: int, *, has_proxy: bool) -> int | None:
    """Enables the loopback of the current network namespace, and sends listening sockets to the relay.

    Returns:
        The proxy's port, or None without a proxy.
    """
    with socket.socket(fileno=relay) as channel, socket.socket() as listener, socket.socket() as proxy:
        fcntl.ioctl(listener, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
        listener.bind((_HOST, port))
        proxy.bind((_HOST, 0))
        sent = [listener, proxy] if has_proxy else [listener]
        for each in sent:
            each.listen(128)
        socket.send_fds(channel, [b"\0"], [each.fileno() for each in sent])
        return proxy.getsockname()[1] if has_proxy else None


def serve_inside() -> None:
    """Forwards a port in a process's network namespace to the same port here; arguments: process id, port.

    Prints a line when it is ready. Ends when standard input closes.
    """
    process, port = map(int, sys.argv[2:])
    relay = open_relay(port, ())
    layers.enter_namespaces_of(process)
    send_ports(relay, port, has_proxy=False)
    os.write(1, b"ready\n")
    sys.stdin.read()


def proxy_environment(port: int) -> Mapping[str, str]:
    """Returns the environment variables that tell programs to use the proxy."""
    url = f"http://{_HOST}:{port}"
    names = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    direct = dict.fromkeys(("NO_PROXY", "no_proxy"), f"{_HOST},localhost")
    return dict.fromkeys(names, url) | direct | {"NODE_USE_ENV_PROXY": "1"}


class Proxy:
    """An HTTP proxy that connects only to these hosts, and checks only their names and ports.

    Args:
        hosts: each is `name`, `name:port`, or `*.name` for all names below it; the default ports are 80 and 443.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self.allowed = [split_host(host) for host in hosts]

    def reach(self, inside: socket.socket) -> socket.socket:
        """Reads a request, and returns a connection to its host; if refused, answers the request and raises OSError."""
        try:
            inside.settimeout(_HEAD_S)
            head, rest = _read_head(inside)
            try:
                host, port, first = _target(head)
                outside = self.connect(host, port)
            except (ValueError, OSError) as error:
                status = "403 Forbidden" if isinstance(error, (ValueError, PermissionError)) else "502 Bad Gateway"
                body = f"{error}\n".encode(errors="replace")
                text = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                inside.sendall(text.encode() + body)
                raise OSError(str(error)) from error
            if first is None:  # a tunnel
                inside.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            outside.sendall((first or b"") + rest)
        finally:
            inside.settimeout(None)
        return outside

    def connect(self, host: str, port: int) -> socket.socket:
        """Connects to a host; raises PermissionError if it is not allowed."""
        if not any(_matches(host, port, *allowed) for allowed in self.allowed):
            raise PermissionError(f"{host}:{port} is not among the hosts in the workflow's `network` setting.")
        text = f"{host} resolves to this machine or a link-local address. To allow it, add the address to `network`."
        problem: OSError = PermissionError(text)
        for *_, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            if host in (address[0], "localhost") or not _is_own(str(address[0])):
                try:
                    return _connected(address[0], port)
                except OSError as error:
                    problem = OSError(f"{host}:{port} cannot be reached: {error}")
        raise problem


def split_host(text: str) -> tuple[str, tuple[int, ...]]:
    """Returns a host's name and its allowed ports; raises ValueError if it is not a host."""
    address = urlsplit(f"//{text}")
    host = (address.hostname or "").rstrip(".")
    if not _NAME.fullmatch(host.removeprefix("*.")) or text.rpartition("@")[1] or address.path or address.query:
        raise ValueError(f"{text!r} is not a host, such as pypi.org, localhost:8000 or *.example.com")
    return host, (address.port,) if address.port is not None else _PORTS


def _matches(host: str, port: int, allowed: str, ports: tuple[int, ...]) -> bool:
    is_named = host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed
    return is_named and port in ports


def _is_own(address: str) -> bool:
    """Returns whether an address is this machine's, or link-local, where clouds serve credentials."""
    number = ipaddress.ip_address(address.partition("%")[0])
    number = getattr(number, "ipv4_mapped", None) or number
    return number.is_loopback or number.is_link_local or number.is_unspecified or number.is_multicast


def _connected(address: object, port: int) -> socket.socket:
    outside = socket.create_connection((str(address), port), timeout=_CONNECT_S)
    outside.settimeout(None)
    return outside


def _read_head(inside: socket.socket) -> tuple[str, bytes]:
    data = b""
    while b"\r\n\r\n" not in data:
        received = inside.recv(_MAX_HEAD_BYTES)
        data += received
        if not received or len(data) > _MAX_HEAD_BYTES:
            raise OSError("no HTTP request")
    head, _, rest = data.partition(b"\r\n\r\n")
    return head.decode("latin-1"), rest


def _target(head: str) -> tuple[str, int, bytes | None]:
    """Returns a request's host, its port, and the head to send there (None if it asks for a tunnel)."""
    line, *fields = head.split("\r\n")
    method, _, place = line.partition(" ")
    place, _, version = place.rpartition(" ")
    url = urlsplit(f"//{place}" if method == "CONNECT" else place)
    host = (url.hostname or "").rstrip(".")
    if "@" in url.netloc or not _NAME.fullmatch(host) or (method != "CONNECT" and url.scheme != "http"):
        raise PermissionError(f"{line[:80]!r} is not a request for a proxy.")
    if method == "CONNECT":
        return host, url.port or 443, None
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    dropped = ("host:", "connection:", "proxy-", "keep-alive:")
    kept = [field for field in fields if not field.lower().startswith(dropped)]
    lines = [f"{method} {path} {version}", f"Host: {url.netloc}", "Connection: close", *kept]
    return host, url.port or 80, "\r\n".join([*lines, "", ""]).encode("latin-1")


def serve(listener: socket.socket, reach: Callable[[socket.socket], socket.socket]) -> None:
    free = threading.BoundedSemaphore(MAX_CONNECTIONS)
    while True:
        free.acquire()
        inside: socket.socket | None = None
        try:
            inside, _ = listener.accept()
            threading.Thread(target=_join, args=(inside, reach, free), daemon=True).start()
        except (OSError, RuntimeError):  # no descriptor or thread is free now
            if inside is not None:
                inside.close()
            free.release()
            time.sleep(_PAUSE_S)


def _join(inside: socket.socket, reach: Callable[[socket.socket], socket.socket], free: threading.Semaphore) -> None:
    """Relays data both ways between a connection from inside the sandbox and its target, until both are closed."""
    try:
        with inside, reach(inside) as outside:
            back = threading.Thread(target=_copy, args=(outside, inside), daemon=True)
            back.start()
            _copy(inside, outside)
            back.join()
    except (OSError, RuntimeError):  # refused, the endpoint has closed, or no thread is free
        pass
    finally:
        free.release()


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # one end is gone; the other must not wait for it
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
