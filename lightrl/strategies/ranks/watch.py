"""RankWatch: ends all ranks within seconds if one fails, and names a rank that hangs, is stopped or dies.

A collective waits for every rank. Without a watch, the other ranks would wait half an hour for a failed rank, and the
error would name a collective instead of the rank. On each rank a thread publishes the rank's state (phase, number of
phases so far, time without a step) in a store on rank 0, and checks the store for failures on other ranks. Rank 0
watches all ranks, and all ranks watch rank 0.

    rank 1 raises ──► puts its traceback into the store ──► the others print it ──► they exit, or are killed later
    rank 1 is killed ──► connections break ──► which rank publishes no state? ──► as above, naming rank 1
    a rank waits for longer than the deadline ──► which rank is behind? ──► as above, with every rank's stack
    rank 1 publishes nothing for that long (SIGSTOP) ──► as above, even in a phase with its own deadline
    rank 0 is stopped, and its store with it ──► a second thread measures how long the store has been silent
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

from torch.distributed import DistError

from lightrl.concurrency.owner import kill_owner, own_mark

POLL_S = 0.5  # seconds between checks of the store
GRACE_S = 10.0  # time for the main thread to exit after another rank failed
START_S = 1500.0  # limit without a step while models are loaded or downloaded; below the collectives' timeout of 1800 s
ROLL_CALL_POLLS = 10  # after a connection breaks, a rank that publishes nothing for this many polls counts as dead

START = "start"  # the phase before training
_FAILURE = "failure"
# The rank that failed (-1 if none raised an error, so all ranks report it), the text, its last line, the dead ranks.
Failure = tuple[int, str, str, list[int]]
_TIMED_OUT = re.compile(r"SeqNum=(\d+), OpType=(\w+), NumelIn=(\d+).*?Timeout\(ms\)=(\d+)")  # NCCL's watchdog
_STORE_ERRORS = (RuntimeError, OSError)  # what the store's methods raise if rank 0 has died
_DIED = "was killed, or its machine or network failed; its output may say more"


class Store(Protocol):
    """The methods of torch.distributed's stores that are used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


@dataclass(frozen=True)
class RankState:
    """The state that a rank publishes, such as `RankState("update", num_phases=17, num_steps=3, idle_s=0.2)`."""

    phase: str
    num_phases: int  # number of phases entered so far; a rank with fewer phases is behind
    num_steps: int  # number of steps in the phase so far
    idle_s: float  # time since the last step
    has_own_deadline: bool = False  # the phase has its own timeout
    has_ended: bool = False  # the rank has finished as planned, and publishes nothing more
    host: str = ""
    process: str = ""  # the process's mark, see owner.py
    num_published: int = 0  # number of states published so far; makes all states different

    def is_late(self, timeout_s: float) -> bool:
        limit_s = max(timeout_s, START_S) if self.phase == START else timeout_s
        return self.idle_s > limit_s and not self.has_own_deadline

    @property
    def place(self) -> str:
        return f"in {self.phase!r} (phase {self.num_phases}, step {self.num_steps})"


def find_behind(states: Mapping[int, RankState]) -> list[int]:
    """Returns the ranks that other ranks wait for: those with the fewest phases and, among these, the fewest steps."""
    least = min((state.num_phases, state.num_steps) for state in states.values())
    return [rank for rank, state in sorted(states.items()) if (state.num_phases, state.num_steps) == least]


def hang_message(states: Mapping[int, RankState], waiting: int, timeout_s: float) -> str:
    """Builds the error for rank `waiting`, which waited too long; names the ranks that are behind, and all states."""
    behind = find_behind(states)
    listed = "; ".join(f"rank {rank} {state.place} for {state.idle_s:.0f} s" for rank, state in sorted(states.items()))
    limit = f"hang_timeout_s={timeout_s:g}"
    if states[waiting].phase == START:
        limit = f"{max(timeout_s, START_S):g} s at the start"
    is_even = len(behind) == len(states)
    culprits = "all ranks, which are at the same place" if is_even else "rank " + ", ".join(map(str, behind))
    return (
        f"Rank {waiting} made no progress for {limit}. It waits for {culprits}. States: {listed}. "
        "See the ranks' stacks above, or increase hang_timeout_s if the phase normally takes this long."
    )


class RankWatch:
    """Publishes this rank's state and watches the other ranks, in two threads that run until `close`.

    The watch's clock stops while this process is stopped, so a process that resumes does not blame the other ranks.

    Args:
        store: shared by all ranks; used by one thread only.
        rank, size: this process's rank, and the world size.
        hang_timeout_s: how long a phase may go without a step (at startup at least START_S), and a rank may be silent.
        end_process: ends this process immediately; tests replace it.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        hang_timeout_s: float = 600.0,
        end_process: Callable[[], None] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._hang_timeout_s = hang_timeout_s
        self._end_process = end_process or _end_process
        self._main_thread = threading.get_ident()
        self._now_s = 0.0  # a clock that stops while this process is stopped
        self._phases: list[tuple[str, bool]] = [(START, False)]
        self._num_phases = 0
        self._num_steps = 0
        self._stepped_s = 0.0  # when this rank last made a step, by this clock
        self._answered_s = 0.0  # when the store last answered
        self._num_published = 0
        self._states: dict[int, tuple[RankState | None, float]] = {}  # rank → its last state, and when it changed
        self._error: BaseException | None = None  # this rank's error
        self._is_stored = threading.Event()  # an error is in the store, or the store is gone
        self._is_known = threading.Event()  # all ranks have read this rank's error, or this rank printed another rank's
        self._roll_call: dict[int, RankState | None] = {}  # silent rank → its state when the error occurred
        self._roll_call_s: float | None = None  # when the roll call started
        self._changed = threading.Event()  # wakes the publishing thread
        self._is_published = threading.Event()  # the current phase is published
        self._closed = threading.Event()
        self._end_lock = threading.Lock()
        self._has_printed = False  # whether the failure that ends this process was printed
        self.failed_before: str | None = None  # which other rank failed or stopped first, and how
        self._threads = [
            threading.Thread(target=target, name=f"lightrl-watch-{rank}", daemon=True)
            for target in (self._run, self._tick)
        ]
        for thread in self._threads:
            thread.start()

    def enter(self, phase: str, *, has_own_deadline: bool = False) -> None:
        self._phases.append((phase, has_own_deadline))
        self._restart_clock()

    def leave(self) -> None:
        self._phases.pop()
        self._restart_clock()

    @contextlib.contextmanager
    def own_deadline(self, is_on: bool) -> Iterator[None]:
        """Inside the context, the phase has its own timeout if `is_on`. This is neither a step nor a new phase."""
        phase, had_own_deadline = self._phases[-1]
        self._phases[-1] = (phase, is_on)
        self._stepped_s = self._now_s
        try:
            yield
        finally:
            self._phases[-1] = (phase, had_own_deadline)
            self._stepped_s = self._now_s

    def step(self) -> None:
        self._num_steps += 1
        self._stepped_s = self._now_s

    def begin(self) -> None:
        """Marks the end of startup. From now on, time outside phases has the normal deadline."""
        self._phases[0] = ("between two phases", False)
        self._restart_clock()

    def fail(self, error: BaseException, timeout_s: float = 3.0) -> None:
        """Reports this rank's failure, and waits briefly until other ranks read it, since its exit may close the store.

        If another rank failed first, that rank caused this error, so this only waits until that failure is printed.
        """
        if self._closed.is_set():
            return
        if self.failed_before is None:
            self._error = error
            self._changed.set()
            self._is_stored.wait((ROLL_CALL_POLLS + 2) * POLL_S)
        self._is_known.wait(timeout_s)

    def close(self) -> None:
        """Stops watching, because this rank exits as planned."""
        self._closed.set()
        self._changed.set()
        for thread in self._threads:
            thread.join(5 * POLL_S)

    def state(self) -> RankState:
        phase, has_own_deadline = self._phases[-1]
        return RankState(
            phase=phase,
            num_phases=self._num_phases,
            num_steps=self._num_steps,
            idle_s=self._now_s - self._stepped_s,
            has_own_deadline=has_own_deadline,
            has_ended=self._closed.is_set(),
            host=socket.gethostname(),
            process=own_mark(),
            num_published=self._num_published,
        )

    def _restart_clock(self) -> None:
        self._num_phases += 1
        self._num_steps = 0
        self._stepped_s = self._now_s
        self._is_published.clear()
        self._changed.set()
        if self._threads[0].is_alive():
            self._is_published.wait(POLL_S)  # if this rank is stopped now, the others see this phase

    def _tick(self) -> None:
        """Advances the clock, and ends this process if the store has not answered for too long."""
        ticked_s = time.monotonic()
        while not self._closed.wait(POLL_S):
            now_s = time.monotonic()
            self._now_s += min(now_s - ticked_s, 2 * POLL_S)
            ticked_s = now_s
            if self._now_s - self._answered_s > self._hang_timeout_s:
                self._end(self._silence_message(0), [0])
                return

    def _run(self) -> None:
        """Publishes this rank's state and checks for failures until `close`; only this thread uses the store."""
        checked_s = -POLL_S
        try:
            for rank in range(self._size):  # multi_get needs every key
                self._store.compare_set(f"state/{rank}", "", "null")
            while not self._closed.is_set():
                self._changed.clear()
                self._publish()
                if self._now_s - checked_s >= POLL_S / 2 or self._error is not None:
                    checked_s = self._now_s
                    if (failure := self._check()) is not None:
                        self._end(*failure)
                        return
                self._answered_s = self._now_s
                self._changed.wait(POLL_S)
            self._publish()
        except _STORE_ERRORS:
            if self._is_stored.is_set():  # this rank failed first, and rank 0 exited because of it
                self._is_known.set()
                self._end_after_grace()
            elif not self._closed.is_set():
                self._end(f"Rank 0 {_DIED}.", [])
        finally:
            self._is_stored.set()
            self._is_known.set()

    def _publish(self) -> None:
        self._num_published += 1
        state = self.state()
        self._store.set(f"state/{self._rank}", json.dumps(asdict(state)))
        if state.num_phases == self._num_phases:
            self._is_published.set()

    def _check(self) -> tuple[str, list[int]] | None:
        """Returns the failure that ends this rank, and the ranks that died or were stopped; None if there is none."""
        error = None if self._is_stored.is_set() else self._error
        self._read_states(all_ranks=error is not None or self._rank == 0)
        if self._store.check([_FAILURE]):
            stored = self._store.get(_FAILURE)
        else:
            failure = self._find_hang() if error is None else self._report(error)
            if failure is None:
                return None
            stored = self._store.compare_set(_FAILURE, "", json.dumps(failure))  # keeps the failure of a faster rank
        rank, text, last_line, dead_ranks = json.loads(stored)
        if rank != self._rank:
            self.failed_before = last_line or None
        self._is_stored.set()
        with contextlib.suppress(*_STORE_ERRORS):  # rank 0 may have read it and exited
            self._store.set(f"knows/{self._rank}", "yes")
            if rank == self._rank and self._store.check([f"knows/{other}" for other in range(self._size)]):
                self._is_known.set()
        return None if rank == self._rank else (text, dead_ranks)

    def _read_states(self, *, all_ranks: bool) -> None:
        """Reads the state of rank 0, or of every rank, and records when each state last changed.

        A rank whose state has changed since the roll call began is alive, and leaves the roll call.
        """
        ranks = range(self._size if all_ranks else 1)
        published = self._store.multi_get([f"state/{rank}" for rank in ranks])
        for rank, text in zip(ranks, published, strict=True):
            fields = json.loads(text)  # None before the rank's first publication
            state = None if fields is None else RankState(**fields)
            if rank not in self._states or self._states[rank][0] != state:
                self._states[rank] = state, self._now_s
                self._roll_call.pop(rank, None)

    def _find_hang(self) -> Failure | None:
        """Finds a stopped rank or, on rank 0, a rank that others wait for. Other ranks only watch rank 0."""
        for rank in self._running():
            if self._now_s - self._states[rank][1] > self._hang_timeout_s:
                return -1, self._silence_message(rank), "", [rank]
        states = {rank: state for rank, state in self._running().items() if state is not None}
        late = [rank for rank, state in states.items() if state.is_late(self._hang_timeout_s)]
        if self._rank != 0 or not late:
            return None
        behind = find_behind(states)
        if not set(behind) <= set(late):
            return None  # a rank that others wait for still makes progress
        waiting = next((rank for rank in late if rank not in behind), late[0])
        return -1, hang_message(states, waiting, self._hang_timeout_s), "", []

    def _running(self) -> dict[int, RankState | None]:
        """Returns the last states of ranks that have not finished as planned; None if a rank published nothing."""
        states = {rank: state for rank, (state, _) in self._states.items()}
        return {rank: state for rank, state in states.items() if state is None or not state.has_ended}

    def _silence_message(self, rank: int) -> str:
        """Builds the error for a rank whose process publishes nothing."""
        state, _ = self._states.get(rank, (None, 0.0))
        place = "since the start" if state is None else f"since it was {state.place} on {state.host}"
        return (
            f"Rank {rank} has not reported for hang_timeout_s={self._hang_timeout_s:g}, {place}. Its process is "
            f"stopped or blocked, or it {_DIED}."
        )

    def _report(self, error: BaseException) -> Failure | None:
        """Builds this rank's report; None while it is still unknown which other rank broke a connection."""
        failed = f"Rank {self._rank} failed in {self._phases[-1][0]!r}"
        problem = "".join(traceback.format_exception_only(error)).strip()
        if match := _TIMED_OUT.search(problem):
            number, name, size, limit = match.groups()
            states = {rank: state for rank, (state, _) in self._states.items() if state is not None}
            behind = ", ".join(map(str, find_behind({**states, self._rank: self.state()})))
            problem += f" It waited {int(limit) / 1000:g} s in collective {number}, {name} of {size} numbers, which"
            problem += f" another rank did not enter. Furthest behind: rank {behind}."
        if _may_be_a_broken_connection(error):
            if self._roll_call_s is None:
                self._roll_call_s = self._now_s
                self._roll_call = self._running()  # ranks that stay silent from now on have died
                self._roll_call.pop(self._rank, None)
            if self._roll_call and self._now_s - self._roll_call_s < ROLL_CALL_POLLS * POLL_S:
                return None
            if self._roll_call:
                rank, state = next(iter(self._roll_call.items()))
                death = f"Rank {rank} {_DIED}. It was {'about to start' if state is None else state.place}."
                return rank, f"{death} {failed} for that reason: {problem}", death, [*self._roll_call]
        lines = "".join(traceback.format_exception(error))
        return self._rank, f"{failed}:\n{lines}", f"{failed}: {problem}", []

    def _end(self, failure: str, dead_ranks: list[int]) -> None:
        """Prints this rank's stack and the failure; kills local `dead_ranks`, and this process if it does not exit."""
        with self._end_lock:
            if self._has_printed:
                return
            self._has_printed = True
        self.failed_before = self.failed_before or failure  # a stopped rank raised no error
        self._is_stored.set()
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        phase = self._phases[-1][0]
        sys.stderr.write(f"\nRank {self._rank} is here:\n{stack}\n[rank {self._rank}, in {phase!r}] {failure}\n")
        sys.stderr.flush()
        if self._rank == 0 and threading.current_thread() is self._threads[0]:  # the store's thread
            # The store disappears when rank 0 exits, so the other ranks read the failure first.
            keys = [f"knows/{rank}" for rank in range(1, self._size) if rank not in dead_ranks]
            deadline = time.monotonic() + 3.0
            while keys and not self._store.check(keys) and time.monotonic() < deadline:
                time.sleep(POLL_S / 5)
        self._is_known.set()
        for state in (self._states[rank][0] for rank in dead_ranks if rank in self._states):
            if state is not None and state.host == socket.gethostname():
                kill_owner(state.process)  # a stopped process would outlive the run, and keep its memory
        self._end_after_grace()

    def _end_after_grace(self) -> None:
        if not self._closed.wait(GRACE_S):
            self._end_process()


def _may_be_a_broken_connection(error: BaseException | None) -> bool:
    """Whether torch.distributed may have raised this error or its cause: gloo and NCCL raise RuntimeErrors."""
    while error is not None:
        if type(error) is RuntimeError or isinstance(error, DistError | OSError):
            return True
        error = error.__cause__ or error.__context__
    return False


def _end_process() -> None:
    # Not sys.exit: the main thread may be inside a collective, which no exception reaches.
    sys.stderr.flush()
    os._exit(1)
