"""Ctrl-C and SIGTERM: they end the start of a stage at once, and wait for the end of an update, which must be whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType

from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightrl.strategies import Ranks

_Handler = Callable[[int, FrameType | None], None]
_IGNORED: dict[signal.Signals, _Handler] = dict.fromkeys((signal.SIGINT, signal.SIGTERM), lambda number, frame: None)


class InterruptGate:
    """Holds one SIGINT back while an update runs; `check` raises it afterwards. A second Ctrl-C is not held back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets what came in an earlier stage."""
        self.is_held = False
        self.is_terminated = False  # SIGTERM came while it was held back

    def check(self) -> None:
        """Raises the KeyboardInterrupt that was held back, if there is one."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Inside, the first SIGINT is remembered instead of raised. Does nothing off the main thread."""
        previous = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.is_held and callable(previous):
                previous(number, frame)
            self.is_held = True

        with _handled_by({signal.SIGINT: interrupt}):
            yield

    @contextlib.contextmanager
    def raised_at_once(self, ranks: Ranks) -> Iterator[None]:
        """Inside, the first SIGTERM raises SIGTERMException at once, so that it ends a start that waits for servers.

        Lightning's own handler only notes the signal, for the end of a batch. Of several ranks, rank 0 raises it; the
        others ignore the signal, since rank 0's message ends them.
        """
        lightning_handler = signal.getsignal(signal.SIGTERM)
        num_received = 0

        def terminate(number: int, frame: FrameType | None) -> None:
            nonlocal num_received
            num_received += 1
            if ranks.size == 1 and callable(lightning_handler):  # that of several ranks would wait for the others
                lightning_handler(number, frame)
            if num_received == 1:
                raise SIGTERMException

        with _handled_by({signal.SIGTERM: terminate} if ranks.is_main else _IGNORED):
            yield

    @contextlib.contextmanager
    def held_back_on_all_ranks(self, ranks: Ranks) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM end several ranks at the same place, where rank 0 says so; one rank as ever.

        A terminal sends Ctrl-C to all processes and Slurm SIGTERM to all tasks; a rank that stopped by itself would
        leave the others in the middle of a collective. A second Ctrl-C on rank 0 is not held back.
        """

        def terminate(number: int, frame: FrameType | None) -> None:
            self.is_terminated = True

        if ranks.size == 1:
            yield
        elif ranks.is_main:
            with _handled_by({signal.SIGTERM: terminate}), self.held_back():
                yield
        else:
            with _handled_by(_IGNORED):
                yield


@contextlib.contextmanager
def _handled_by(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    """Inside, these signals have these handlers; nothing changes off the main thread, where Python allows none."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
