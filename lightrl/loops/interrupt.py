"""Ctrl-C during an update waits for its end: a checkpoint then holds whole iterations only."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class InterruptGate:
    """Holds one SIGINT back while an update runs; `check` raises it afterwards. A second Ctrl-C is not held back."""

    def __init__(self) -> None:
        self.is_held = False

    def check(self) -> None:
        """Raises the KeyboardInterrupt that was held back, if there is one."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, the first SIGINT is remembered instead of raised. Does nothing off the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.getsignal(signal.SIGINT)

        def handler(number: int, frame: FrameType | None) -> None:
            if self.is_held and callable(previous):
                previous(number, frame)
            self.is_held = True

        signal.signal(signal.SIGINT, handler)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)
