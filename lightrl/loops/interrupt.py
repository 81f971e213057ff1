"""Ctrl-C and SIGTERM stop the start of a stage immediately, but let an update finish."""

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
    """Holds back the first SIGINT while an update runs; `check` raises it afterwards. A second one is not held back."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forgets the signals of earlier stages."""
        self.is_held = False
        self.is_terminated = False  # a SIGTERM was held back

    def check(self) -> None:
        """Raises the KeyboardInterrupt that was held back, if there is one."""
        if self.is_held:
            self.is_held = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Remembers the first SIGINT inside the context instead of raising it. Does nothing off the main thread."""
        previous = signal.getsignal(signal.SIGINT)

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.is_held and callable(previous):
                previous(number, frame)
            self.is_held = True

        with _handled_by({signal.SIGINT: interrupt}):
            yield

    @contextlib.contextmanager
    def raised_at_once(self, ranks: Ranks) -> Iterator[None]:
        """Raises SIGTERMException immediately inside the context, so that it ends a start that waits for servers.

        Lightning's handler only records the signal until the end of a batch. With several ranks, rank 0 raises it; the
        others ignore the signal, because rank 0's message ends them.
        """
        lightning_handler = signal.getsignal(signal.SIGTERM)
        num_received = 0

        def terminate(number: int, frame: FrameType | None) -> None:
            nonlocal num_received
            num_received += 1
            if ranks.size == 1 and callable(lightning_handler):  # on several ranks it would wait for the others
                lightning_handler(number, frame)
            if num_received == 1:
                raise SIGTERMException

        with _handled_by({signal.SIGTERM: terminate} if ranks.is_main else _IGNORED):
            yield

    @contextlib.contextmanager
    def held_back_on_all_ranks(self, ranks: Ranks) -> Iterator[None]:
        """Makes Ctrl-C and SIGTERM end all ranks at the same place, chosen by rank 0; changes nothing for one rank.

        A terminal sends Ctrl-C to all processes, and Slurm sends SIGTERM to all tasks; a rank that stopped on its own
        would leave the others in the middle of a collective. A second Ctrl-C on rank 0 is not held back.
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
    """Sets these signal handlers inside the context; does nothing off the main thread, where Python allows none."""
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items() if is_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
