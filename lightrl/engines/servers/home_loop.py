"""HomeLoop: the event loop that runs an engine's requests, and how other threads reach it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from lightrl.concurrency.in_thread import in_thread
from lightrl.concurrency.loop_thread import LoopEnded, LoopThread, Work, wait_on_loop, wake_up
from lightrl.errors import EngineError, EngineTimeout

log = logging.getLogger(__name__)
_T = TypeVar("_T")

_CANCEL_AGAIN_S = 1.0
_ENDED = "The engine's event loop stopped. The log, or the previous error, says why."


class HomeLoop:
    """The controller's event loop, or a private loop in a thread while there is no controller.

    When the loop changes, tasks from `spawn` and tasks inside `cancelled_with_loop` are cancelled, and coroutines from
    `keep` start again on the new loop.
    """

    def __init__(self, describe: Callable[[], str], *, timeout_s: float = 60.0) -> None:
        self.timeout_s = timeout_s
        self._describe = describe  # describes the servers, for the error about a missed deadline
        self._kept: list[Callable[[], Work[object]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._own_thread: LoopThread | None = None
        self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()  # replaced when the loop changes and at each `wake`

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop; a private one is started if there is none. Raises EngineError after `close`."""
        if self._is_closed:  # a late thread must not start a loop, because nothing would stop it
            raise EngineError("The engine is closed.")
        if self._loop is None:
            self._own_thread = LoopThread(
                loop_timeout_s=self.timeout_s, on_exit=lambda error: log.error("A request raised %r.", error)
            )
            self._own_thread.start()
            self._enter(self._own_thread.loop)
        assert self._loop is not None
        return self._loop

    async def move_here(self, leave: Callable[[], Work[None]]) -> None:
        """Makes the running loop the home. If the old home is a private loop, runs `leave` there and stops it."""
        here = asyncio.get_running_loop()
        old, thread = self._loop, self._own_thread
        if old is here:
            return
        if old is not None and thread is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(leave(), old))
            self._own_thread = None
            await in_thread(thread.close, lambda: asyncio.sleep(0), self.timeout_s)
        self._enter(here)

    def forget(self) -> None:
        """Forgets the loop, which is about to stop."""
        self._loop = None

    def close(self, leave: Callable[[], Work[None]]) -> None:
        """Runs `leave` on the loop, and stops a private loop; called from another thread.

        If the loop does not answer in time or is already stopping, `leave` does not run; requests end with the loop.
        """
        loop, thread = self._loop, self._own_thread
        try:
            if loop is not None and loop.is_running():
                self.call(leave(), self.timeout_s)
        except EngineError as error:
            log.warning("The engine did not wait for its requests to end: %s", error)
        finally:
            self._is_closed = True
            self._loop = self._own_thread = None
            if thread is not None:
                thread.close(lambda: asyncio.sleep(0), self.timeout_s)

    async def end_tasks(self) -> None:
        """Cancels all tasks and waits for them; called on the loop.

        Cancels running tasks again, because aiohttp swallows a cancellation that arrives as its timeout expires.
        """
        me = asyncio.current_task()
        while tasks := [task for task in self._tasks if task is not me and not task.done()]:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=_CANCEL_AGAIN_S)  # a cancelled request spawns a task that aborts it

    def _enter(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed = asyncio.Event()
        for start in self._kept:
            self._start_soon(start)

    def call(self, coroutine: Work[_T], timeout_s: float) -> _T:
        """Runs a coroutine on the loop; raises EngineError if the loop stops. Called from another thread."""
        future, loop = self._submit(coroutine)
        deadline_s = time.monotonic() + timeout_s

        def check() -> None:
            if time.monotonic() > deadline_s:
                problem = f"The event loop did not answer the engine within {timeout_s:g} s. {self._describe()}."
                raise EngineTimeout(problem)

        try:
            wait_on_loop(loop, future, silent_s=math.inf, on_wait=check)  # the deadline catches a blocked loop
            return future.result()
        except LoopEnded as error:
            cause = error.__cause__
            raise EngineError(_ENDED if cause is None else f"{_ENDED} Its thread died: {cause!r}.") from cause
        except concurrent.futures.CancelledError as error:
            raise EngineError(_ENDED) from error
        finally:
            future.cancel()  # no effect if it is done

    async def run(self, coroutine: Work[_T]) -> _T:
        """Runs a coroutine on the loop, from this or any other loop."""
        if self._loop is asyncio.get_running_loop():
            return await coroutine
        return await asyncio.wrap_future(self._submit(coroutine)[0])

    def _submit(self, coroutine: Work[_T]) -> tuple[concurrent.futures.Future[_T], asyncio.AbstractEventLoop]:
        try:
            loop = self.loop
            return asyncio.run_coroutine_threadsafe(coroutine, loop), loop
        except EngineError:
            coroutine.close()
            raise
        except RuntimeError as error:  # the loop is closed
            coroutine.close()
            raise EngineError(_ENDED) from error

    def soon(self, action: Callable[[], object]) -> None:
        """Calls `action` on the loop, if there is one. May be called from any thread."""
        if self._loop is not None:
            wake_up(self._loop, action)

    def keep(self, start: Callable[[], Work[object]]) -> None:
        """Starts a coroutine on the loop, and again on each new loop. May be called from any thread."""
        self._kept.append(start)
        self._start_soon(start)

    def _start_soon(self, start: Callable[[], Work[object]]) -> None:
        self.soon(lambda: self.spawn(start()))

    def spawn(self, coroutine: Work[_T]) -> asyncio.Task[_T]:
        """Starts a task that nobody has to await."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @contextlib.contextmanager
    def cancelled_with_loop(self) -> Iterator[None]:
        """Context manager that cancels the current task if the loop changes."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def wake(self) -> None:
        """Lets every `wait_for_change` in progress return."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns at the next `wake`, or after `timeout_s`."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
