"""RankWatch: a rank that fails ends all ranks within seconds, and one that hangs is named.

A collective waits for every rank, so otherwise the others would wait half an hour for a failed rank, and the error
would name a collective, not the culprit. On each rank a thread publishes the rank's state (phase, number of phases so
far, time without a step) in a store on rank 0, and checks the store for failures of the others.

    rank 1 raises ──► its traceback into the store ──► the others print it ──► they end by themselves, or are ended
    rank 0 waits for longer than the deadline ──► who is behind? ──► the same way, with every rank's stack
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Protocol

POLL_S = 0.5  # between two checks of the store
GRACE_S = 10.0  # for a main thread to end by itself after another rank failed

_FAILURE = "failure"
_STORE_IS_GONE = (RuntimeError, OSError)  # what the store's methods raise if rank 0 is gone


class Store(Protocol):
    """The part of torch.distributed's stores that is used here."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


@dataclass(frozen=True)
class RankState:
    """What a rank does.

    Example:
        RankState(phase="update", num_phases=17, num_steps=3, idle_s=0.2)
    """

    phase: str
    num_phases: int  # entered so far: a rank with fewer is behind
    num_steps: int  # within the phase
    idle_s: float  # since the last step
    has_own_deadline: bool = False  # the phase has its own timeout


def find_behind(states: Mapping[int, RankState]) -> list[int]:
    """The ranks that the others wait for: those with the fewest phases, then the fewest steps."""
    least = min((state.num_phases, state.num_steps) for state in states.values())
    return [rank for rank, state in sorted(states.items()) if (state.num_phases, state.num_steps) == least]


def hang_message(states: Mapping[int, RankState], missing: list[int], waiting: int, timeout_s: float) -> str:
    """The error of rank `waiting`, which waited too long: who is behind, and the states of all."""
    behind = missing or find_behind(states)
    all_alike = not missing and len(behind) == len(states)
    where = "; ".join(
        f"rank {rank} in {state.phase!r} (phase {state.num_phases}, step {state.num_steps}) for {state.idle_s:.0f} s"
        for rank, state in sorted(states.items())
    )
    culprits = "all ranks, at the same place" if all_alike else "rank " + ", ".join(map(str, behind))
    return (
        f"Rank {waiting} made no progress for hang_timeout_s={timeout_s:g}. It waits for {culprits}. States: {where}. "
        "See the ranks' stacks above, or increase hang_timeout_s if such a phase is normal."
    )


class RankWatch:
    """Publishes this rank's state and watches the others, from its own thread, until `close`.

    Args:
        store: shared by all ranks; used by the thread, and by `fail`.
        rank, size: of this process, and of the world.
        hang_timeout_s: how long a phase may go without a step.
        end_process: ends this process at once; for tests.
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
        self._phases: list[tuple[str, bool]] = [("start", True)]
        self._num_phases = 0
        self._num_steps = 0
        self._stepped_s = time.monotonic()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.failed_before: str | None = None  # the other rank that failed first, and its error
        self._thread = threading.Thread(target=self._run, name=f"lightrl-watch-{rank}", daemon=True)
        self._thread.start()

    def enter(self, phase: str, *, has_own_deadline: bool = False) -> None:
        self._phases.append((phase, has_own_deadline))
        self._restart_clock()

    def leave(self) -> None:
        self._phases.pop()
        self._restart_clock()

    @contextlib.contextmanager
    def own_deadline(self, is_on: bool) -> Iterator[None]:
        """Within the current phase: whether what happens inside has its own timeout. No step and no new phase."""
        phase, before = self._phases[-1]
        self._phases[-1] = (phase, is_on)
        self._stepped_s = time.monotonic()
        try:
            yield
        finally:
            self._phases[-1] = (phase, before)
            self._stepped_s = time.monotonic()

    def step(self) -> None:
        self._num_steps += 1
        self._stepped_s = time.monotonic()

    def begin(self) -> None:
        """Startup is over: from now on time outside of phases has a deadline too."""
        self._phases[0] = ("between two phases", False)
        self._restart_clock()

    def fail(self, error: BaseException, timeout_s: float = 3.0) -> None:
        """Tells the others that this rank failed, and waits briefly until they know: the store may end with us.

        Does nothing if another rank failed first: this error then follows from that one.
        """
        if self.failed_before is not None:
            return
        lines = "".join(traceback.format_exception(error))
        with contextlib.suppress(*_STORE_IS_GONE):  # rank 0 ended first and reported why
            with self._lock:
                if self._closed.is_set():
                    return
                where = f"failed in {self._phases[-1][0]!r}"
                what = "".join(traceback.format_exception_only(error)).strip()
                ours = json.dumps([self._rank, f"{where}:\n{lines}", f"{where}: {what}"])
                self._note(self._store.compare_set(_FAILURE, "", ours))
            keys = [f"knows/{rank}" for rank in range(self._size) if rank != self._rank]
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                with self._lock:
                    if self._store.check(keys):
                        return
                time.sleep(POLL_S / 5)

    def close(self) -> None:
        """Stops watching: this rank has ended as planned, or is about to."""
        self._closed.set()
        self._thread.join(5 * POLL_S)

    def state(self) -> RankState:
        """This rank's current state."""
        phase, has_own_deadline = self._phases[-1]
        idle_s = time.monotonic() - self._stepped_s
        return RankState(phase, self._num_phases, self._num_steps, idle_s, has_own_deadline)

    def _restart_clock(self) -> None:
        self._num_phases += 1
        self._num_steps = 0
        self._stepped_s = time.monotonic()

    def _run(self) -> None:
        while not self._closed.wait(POLL_S):
            try:
                with self._lock:
                    failure = self._check()
            except _STORE_IS_GONE:
                failure = "Rank 0 is gone, and the store with it. See its output for the reason."
            if failure is not None:
                self._end(failure)
                return

    def _check(self) -> str | None:
        """Publishes this rank's state; returns the failure that ends this rank, if there is one."""
        state = self.state()
        self._store.set(f"state/{self._rank}", json.dumps({**asdict(state), "at_s": time.time()}))
        if self._store.check([_FAILURE]):
            rank, text = self._note(self._store.get(_FAILURE))
            self._store.set(f"knows/{self._rank}", "yes")
            return None if rank == self._rank else f"Rank {rank} {text}"
        if state.idle_s > self._hang_timeout_s and not state.has_own_deadline:
            states = self._states()
            behind = [states[rank] for rank in find_behind(states)]
            if all(one.idle_s > self._hang_timeout_s and not one.has_own_deadline for one in behind):
                missing = [rank for rank in range(self._size) if rank not in states]
                text = hang_message(states, missing, self._rank, self._hang_timeout_s)
                # -1: no rank raised it, so all ranks report it.
                self._store.compare_set(_FAILURE, "", json.dumps([-1, f": {text}", ""]))
        return None

    def _note(self, failure: bytes) -> tuple[int, str]:
        """The rank that failed first and its report, from the store."""
        rank, text, short = json.loads(failure)
        if rank not in (-1, self._rank):
            self.failed_before = f"Rank {rank} {short}"
        return rank, text

    def _states(self) -> dict[int, RankState]:
        """The published states; a rank that stopped publishing has been idle since."""
        states: dict[int, RankState] = {}
        for rank in range(self._size):
            key = f"state/{rank}"
            if self._store.check([key]):
                state = json.loads(self._store.get(key))
                silent_s = max(0.0, time.time() - state.pop("at_s"))  # the machines' clocks differ by far less
                state["idle_s"] += silent_s
                states[rank] = RankState(**state)
        return states

    def _end(self, failure: str) -> None:
        """Prints the stack, then the failure; ends the process if the main thread does not end in time."""
        frame = sys._current_frames().get(self._main_thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        phase = self._phases[-1][0]
        failure = failure.replace("Rank -1 : ", "")
        sys.stderr.write(f"\nRank {self._rank} is here:\n{stack}\n[rank {self._rank}, in {phase!r}] {failure}\n")
        sys.stderr.flush()
        if not self._closed.wait(GRACE_S):
            self._end_process()


def _end_process() -> None:
    # Not sys.exit: the main thread may be inside a collective, which no exception reaches.
    sys.stderr.flush()
    os._exit(1)
