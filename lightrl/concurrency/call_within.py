"""call_within: user code of a workflow (environments, tools), sync or async, with a deadline; it never blocks the loop.

A sync function runs in a daemon thread of its own call. A thread cannot be killed: one that hangs is left behind, and
neither the event loop nor the end of the process waits for it.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

from lightrl.errors import RolloutError


class CallTimeout(RolloutError):
    """User code was not done before its deadline."""


_Outcome = tuple[Any, BaseException | None]


async def call_within(function: Callable[..., Any], *args: Any, timeout_s: float | None, name: str) -> Any:
    """What `function(*args)` gives.

    Waits for the function, at most `timeout_s`. On cancellation, and at the deadline, an async function is cancelled
    and not waited for: it may ignore that.

    Args:
        function: sync, async, or sync with an awaitable as its result.
        timeout_s: None where a deadline is around this already.
        name: how the message calls it.

    Raises:
        CallTimeout: if it is not done in time.
        RolloutError: if it raises, with its exception as the cause; its own RolloutError comes through as it is.
    """
    task = asyncio.ensure_future(_caught(function, args))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()  # changes nothing where it is done
    if not task.done():
        raise CallTimeout(
            f"{name} was not done within {timeout_s:g} s, expected an answer by then. Mend it, or raise the deadline "
            "in the workflow's arguments."
        )
    if task.cancelled():
        raise RolloutError(f"{name} let a cancellation of its own escape, expected a result. Catch it there.")
    value, error = task.result()
    if isinstance(error, RolloutError):
        raise error
    if error is not None:
        raise RolloutError(f"{name} raised {type(error).__name__}: {error}. Mend it, or let it catch that.") from error
    return value


async def _caught(function: Callable[..., Any], args: tuple[Any, ...]) -> _Outcome:
    # SystemExit would leave a task through the event loop instead of through its result.
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args), None
        value, error = await _in_thread(function, args)
        if error is None and inspect.isawaitable(value):
            value = await value
        return value, error
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # the border of user code
        return None, raised


async def _in_thread(function: Callable[..., Any], args: tuple[Any, ...]) -> _Outcome:
    """Waits for a new thread, which wakes it by `call_soon_threadsafe`."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[_Outcome] = loop.create_future()

    def deliver(result: _Outcome) -> None:
        if not outcome.done():  # else given up
            outcome.set_result(result)

    def work() -> None:
        try:
            result: _Outcome = (function(*args), None)
        except BaseException as error:  # noqa: BLE001  # the border of user code, and nobody is above it in this thread
            result = (None, error)
        try:
            loop.call_soon_threadsafe(deliver, result)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, name="lightrl-environment", daemon=True).start()
    return await outcome
