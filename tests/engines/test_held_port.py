"""HeldPort against everybody who might take the port meanwhile, with real sockets."""

import contextlib
import socket
import struct
import sys
from collections.abc import Callable, Iterator

import pytest

from lightrl.engines.sglang.servers.server import HeldPort
from lightrl.errors import EngineError

HOST = "127.0.0.1"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems hold no port for somebody else")


@pytest.fixture
def hold() -> Iterator[Callable[[int], int]]:
    """Holds a port until the test is over; gives its number."""
    with contextlib.ExitStack() as stack:
        yield lambda port: stack.enter_context(contextlib.closing(HeldPort(HOST, port))).number


def test_a_held_port_is_given_to_nobody_who_asks_for_any(hold: Callable[[int], int]) -> None:
    held, found = {hold(0) for _ in range(200)}, set()
    for _ in range(10_000):  # of about 28,000 ports
        with socket.create_server((HOST, 0)) as server:
            found.add(server.getsockname()[1])
    assert len(held) == 200
    assert not held & found


def test_a_held_port_is_given_to_no_outgoing_connection(hold: Callable[[int], int]) -> None:
    held, found = set(), set()
    for port in range(32768, 60999, 140):  # Linux gives the even ones to connections
        with contextlib.suppress(EngineError):
            held.add(hold(port))
    with socket.create_server((HOST, 0)) as server:
        for _ in range(5_000):
            with socket.create_connection(server.getsockname()) as client:
                found.add(client.getsockname()[1])
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves nothing behind
                server.accept()[0].close()
    assert len(held) > 100
    assert not held & found


def test_nobody_answers_at_a_port_that_is_only_held() -> None:
    with contextlib.closing(HeldPort(HOST)) as held, pytest.raises(ConnectionRefusedError):
        socket.create_connection((HOST, held.number))
