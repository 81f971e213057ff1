"""Functions that run at the same time, one in the caller's thread; all have ended when the call returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lightrl.concurrency.daemon_future import submit

T = TypeVar("T")


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
