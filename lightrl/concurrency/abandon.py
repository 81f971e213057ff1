"""Waits for several tasks or futures, and abandons those that nobody needs any more."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, TypeVar

_Key = TypeVar("_Key")
_T = TypeVar("_T")
AnyFuture = asyncio.Future[Any]
_abandoned: weakref.WeakSet[AnyFuture] = weakref.WeakSet()


def abandon(futures: Iterable[AnyFuture]) -> None:
    """Cancels each future once, so that it can clean up, and ignores the outcomes."""
    for future in futures:
        if future.done():
            _ignore(future)
        elif future not in _abandoned:
            _abandoned.add(future)
            future.cancel()
            future.add_done_callback(_ignore)


def _ignore(future: AnyFuture) -> None:
    _ = future.cancelled() or future.exception()


def _put(done: asyncio.Queue[_Key], key: _Key, future: AnyFuture) -> None:
    done.put_nowait(key)


def is_abandoned(future: AnyFuture | None) -> bool:
    """Whether `abandon` cancelled this task or future."""
    return future in _abandoned


async def each_when_done(
    futures: Mapping[_Key, asyncio.Future[_T]],
) -> AsyncGenerator[tuple[_Key, asyncio.Future[_T]], None]:
    """Yields each future with its key when it is done, and abandons the unfinished ones at the end.

    If it is cancelled, it also waits until they have ended; if the caller stops iterating, it does not.
    """
    done: asyncio.Queue[_Key] = asyncio.Queue()
    for key, future in futures.items():
        future.add_done_callback(functools.partial(_put, done, key))
    try:
        for _ in range(len(futures)):
            key = await done.get()
            yield key, futures[key]
    except asyncio.CancelledError:
        if running := [future for future in futures.values() if not future.done()]:
            abandon(running)
            await asyncio.wait(running)
        raise
    finally:
        abandon(futures.values())


async def wait_or_abandon(task: AnyFuture, *others: AnyFuture, within_s: float | None = None) -> None:
    """Waits for the task or the first of `others`; abandons the task if it is not done by then."""
    try:
        await asyncio.wait({task, *others}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            abandon([task])
