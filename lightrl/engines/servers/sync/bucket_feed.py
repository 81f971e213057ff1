"""BucketFeed: passes buckets from the thread that gathers weights to the event loop that sends them to servers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from lightrl.concurrency.loop_thread import LoopBlocked, LoopEnded, deaths, wait_on_loop, wake_up
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket

BLOCKED_S = 60.0  # an event loop that runs nothing for this long is blocked


class BucketFeed:
    """Passes buckets from a thread to a coroutine; `put` returns when the coroutine has taken the bucket.

    The thread puts buckets inside `with feed:`; the coroutine's iteration stops when the block ends or raises. The
    coroutine waits at most `timeout_s` for each bucket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._loop = loop
        self._changed = asyncio.Event()
        self._taken = threading.Event()
        self._next: Bucket | None = None  # a bucket that was put but has not been taken
        self._taken_bucket = Bucket({})
        self._is_complete = False  # no more buckets will be put
        self._is_stopped = False  # no more buckets will be taken
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Passes a bucket on; returns False if the coroutine takes no more. Deadlines are checked by the coroutine."""
        self._taken.clear()
        if self._is_stopped:
            return False
        self._next = Bucket(dict(bucket.tensors), bucket.is_last, bucket.files)  # a copy: the iterator empties `bucket`
        wake_up(self._loop, self._changed.set)
        wait_while_running(self._loop, self._taken)  # `stop` ends the wait when the coroutine is done
        return not self._is_stopped

    def stop(self) -> None:
        """Called when the coroutine is done."""
        self._is_stopped = True
        self._taken.set()

    def __enter__(self) -> BucketFeed:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._error = error
        self._is_complete = True
        wake_up(self._loop, self._changed.set)

    def __aiter__(self) -> BucketFeed:
        return self

    async def __anext__(self) -> Bucket:
        """Empties the previous bucket, then waits at most `timeout_s` for the next `put` or the end of `with`."""
        self._taken_bucket.tensors.clear()
        while self._next is None:
            if self._error is not None:
                raise WeightSyncError(f"the export of weights failed: {self._error!r}") from self._error
            if self._is_complete:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.timeout_s)
            except TimeoutError as error:
                raise WeightSyncError(
                    f"the trainer sent no bucket for {self.timeout_s:g} s; a rank may hang"
                ) from error
        self._taken_bucket, self._next = self._next, None
        self._taken.set()
        return self._taken_bucket


def wait_while_running(loop: asyncio.AbstractEventLoop, awaited: Future[Any] | threading.Event) -> None:
    """Waits for a future or event that the loop sets; called from another thread.

    Raises:
        WeightSyncError: if the loop has stopped or is blocked, so that it cannot check deadlines.
    """
    try:
        wait_on_loop(loop, awaited, silent_s=BLOCKED_S)
    except LoopEnded as error:
        raise loop_ended(loop) from error
    except LoopBlocked as error:
        raise WeightSyncError(
            f"The engine's event loop did not answer for {BLOCKED_S:g} s during a weight sync. A "
            "workflow, environment or async reward is blocking it. Use await there, or move the work to a thread."
        ) from error


def loop_ended(loop: asyncio.AbstractEventLoop) -> WeightSyncError:
    """Returns the error of a sync whose event loop has stopped."""
    cause = f"The rollout thread died: {deaths[loop]!r}" if loop in deaths else "The log says why"
    return WeightSyncError(
        f"The engine's event loop stopped during a weight sync. {cause}. Resume from the last checkpoint."
    )
