"""Free ports of this machine, in a row."""

from __future__ import annotations

import random
import socket

_FIRST, _LAST = 20000, 32000  # below those that systems assign to outgoing connections


def free_ports(number: int) -> int:
    """The first of `number` ports in a row that nothing listens on now."""
    for _ in range(100):
        first = random.SystemRandom().randrange(_FIRST, _LAST - number)
        if all(_is_free(port) for port in range(first, first + number)):
            return first
    raise OSError(f"There are no {number} free ports in a row from {_FIRST} to {_LAST}. Set launch.port.")


def _is_free(port: int) -> bool:
    try:
        with socket.create_server(("", port)):
            return True
    except OSError:
        return False
