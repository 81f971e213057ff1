"""LoopThread runs the rollouts' event loop in a daemon thread; settle_all sets futures' results on any loop.

The main thread submits a coroutine and waits. It checks deadlines itself, so it notices a blocked event loop and keeps
handling signals. Other threads send results with `settle_all`, which wakes each loop once.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from lightrl.errors import RolloutError

log = logging.getLogger(__name__)
T = TypeVar("T")
Work = Coroutine[object, None, T]

_LAST_TASKS_S = 5.0  # time for tasks that still run when the loop stops; a task may ignore its cancellation
WAIT_S = 0.1  # interval at which a waiting main thread checks signals, deadlines and progress
_MAX_IDLE_WAITS = 20  # a loop is also idle before it starts and just after an exception, but not for this long

deaths: WeakKeyDictionary[asyncio.AbstractEventLoop, BaseException] = WeakKeyDictionary()  # loop → error that ended it


class LoopEnded(Exception):
    """The event loop has stopped; if an exception ended its thread, that exception is the cause."""


class LoopBlocked(Exception):
    """The event loop has been blocked for too long."""


def wait_on_loop(
    loop: asyncio.AbstractEventLoop,
    awaited: concurrent.futures.Future[T] | threading.Event,
    *,
    silent_s: float,
    on_answer: Callable[[], None] = lambda: None,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Waits, in a thread other than the loop's, until the future is done or the event is set.

    Args:
        silent_s: a loop that does not respond for this long counts as blocked.
        on_answer: called on the loop each time it responds.
        on_wait: called in this thread about ten times a second; may raise, for a deadline or a signal.

    Raises:
        LoopEnded: if the loop is closed or its thread has ended. LoopBlocked: after `silent_s` without a response.
    """
    has_answered = threading.Event()
    has_answered.set()
    num_idle = num_silent = 0  # counted in waits, not seconds, because a suspended process is not blocked

    def answer() -> None:
        on_answer()
        has_answered.set()

    def is_done(seconds: float) -> bool:
        if isinstance(awaited, threading.Event):
            return awaited.wait(seconds)
        return bool(concurrent.futures.wait([awaited], seconds).done)

    while not is_done(0.0 if loop in deaths else WAIT_S):
        num_idle = 0 if loop.is_running() else num_idle + 1
        if loop in deaths or loop.is_closed() or num_idle > _MAX_IDLE_WAITS:
            raise LoopEnded from deaths.get(loop)
        if has_answered.is_set():
            has_answered.clear()
            num_silent = 0
            wake_up(loop, answer)
        else:
            num_silent += 1
        if num_silent * WAIT_S > silent_s:
            raise LoopBlocked
        on_wait()


class LoopThread(threading.Thread):
    """A thread with an event loop that runs until `close`.

    Args:
        loop_timeout_s: a loop that does not respond for this long counts as blocked; calls then raise RolloutError.
        on_exit: called in this thread with a SystemExit or KeyboardInterrupt that a task raised through the loop.
    """

    def __init__(self, *, loop_timeout_s: float, on_exit: Callable[[BaseException], None]) -> None:
        super().__init__(name="lightrl-rollout", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.loop_timeout_s = loop_timeout_s
        self._on_exit = on_exit
        self._closing: concurrent.futures.Future[None] | None = None

    def run(self) -> None:
        try:
            self._run()
        except BaseException as error:  # noqa: BLE001  # waiting threads raise it
            deaths[self.loop] = error

    def _run(self) -> None:
        """Runs the loop until `close` stops it, then cancels the remaining tasks and closes it."""
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets tasks raise them through the loop
                self._on_exit(error)
        while tasks := asyncio.all_tasks(self.loop):
            try:
                for task in tasks:  # no longer needed; this runs their `finally` and wakes whoever waits for them
                    task.cancel()
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=_LAST_TASKS_S))
                break
            except (SystemExit, KeyboardInterrupt) as error:
                self._on_exit(error)
                for task in tasks:
                    _ = task.done() and not task.cancelled() and task.exception()  # already reported
        self.loop.close()

    def call(self, coroutine: Work[T]) -> T:
        """Returns the result of a short coroutine; raises RolloutError if the loop is closed or blocked."""
        num_waits = itertools.count()

        def check() -> None:
            if next(num_waits) * WAIT_S >= self.loop_timeout_s:
                raise self._blocked_error()

        return self.wait_for(coroutine, on_answer=lambda: None, on_wait=check, who="A call")

    def wait_for(
        self, coroutine: Work[T], *, on_answer: Callable[[], None], on_wait: Callable[[], None], who: str
    ) -> T:
        """Waits for the coroutine and returns its result; an exception in the waiting thread cancels the coroutine.

        Args:
            on_answer, on_wait: see `wait_on_loop`.
            who: the waiting caller's name, for messages.
        """
        future = self._submit(coroutine)
        try:
            wait_on_loop(self.loop, future, silent_s=self.loop_timeout_s, on_answer=on_answer, on_wait=on_wait)
            if future.cancelled():
                raise RolloutError(f"{who} waited, but the controller was closed.")
            return future.result()
        except LoopEnded:
            raise self._ended_error() from deaths.get(self.loop)
        except LoopBlocked:
            raise self._blocked_error() from None
        finally:
            future.cancel()  # no effect if it is done

    def close(self, last: Callable[[], Work[None]], timeout_s: float) -> None:
        """Runs the coroutine that `last` returns, then stops the loop and the thread. Safe to call twice."""
        if self._closing is None and self.is_alive():
            self._closing = self._submit(last())
            self._closing.add_done_callback(lambda done: self.loop.call_soon_threadsafe(self.loop.stop))
        self.join(timeout_s)
        if self.is_alive():
            log.warning("Rollout tasks did not end within %.1f s after cancellation; abandoning them.", timeout_s)

    def _submit(self, coroutine: Work[T]) -> concurrent.futures.Future[T]:
        if self._closing is not None or not self.is_alive():
            coroutine.close()
            raise self._ended_error()
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _ended_error(self) -> RolloutError:
        death = deaths.get(self.loop)
        if death is None:
            return RolloutError("The rollout controller is closed. Start a new run.")
        error = RolloutError(f"The rollout thread died: {death!r}. Resume the run from its checkpoint.")
        error.__cause__ = death
        return error

    def _blocked_error(self) -> RolloutError:
        frame = sys._current_frames().get(self.ident or 0)
        line = traceback.extract_stack(frame)[-1] if frame is not None else None
        position = f"It is at {line.filename}:{line.lineno}, in {line.name}. " if line is not None else ""
        return RolloutError(
            f"The rollout event loop did not answer for loop_timeout_s={self.loop_timeout_s:g}. {position}A workflow, "
            "environment or async reward is blocking it. Use await, or move the work to a thread."
        )


Outcome = tuple[asyncio.Future[Any], object]  # a future, and its result or error

_SETTLED_PER_TICK = 64  # number of futures that are settled before the event loop runs other callbacks


def settle_all(outcomes: Iterable[Outcome]) -> None:
    """Sets the outcomes of unfinished futures, waking each loop once. May be called from any thread."""
    outcomes_of: dict[asyncio.AbstractEventLoop, list[Outcome]] = {}
    for future, outcome in outcomes:
        outcomes_of.setdefault(future.get_loop(), []).append((future, outcome))
    for loop, loop_outcomes in outcomes_of.items():
        wake_up(loop, _settle, loop_outcomes)


def _settle(outcomes: list[Outcome], first: int = 0) -> None:
    """Settles the futures in slices, so that the first results are read before the last are set."""
    for future, outcome in outcomes[first : first + _SETTLED_PER_TICK]:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    if first + _SETTLED_PER_TICK < len(outcomes):
        asyncio.get_running_loop().call_soon(_settle, outcomes, first + _SETTLED_PER_TICK)


def wake_up(loop: asyncio.AbstractEventLoop, function: Callable[..., object], *arguments: object) -> None:
    """Schedules a call to `function` on `loop`; may be called from any thread."""
    with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits there
        loop.call_soon_threadsafe(function, *arguments)
