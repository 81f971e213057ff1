"""LoopThread: the asyncio loop of the rollouts in a daemon thread of its own, and the ways across for the main thread.

The main thread hands over a coroutine and waits. It keeps the deadlines itself, so that a blocked event loop is noticed
too, and stays awake for signals.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from lightrl.errors import RolloutError

log = logging.getLogger(__name__)
_T = TypeVar("_T")

WAIT_S = 0.1  # between two looks of a waiting main thread at signals, deadlines and progress


class LoopThread(threading.Thread):
    """An event loop that runs from here on until `close`.

    Args:
        loop_timeout_s: a loop that does not answer for so long is blocked, and that is an error.
        on_exit: called on the loop with what left a task of someone else's through the loop (SystemExit, say).
    """

    def __init__(self, *, loop_timeout_s: float, on_exit: Callable[[BaseException], None]) -> None:
        super().__init__(name="lightrl-rollout", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.loop_timeout_s = loop_timeout_s
        self._on_exit = on_exit
        self._closing: concurrent.futures.Future[None] | None = None

    def run(self) -> None:
        asyncio.set_event_loop(self.loop)
        while True:
            try:
                self.loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio lets them through, out of a workflow's own tasks
                self._on_exit(error)
        self.loop.close()

    # ------------------------------------------------------------------ from the main thread

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """The result of what takes milliseconds.

        Raises:
            RolloutError: if the loop is closed or blocked.
        """
        future = self._submit(coroutine)
        concurrent.futures.wait([future], self.loop_timeout_s)
        if not future.done():
            future.cancel()
            raise self._blocked_error()
        return future.result()

    def wait_for(
        self,
        coroutine: Coroutine[Any, Any, _T],
        *,
        on_answer: Callable[[], None],
        on_wait: Callable[[], None],
        who: str,
    ) -> _T:
        """The coroutine's result; whatever is raised here cancels it.

        Args:
            on_answer: called on the loop, as often as it answers.
            on_wait: called here about ten times a second; may raise, for a deadline or a signal.
            who: waits, for messages.

        Raises:
            RolloutError: if the loop is closed or blocked.
        """
        future = self._submit(coroutine)
        has_answered = threading.Event()
        has_answered.set()
        silent_s = 0.0  # counted in waits, not by the clock: a stopped process is not a blocked loop

        def answer() -> None:
            on_answer()
            has_answered.set()

        try:
            while True:
                concurrent.futures.wait([future], WAIT_S)
                if future.cancelled():
                    raise RolloutError(f"{who} waited while the controller was closed, expected it open.")
                if future.done():
                    return future.result()
                if has_answered.is_set():
                    has_answered.clear()
                    silent_s = 0.0
                    self.loop.call_soon_threadsafe(answer)
                else:
                    silent_s += WAIT_S
                if silent_s > self.loop_timeout_s:
                    raise self._blocked_error()
                on_wait()
        finally:
            future.cancel()

    def close(self, last: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> None:
        """Runs the coroutine that `last` gives, then ends the loop and the thread. May be called twice."""
        if self._closing is None and self.is_alive():
            self._closing = self._submit(last())
            self._closing.add_done_callback(lambda done: self.loop.call_soon_threadsafe(self.loop.stop))
        self.join(timeout_s)
        if self.is_alive():
            log.warning("Rollout tasks did not end within %.1f s after cancellation; leaving them behind.", timeout_s)

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if self._closing is not None or not self.is_alive():
            coroutine.close()
            raise RolloutError("The rollout controller is closed, expected it open. Start a new run.")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def _blocked_error(self) -> RolloutError:
        frame = sys._current_frames().get(self.ident or 0)
        here = traceback.extract_stack(frame)[-1] if frame is not None else None
        where = f"It is at {here.filename}:{here.lineno}, in {here.name}. " if here is not None else ""
        return RolloutError(
            f"The rollout event loop did not answer for loop_timeout_s={self.loop_timeout_s:g}, expected milliseconds. "
            f"{where}A workflow, environment or async reward blocks it: let it await, or move its work to a thread; "
            "or raise StalenessControl.loop_timeout_s."
        )
