"""Addresses of servers and weight receivers from the environment, and network routes to them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from lightrl.errors import EngineUnreachable

ADDRESS_VARIABLES = ("LIGHTRL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
RECEIVER_VARIABLE = "LIGHTRL_RECEIVER_ADDRS"  # weight receivers of the delta transport
TOKEN_VARIABLE = "LIGHTRL_SERVER_TOKEN"
RECEIVER_HELP = (
    "`lightrl serve` starts a weight receiver for its servers and prints its address. For other servers run "
    f"`{TOKEN_VARIABLE}=… python -m lightrl.engines.servers.sync.receiver --host HOST --port PORT`, and set "
    f"{RECEIVER_VARIABLE}."
)


def as_url(address: str) -> str:
    """Returns `host:port` as `http://host:port`, without a trailing `/`."""
    return (address if "://" in address else f"http://{address}").rstrip("/")


def addresses_from_environment() -> list[str]:
    """Returns the addresses in LIGHTRL_SERVER_ADDRS or AReaL's variable; raises ValueError if neither is set."""
    for name in ADDRESS_VARIABLES:
        if addresses := read_addresses(name):
            return addresses
    problem = "The engine needs urls, servers or LIGHTRL_SERVER_ADDRS. Set servers: 1 to start one on this machine."
    raise ValueError(problem)


def read_addresses(name: str) -> list[str]:
    """Returns the comma-separated addresses in the `name` environment variable; [] if it is not set."""
    return [as_url(part.strip()) for part in os.environ.get(name, "").split(",") if part.strip()]


def remote_servers(urls: Iterable[str]) -> list[str]:
    """Returns the servers on other machines; raises EngineUnreachable if a host is unknown or has no route."""
    ends = {url: _route_to(url) for url in urls}
    return [url for url, (server, here) in ends.items() if server != here and not ip_address(server).is_loopback]


def trainer_address(urls: Iterable[str], trainer_host: str | None = None) -> str:
    """Returns the address at which servers reach this machine, by default the local end of the route to them.

    Raises:
        ValueError: if `trainer_host` is not an address of this machine, or no single address works for all servers.
        EngineUnreachable: if a server's host is unknown or has no route.
    """
    remote = remote_servers(urls)
    if trainer_host is None:
        addresses = {_route_to(url)[1] for url in remote} or {"127.0.0.1"}
        if len(addresses) > 1:
            raise ValueError(
                f"This machine reaches {', '.join(remote)} from {len(addresses)} different addresses, "
                f"{', '.join(sorted(addresses))}. Set engine.trainer_host to the one that all servers can reach."
            )
        return addresses.pop()
    try:
        address = str(socket.getaddrinfo(trainer_host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ValueError(f"engine.trainer_host={trainer_host!r} cannot be resolved: {error}.") from error
    if remote and ip_address(address).is_loopback:
        raise ValueError(
            f"engine.trainer_host={trainer_host!r} is {address}, where {remote[0]} would only reach itself. Set it to "
            "an address of this machine that the servers can reach, or omit it to use the local end of the route."
        )
    try:
        with socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET):
            pass
    except OSError as error:
        raise ValueError(
            f"engine.trainer_host={trainer_host!r} ({address}) is not an address of this machine: {error}. Set it "
            "to one, or omit it to use the local end of the route to the servers."
        ) from error
    return address


def interface_of(address: str) -> str | None:
    """Returns the name of the network interface with this IPv4 address; None if there is none or this is not Linux."""
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            for _, name in socket.if_nameindex():
                request = name.encode()[:15].ljust(256, b"\0")
                try:
                    answer = fcntl.ioctl(probe.fileno(), 0x8915, request)  # SIOCGIFADDR
                except OSError:  # the interface has no address
                    continue
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    except (ImportError, OSError):
        return None
    return None


def _route_to(url: str) -> tuple[str, str]:
    """Returns the server's IP address, and this machine's address on the route to it, without sending anything."""
    parts = urlsplit(url)
    try:
        family, kind, _, _, target = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(target[0]), str(probe.getsockname()[0])
    except OSError as error:
        raise EngineUnreachable(f"There is no route to {url}: {error}. Check its address.") from error
