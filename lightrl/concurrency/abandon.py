"""Waits for tasks and futures, and abandons those no longer needed. `Tasks` ends the run at the first error."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import AsyncGenerator, Collection, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from lightrl.errors import RolloutError

_Key = TypeVar("_Key")
_T = TypeVar("_T")
_CANCEL_AGAIN_S = 3.0  # time for a workflow to clean up before it is cancelled again
AnyFuture = asyncio.Future[Any]
_abandoned: weakref.WeakSet[AnyFuture] = weakref.WeakSet()


def abandon(futures: Iterable[AnyFuture]) -> None:
    """Cancels each future once and ignores its outcome; a second cancellation would interrupt its clean-up."""
    for future in futures:
        if future.done():
            _ignore(future)
        elif future not in _abandoned:
            _abandoned.add(future)
            future.cancel()
            future.add_done_callback(_ignore)


def _ignore(future: AnyFuture) -> None:
    _ = future.cancelled() or future.exception()


def is_abandoned(future: AnyFuture | None) -> bool:
    """Whether `abandon` cancelled this task or future."""
    return future in _abandoned


async def each_when_done(
    futures: Mapping[_Key, asyncio.Future[_T]],
) -> AsyncGenerator[tuple[_Key, asyncio.Future[_T]], None]:
    """Yields each key and future when done. Abandons the others when iteration stops, and awaits them if cancelled."""
    done: asyncio.Queue[_Key] = asyncio.Queue()
    for key, future in futures.items():
        future.add_done_callback(functools.partial(lambda key, _: done.put_nowait(key), key))
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
    """Waits until a task or future is done or `within_s` has passed, then abandons `task` if it is still running."""
    try:
        await asyncio.wait({task, *others}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            abandon([task])


class Tasks:
    """Starts tasks; the first error in any of them ends the run. Used only on the controller's event loop."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None  # the first error, which ends the run
        self.changed = asyncio.Event()  # set when the run fails or a group is done
        self._spawned: set[asyncio.Task[object]] = set()  # the event loop keeps only weak references

    def spawn(self, coroutine: Coroutine[object, None, _T]) -> asyncio.Task[_T]:
        """Starts a task whose error ends the run, unless the task was abandoned."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def abandon_all(self, *, but: Collection[asyncio.Task[object]]) -> None:
        """Cancels the event loop's tasks except this one and `but`, then waits until all except this one have ended.

        A task that keeps running is cancelled again: aiohttp swallows a cancellation that arrives as a timeout expires.
        """
        abandon(asyncio.all_tasks() - {asyncio.current_task()} - set(but))
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
            for task in tasks - set(but):
                task.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, unless the run has already failed."""
        if self.failure is None:
            self.failure = error
        self.changed.set()

    def fail_on_exit(self, error: BaseException) -> None:
        """Ends the run with an error that escaped the event loop."""
        failure = RolloutError(f"A task on the event loop raised {error!r}, which would have ended the loop.")
        failure.__cause__ = error
        self.fail(failure)

    def _on_done(self, task: asyncio.Task[object]) -> None:
        self._spawned.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not is_abandoned(task):
            self.fail(error)
