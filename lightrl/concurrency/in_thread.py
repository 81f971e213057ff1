"""Runs blocking functions in daemon threads, for async code, for user code with a deadline, and for blocking callers.

A thread cannot be killed, so one that hangs is abandoned: neither the event loop nor the exit of the process waits for
it. The number of abandoned threads is bounded. `result_of` blocks up to a deadline, logging warnings meanwhile.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from lightrl.concurrency.loop_thread import settle_all
from lightrl.errors import RolloutError

A = TypeVar("A")
T = TypeVar("T")
log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0  # how often a waiting caller logs a warning
MAX_ABANDONED = 64  # abandoned threads that still run, per thread name
_abandoned: dict[threading.Thread, str] = {}  # thread → name of the function that hangs in it


async def in_thread(function: Callable[..., T], *args: object, name: str = "lightrl-thread") -> T:
    """Returns the result of `function(*args)`, without a deadline. A cancellation abandons the thread."""
    result, error = await outcome_in_thread(function, *args, name=name)
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


async def outcome_in_thread(
    function: Callable[..., T], *args: object, name: str = "lightrl-thread"
) -> tuple[T | None, BaseException | None]:
    """Like `in_thread`, but returns (result, exception). Raises RuntimeError if MAX_ABANDONED threads still hang."""
    for thread in [thread for thread in _abandoned if not thread.is_alive()]:
        _abandoned.pop(thread, None)
    functions = Counter(function for thread, function in _abandoned.items() if thread.name == name)
    if functions.total() >= MAX_ABANDONED:
        calls = ", ".join(f"{number} of {function}" for function, number in functions.most_common(3))
        raise RuntimeError(
            f"{functions.total()} calls are still hanging in this process's threads after their deadline: {calls}. No "
            "more will be started. Give each function a deadline, or make it async, so that it can be cancelled"
        )
    done: asyncio.Future[tuple[T | None, BaseException | None]] = asyncio.get_running_loop().create_future()
    process = os.getpid()

    def work() -> None:
        outcome: tuple[T | None, BaseException | None]
        try:
            outcome = (function(*args), None)
        except BaseException as error:  # noqa: BLE001  # the awaiting task gets the error
            outcome = (None, error)
        end_if_forked(process)
        settle_all([(done, outcome)])

    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    try:
        return await done
    except asyncio.CancelledError:
        _abandoned[thread] = getattr(function, "__qualname__", repr(function))
        raise


def end_if_forked(process: int) -> None:
    """Exits if this process is a copy of `process` that user code forked; the copy would also continue the run."""
    if os.getpid() != process:
        os._exit(0)


def call_all(*steps: Callable[[], object]) -> None:
    """Calls all steps in order, then raises the first error and logs the others; an ExitStack would raise the last."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:  # raised below, after the other steps
            if first is None:
                first = error
            else:
                log.error("Another shutdown step also failed.", exc_info=error)
    if first is not None:
        raise first


class CallTimeout(RolloutError):
    """User code missed its deadline."""


async def call_within(function: Callable[..., Any], *args: Any, timeout_s: float | None, name: str) -> Any:
    """Returns the result of `function(*args)`, which must finish within `timeout_s`.

    On cancellation and at the deadline, an async function is cancelled but not awaited: it may ignore the cancellation.

    Args:
        function: sync or async, or a sync function that returns an awaitable.
        timeout_s: None if an outer deadline applies.
        name: the function's name in messages.

    Raises:
        CallTimeout: if the function misses the deadline.
        RolloutError: if it raises; its exception is the cause. A RolloutError passes through unchanged.
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
        raise RolloutError(f"{name} cancelled itself. Catch asyncio.CancelledError there.")
    value, error = task.result()
    if isinstance(error, RolloutError):
        raise error
    if error is not None:
        problem = f"{name} raised {type(error).__name__}: {error}. Fix it, or catch the exception there."
        raise RolloutError(problem) from error
    return value


async def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """Runs a function, in a thread unless it is async; returns the result and the exception instead of raising it."""
    process = os.getpid()
    # SystemExit is caught because it would stop the event loop.
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*args), None
        value, error = await outcome_in_thread(function, *args, name="lightrl-environment")
        if error is None and inspect.isawaitable(value):
            value = await value
        return value, error
    except (Exception, SystemExit) as raised:  # noqa: BLE001  # user code may raise anything
        return None, raised
    finally:
        end_if_forked(process)


def submit(function: Callable[..., T], *args: object, name: str) -> Future[T]:
    """Starts `function(*args)` in a thread; the future receives its result or exception."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as error:  # noqa: BLE001  # the waiting caller gets it
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def result_of(future: Future[T], name: str, *, timeout_s: float) -> T:
    """Returns the future's result; raises TimeoutError at the deadline. `name` is for messages, e.g. "Batch 3"."""
    began_s = time.monotonic()
    waited_s = 0.0
    while not wait([future], min(WARN_EVERY_S, timeout_s - waited_s)).done:
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            raise TimeoutError(f"{name} did not arrive within {timeout_s:g} s. The disk or network may hang.")
        log.warning("%s has not arrived for %.0f s.", name, waited_s)
    return future.result()


def side_by_side(function: Callable[[A], T], arguments: Sequence[A], *, name: str) -> list[T]:
    """Calls the function on all arguments (at least one) in parallel, and returns the results in order.

    The first call runs in this thread, the others in threads named `name`. Raises the first error once all are done.
    """
    futures = [submit(function, argument, name=name) for argument in arguments[1:]]
    try:
        first = function(arguments[0])
    finally:
        wait(futures)
    return [first, *(future.result() for future in futures)]
