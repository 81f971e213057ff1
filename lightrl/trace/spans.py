"""span: measures a block of code, and keeps what it measured while a trace is open.

Without a trace a span costs two reads of the clock, with one also an append: less than a microsecond. It may be around
an `await`. Times are `time.perf_counter_ns`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

# The offset of each machine's clock from rank 0's, with bounds that need no assumption about the network: no rank
# leaves a barrier before the last has arrived. So what a rank reads after a barrier is later than what any rank read
# before it, and each barrier bounds the offset of two clocks from both sides.

Reading = tuple[int, int]  # this rank's clock before and after a barrier, in ns


def clock_offset_ns(own: Sequence[Reading], first: Sequence[Reading]) -> tuple[int, int]:
    """Measures what to subtract from a rank's clock to get rank 0's, and its largest error, in ns.

    Args:
        own, first: readings of the rank and of rank 0 around the same barriers, in order.
    """
    at_least = max(before - after_first for (before, _), (_, after_first) in zip(own, first, strict=True))
    at_most = min(after - before_first for (_, after), (before_first, _) in zip(own, first, strict=True))
    return (at_least + at_most) // 2, max(0, at_most - at_least) // 2


class Event(NamedTuple):
    """A block that has ended."""

    name: str
    category: str  # phase, step, generate, reward, data, loader, score, update, collective, sync, wait, server
    track: str  # its line in the viewer; its events may overlap unless it is a thread's
    start_ns: int
    end_ns: int
    args: dict[str, object]


class Tape:
    """The events of this process, from all threads, until they are taken."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_recording = True

    def take(self) -> list[Event]:
        events = self.events[:]  # another thread may append meanwhile
        del self.events[: len(events)]
        return events


_tape: Tape | None = None


def keep(tape: Tape | None) -> None:
    """Starts to keep spans on this tape; None stops it."""
    global _tape
    _tape = tape


def record(name: str, category: str, track: str, start_ns: int, **args: object) -> None:
    """Keeps a block that ends now, for those that are no block in the code."""
    tape = _tape
    if tape is not None and tape.is_recording:
        tape.events.append(Event(name, category, track, start_ns, time.perf_counter_ns(), args))


class span:
    """Measures a block: `with span("reference", "score", tokens=512) as measured:`; then `measured.seconds`.

    Args:
        name, category: of the event.
        track: its line in the viewer; the thread's name if empty. Blocks that overlap need one of their own.
        args: shown with the event; more may be put into `measured.args` inside.
    """

    __slots__ = ("args", "category", "end_ns", "name", "start_ns", "track")

    def __init__(self, name: str, category: str, track: str = "", **args: object) -> None:
        self.name, self.category, self.track, self.args = name, category, track, args
        self.start_ns = self.end_ns = 0

    def __enter__(self) -> span:
        self.start_ns = time.perf_counter_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end_ns = time.perf_counter_ns()
        tape = _tape
        if tape is None or not tape.is_recording:
            return
        if error is not None:
            self.args["error"] = type(error).__name__
        track = self.track or thread_track()
        tape.events.append(Event(self.name, self.category, track, self.start_ns, self.end_ns, self.args))

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def thread_track() -> str:
    """The track of this thread: the main one is the trainer's."""
    thread = threading.current_thread()
    return "trainer" if thread is threading.main_thread() else thread.name


def in_microbatch_spans(
    loss: Callable[..., Any], backward: Callable[[Any], None]
) -> tuple[Callable[..., Any], Callable[[Any], None]]:
    """`loss` and `backward` as they are without a trace; with one they leave an event for each forward and backward.

    A forward is the time from the thread's last backward to the loss. On a GPU these are times of the host, which only
    starts the work there.
    """
    if _tape is None or not _tape.is_recording:
        return loss, backward
    first_start_ns = time.perf_counter_ns()
    since: dict[int, int] = {}  # thread → end of its last backward

    def traced_loss(experience: Any, outputs: Any) -> Any:
        start_ns = since.get(threading.get_ident(), first_start_ns)
        record("forward", "update", thread_track(), start_ns, trajectories=len(experience))
        with span("loss", "update"):
            return loss(experience, outputs)

    def traced_backward(value: Any) -> None:
        with span("backward", "update") as measured:
            backward(value)
        since[threading.get_ident()] = measured.end_ns

    return traced_loss, traced_backward
