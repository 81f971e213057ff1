"""Tasks: the asyncio tasks of the controller; the first error in one ends the run.

AdmissionBatch: groups that start together reach the engine together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

from lightrl.concurrency.abandon import abandon, is_abandoned
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RolloutError

# Ticks of the event loop after which every new trajectory has reached its first `generate`: one starts the group's
# task, one the task of the trajectory or request, and the others allow for a workflow that first awaits something that
# is ready.
ADMISSION_TICKS = 5

_T = TypeVar("_T")
_CANCEL_AGAIN_S = 3.0  # until then a workflow may clean up


class Tasks:
    """Belongs to the controller's event loop; the main thread only creates it."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None  # the first one; it ends the run
        self.changed = asyncio.Event()  # the run has failed, or a group is done
        self._spawned: set[asyncio.Task[object]] = set()  # the event loop keeps only weak references

    def spawn(self, coroutine: Coroutine[object, None, _T]) -> asyncio.Task[_T]:
        """Starts a task whose error ends the run, unless the task was abandoned."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._spawned.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def abandon_all(self, *, but: Collection[asyncio.Task[object]]) -> None:
        """Cancels all other tasks of the event loop except `but`, and waits for all of them.

        A task that continues is cancelled again: aiohttp swallows a cancellation that arrives as its timeout expires.
        """
        abandon(asyncio.all_tasks() - {asyncio.current_task()} - set(but))
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)
            for task in tasks - set(but):
                task.cancel()

    def fail(self, error: BaseException) -> None:
        """Ends the run with this error, unless it has failed before."""
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


@dataclass(eq=False)
class AdmissionBatch:
    """`async with admission.batch():` requests started inside reach the engine while it is paused."""

    engine: RolloutEngine  # has been started
    resuming: set[asyncio.Task[None]] = field(default_factory=set)  # must not be cancelled
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @contextlib.asynccontextmanager
    async def batch(self) -> AsyncIterator[None]:
        """Waits for the previous batch and for the engine's pause.

        On cancellation the engine is resumed. The resume itself is never cancelled, or the engine would stay paused.
        """
        async with self._lock:
            try:
                await self.engine.pause()
                yield
                for _ in range(ADMISSION_TICKS):
                    await asyncio.sleep(0)
            finally:
                resuming = asyncio.get_running_loop().create_task(self.engine.resume())
                self.resuming.add(resuming)
                resuming.add_done_callback(self.resuming.discard)
                try:
                    await asyncio.shield(resuming)
                except asyncio.CancelledError:
                    await asyncio.wait({resuming})
                    raise
