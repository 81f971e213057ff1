"""Between the thread that makes buckets and the event loop that sends them: hand a bucket over, run what blocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

from lightrl.concurrency.wake_up import wake_up
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket

_T = TypeVar("_T")

LOOK_S = 1.0  # between two looks of a waiting thread at the loop


class BucketFeed:
    """Buckets from the thread that makes them to a coroutine: `put` returns when the coroutine has taken it.

    Args:
        loop: of the coroutine.
        timeout_s: the coroutine waits for so long for the next bucket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._loop = loop
        self._changed = asyncio.Event()
        self._taken = threading.Event()
        self._next: Bucket | None = None  # offered, not yet taken
        self._is_over = False  # no bucket comes any more
        self._is_stopped = False  # none is wanted any more
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Hands a bucket over; False if none is wanted any more. The coroutine has the deadlines.

        Raises:
            WeightSyncError: if its loop has ended.
        """
        self._taken.clear()
        if self._is_stopped:
            return False
        self._next = bucket
        self._wake()
        wait_while_running(self._loop, self._taken.wait)  # `stop` ends it when the coroutine is over
        return not self._is_stopped

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def fail(self, error: BaseException) -> None:
        """No further bucket comes, because of `error`."""
        self._error = error
        self.end()

    def stop(self) -> None:
        self._is_stopped = True
        self._taken.set()

    def _wake(self) -> None:
        wake_up(self._loop, self._changed.set)

    def __aiter__(self) -> BucketFeed:
        return self

    async def __anext__(self) -> Bucket:
        """Waits for the next `put`, `end` or `fail`, at most `timeout_s`."""
        while self._next is None:
            if self._error is not None:
                raise WeightSyncError(f"the export of weights failed: {self._error!r}") from self._error
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.timeout_s)
            except asyncio.TimeoutError as error:
                raise WeightSyncError(
                    f"the trainer made no bucket for timeout_s={self.timeout_s:g}, expected one; a rank may hang"
                ) from error
        bucket, self._next = self._next, None
        self._taken.set()
        return bucket


def wait_while_running(loop: asyncio.AbstractEventLoop, wait: Callable[[float], object]) -> None:
    """In another thread than the loop's: calls `wait`, with so many seconds to wait, until it gives something true.

    Raises:
        WeightSyncError: if the loop has ended, for then nobody would come.
    """
    num_silent = 0
    while not wait(LOOK_S):
        num_silent = 0 if loop.is_running() else num_silent + 1
        if num_silent > 1:  # one that an exception has left may just be starting again
            raise WeightSyncError(
                "The event loop of the engine's requests has ended amid a weight sync, expected it to run until the "
                "sync is over. The log says what ended it; resume from the last checkpoint."
            )
