"""call_within: user code of a workflow (environments, tools), sync or async, with a deadline; it never blocks the loop.

A sync function runs in a thread of its own, see in_thread.py.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

from lightrl.concurrency.in_thread import end_if_forked, outcome_in_thread
from lightrl.errors import RolloutError

log = logging.getLogger(__name__)


def call_all(*steps: Callable[[], object]) -> None:
    """Calls all steps in order, then raises the first error; further ones are logged.

    An ExitStack inside another one drops the error during which it ends: only the last one would be reported.
    """
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # the steps after it must run; it is raised below
            if first is None:
                first = error
            else:
                log.error("Another step of the end failed too.", exc_info=error)
    if first is not None:
        raise first


class CallTimeout(RolloutError):
    """User code missed its deadline."""


async def call_within(function: Callable[..., Any], *args: Any, timeout_s: float | None, name: str) -> Any:
    """The result of `function(*args)`, at most `timeout_s` later.

    On cancellation and at the deadline an async function is cancelled but not awaited: it may ignore the cancellation.

    Args:
        function: sync, async, or sync with an awaitable as its result.
        timeout_s: None if an outer deadline applies.
        name: of the function in messages.

    Raises:
        CallTimeout: if it is not done in time.
        RolloutError: if it raises, with its exception as the cause; its own RolloutError passes through unchanged.
    """
    task = asyncio.ensure_future(_outcome(function, args))
    try:
        await asyncio.wait({task}, timeout=timeout_s)
    finally:
        task.cancel()  # no effect if it is done
    if not task.done():
        raise CallTimeout(
            f"{name} did not finish within {timeout_s:g} s. Fix it, or increase the deadline in the workflow's "
            "arguments."
        )
    if task.cancelled():
        raise RolloutError(f"{name} cancelled itself. Catch asyncio.CancelledError in it.")
    value, error = task.result()
    if isinstance(error, RolloutError):
        raise error
    if error is not None:
        raise RolloutError(
            f"{name} raised {type(error).__name__}: {error}. Fix it, or catch the exception there."
        ) from error
    return value


async def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    process = os.getpid()
    # SystemExit would leave the task through the event loop instead of through its result.
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args), None
        value, error = await outcome_in_thread(function, *args, name="lightrl-environment")
        if error is None and inspect.isawaitable(value):
            value = await value
        return value, error
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # user code raises anything
        return None, raised
    finally:
        end_if_forked(process)
