"""Tasks: the asyncio tasks of the controller; the first error of one ends the run."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Collection, Coroutine, Iterable
from typing import Any, TypeVar

from lightrl.errors import RolloutError

_T = TypeVar("_T")
_CANCEL_AGAIN_S = 3.0  # until then a workflow may clean up


class Tasks:
    """Belongs to the controller's event loop; the main thread only creates it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None  # the first one; it ends the run
        self.changed = asyncio.Event()  # the run has failed, or a group is done
        self.given_up: weakref.WeakSet[asyncio.Future[Any]] = weakref.WeakSet()
        self._spawned: set[asyncio.Task[Any]] = set()  # the event loop itself keeps weak references only

    def spawn(self, coroutine: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """A task whose error ends the run, unless it was given up."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._on_done)
        return task

    def give_up(self, tasks: Iterable[asyncio.Future[Any]]) -> None:
        """Cancels these tasks; what they raise then is no failure."""
        for task in tasks:
            self.given_up.add(task)
            task.cancel()

    async def give_up_all(self, *, but: Collection[asyncio.Task[Any]]) -> None:
        """Cancels all other tasks of the event loop and waits for them, and for the ones left out.

        One that goes on is cancelled again: aiohttp swallows a cancellation that arrives as its own timeout expires.
        """
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            self.give_up(task for task in tasks if task not in but)
            await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, unless it has failed before."""
        if self.failure is None:
            self.failure = error
        self.changed.set()

    def fail_on_exit(self, error: BaseException) -> None:
        """As `fail`, for an error that left the event loop."""
        failure = RolloutError(f"A task on the event loop raised {error!r}, which would have ended the loop.")
        failure.__cause__ = error
        self.fail(failure)

    def _on_done(self, task: asyncio.Task[Any]) -> None:
        self._spawned.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and task not in self.given_up:
            self.fail(error)
