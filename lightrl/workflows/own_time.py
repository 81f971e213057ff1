"""OwnTime: the deadline of a workflow's own code, apart from the policy's generations, which have theirs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any


class OwnTime:
    """Cancels the current task when a workflow has spent `timeout_s` at a time outside of `generate`.

    Used around a workflow's run, on the event loop; `generating` around each of its generations, which may overlap.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.is_over = False
        self._num_generating = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Any] | None = None

    def __enter__(self) -> OwnTime:
        self._task = asyncio.current_task()
        self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.timeout_s = None  # also for generations that the workflow left behind
        self._stop()

    @contextlib.contextmanager
    def generating(self) -> Iterator[None]:
        self._num_generating += 1
        self._stop()
        try:
            yield
        finally:
            self._num_generating -= 1
            if self._num_generating == 0:
                self._start()

    def _start(self) -> None:
        if self.timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self.timeout_s, self._end)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self) -> None:
        assert self._task is not None
        self.is_over = True
        self._task.cancel()
