"""in_thread: a blocking function in a daemon thread of its own, awaited.

A thread cannot be killed: one that hangs is abandoned, and neither the event loop nor the end of the process waits for
it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from lightrl.concurrency.wake_up import WakeUps

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any, name: str = "lightrl-thread") -> T:
    """The result of `function(*args)`, which has no deadline here. On cancellation the thread is abandoned."""
    result, error = await outcome_in_thread(function, *args, name=name)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


async def outcome_in_thread(
    function: Callable[..., T], *args: Any, name: str = "lightrl-thread"
) -> tuple[T | None, BaseException | None]:
    """As `in_thread`; gives the result and the exception instead of raising it."""
    done: asyncio.Future[tuple[T | None, BaseException | None]] = asyncio.get_running_loop().create_future()

    def work() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (function(*args), None)
        except BaseException as error:  # noqa: BLE001  # this thread ends here; the awaiting task gets the error
            outcome = (None, error)
        wake_ups = WakeUps()
        wake_ups.settle(done, outcome)
        wake_ups.send()

    threading.Thread(target=work, name=name, daemon=True).start()
    return await done
