"""A function in a daemon thread for a caller that blocks: the wait has a deadline, a warning before it, and Ctrl-C.

A thread cannot be killed: one that hangs is abandoned, and the end of the process does not wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

WARN_EVERY_S = 60.0


def submit(function: Callable[[], T], *, name: str) -> Future[T]:
    """Starts the function in a thread of this name."""
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # the caller that waits gets it; the thread ends here
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


def result_of(future: Future[T], what: str, *, timeout_s: float) -> T:
    """The function's result; raises TimeoutError at the deadline.

    Args:
        what: is waited for, in warnings and in the error: "batch 3 of data.jsonl".
    """
    began_s = time.monotonic()
    while not wait([future], min(WARN_EVERY_S, timeout_s)).done:
        waited_s = time.monotonic() - began_s
        if waited_s >= timeout_s:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s. Its disk or network may hang.")
        log.warning("%s has not come for %.0f s. Waiting.", what, waited_s)
    return future.result()


def side_by_side(functions: Sequence[Callable[[], T]], *, name: str) -> list[T]:
    """Their results, in order; raises the first error in that order once all have ended.

    Args:
        functions: at least one; those after the first run in threads of this name.
    """
    first, *others = functions
    futures = [submit(function, name=name) for function in others]
    try:
        result = first()
    finally:
        for future in futures:
            future.exception()  # waits until it has ended
    return [result, *(future.result() for future in futures)]
