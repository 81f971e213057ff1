"""WakeUps: calls and results for event loops, from other threads; each loop is woken once for all of its calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Call = tuple[Callable[..., object], tuple[object, ...]]

_CALLS_A_TICK = 64  # then the event loop does what follows from them


class WakeUps:
    """Calls to make on event loops; waking a loop once for 512 completions costs little."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[Call]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
        """Calls `function` on `loop` when they are sent."""
        self._calls.setdefault(loop, []).append((function, arguments))

    def settle(self, future: asyncio.Future[T], outcome: T | BaseException) -> None:
        """Gives `future` its result or its error when they are sent, unless it is done by then."""
        self.add(future.get_loop(), _settle, future, outcome)

    def send(self) -> None:
        """Wakes the loops, from any thread."""
        for loop, calls in self._calls.items():
            wake_up(loop, _call_all, calls)
        self._calls.clear()


def wake_up(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Calls `function` on `loop`, from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits there any more
        loop.call_soon_threadsafe(function, *arguments)


def _call_all(calls: list[Call], first: int = 0) -> None:
    """Sets results in slices, so that the first are read before the last are set."""
    for function, arguments in calls[first : first + _CALLS_A_TICK]:
        function(*arguments)
    if first + _CALLS_A_TICK < len(calls):
        asyncio.get_running_loop().call_soon(_call_all, calls, first + _CALLS_A_TICK)


def _settle(future: asyncio.Future[T], outcome: T | BaseException) -> None:
    if future.done():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
