"""Supervisor: sends trajectories to workers in batches, enforces each call's deadline, and finds the call that hangs.

A worker is a process (pool.py) or a thread (hook.py). Each has one supervising thread (SupervisedWorker), which starts
it, sends it batches of waiting calls (CallQueue), receives outcomes, and replaces it if it hangs or dies.

Which call is at fault: a sync function runs one trajectory after another, so the first unfinished trajectory in the
batch is at fault, and the others wait for the next worker. An async function runs the whole batch concurrently; if its
worker hangs or dies, each unfinished trajectory is tried once more in a separate batch.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lightrl.checks.bounds import check_positive
from lightrl.concurrency.loop_thread import settle_all
from lightrl.errors import RewardError
from lightrl.rewards.reward_result import Outcome, RewardResult, killed_error, timeout_error
from lightrl.trajectory import Trajectory

log = logging.getLogger(__name__)

_TICK_S = 0.1  # how often a waiting supervising thread checks whether the supervisor was closed
_ASYNC_GRACE_S = 1.0  # a worker cancels overdue async calls itself; it is stopped only if that fails
_GATHER_S = 0.001  # outcomes from a batch that arrive within this time are delivered together
_MAX_TOGETHER = 64  # calls to an async function that run at the same time
_MAX_BATCH = 256
_BATCH_S = 0.05  # target duration of a batch: slow calls are sent one by one, fast calls in large batches
_MAX_BATCH_BYTES = 1 << 20
_MAX_RESTARTS = 3
_RESTART_WAIT_S = 1.0
_CLOSE_TIMEOUT_S = 10.0

Request = TypeVar("Request")
RequestIn = TypeVar("RequestIn", contravariant=True)


class WorkerDied(Exception):
    """A worker ended unexpectedly; the message says how."""


class Worker(Protocol[RequestIn]):
    """Runs the reward function; one supervising thread calls all methods."""

    @property
    def runs_together(self) -> bool:
        """Whether the rewards in a batch are computed at the same time."""
        ...

    def is_ready(self, wait_s: float) -> bool:
        """Waits up to `wait_s` until the worker can be used; raises ValueError if the function cannot be loaded."""
        ...

    def is_alive(self) -> bool: ...

    def send(self, requests: Sequence[RequestIn]) -> None:
        """Starts a batch; only called when the previous batch is finished."""
        ...

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        """Returns (position in the batch, outcome) of finished calls after at most `wait_s`; may raise WorkerDied."""
        ...

    def stack(self) -> str:
        """Returns the function's current stack for the message about a hang; "" if it is unknown."""
        ...

    def end(self) -> None:
        """Stops the worker and everything that it started, as far as possible."""
        ...


@dataclass(eq=False)
class _Call(Generic[Request]):
    trajectory: Trajectory
    request: Request
    num_bytes: int
    future: asyncio.Future[RewardResult]
    is_alone: bool = False  # set after its batch hung or its worker died; the next batch is this call alone


class CallQueue(Generic[Request]):
    """The calls that wait for a worker. Once it is closed, or no worker is left, it refuses all calls."""

    def __init__(self, num_workers: int) -> None:
        self.refusal: str | None = None  # why calls are refused; None if they are accepted
        self._num_workers = num_workers
        self._waiting: deque[_Call[Request]] = deque()
        self._changed = threading.Condition()

    def add(self, calls: Sequence[_Call[Request]], *, first: bool = False) -> None:
        """Adds calls in their order, before all waiting calls if `first` is set."""
        with self._changed:
            if self.refusal is None:
                if first:
                    self._waiting.extendleft(reversed(calls))
                else:
                    self._waiting.extend(calls)
                self._changed.notify(len(calls))
                return
        settle_all((call.future, RewardError(str(self.refusal), reason="killed")) for call in calls)

    def refuse(self, why: str) -> None:
        """Refuses all waiting and later calls; keeps the first reason."""
        with self._changed:
            self.refusal = self.refusal or why
            calls, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        settle_all((call.future, RewardError(why, reason="killed")) for call in calls)

    def take(self, max_calls: int) -> list[_Call[Request]]:
        """Waits for calls, and returns one worker's fair share of them, or an empty list if calls are refused."""
        batch: list[_Call[Request]] = []
        with self._changed:
            while not batch and self.refusal is None:
                if not self._waiting:
                    self._changed.wait()
                share = min(-(-len(self._waiting) // self._num_workers), max_calls)
                num_bytes = 0
                while self._waiting and len(batch) < share:
                    call = self._waiting[0]
                    num_bytes += call.num_bytes
                    if batch and (call.is_alone or num_bytes > _MAX_BATCH_BYTES):
                        break
                    self._waiting.popleft()
                    if not call.future.done():  # not cancelled
                        batch.append(call)
                    if call.is_alone:
                        break
        return batch


@dataclass(eq=False)
class SupervisedWorker(Generic[Request]):
    """A worker and the spare that replaces it if necessary; `supervise` runs in a separate thread."""

    pool: Supervisor[Request]
    _spare: Worker[Request] | None = None  # starts while the worker works; exists after the first replacement
    _num_calls: int = 0  # calls that the worker has run
    _num_deaths: int = 0  # how many workers in a row died while idle
    _max_batch: int = _MAX_TOGETHER

    def supervise(self) -> None:
        """Runs batches until calls are refused; whatever happens, settles every call that it has taken."""
        worker: Worker[Request] | None = None
        batch: list[_Call[Request]] = []
        try:
            worker = self._ready_worker(None)
            while batch := self.pool.calls.take(self._max_batch):
                is_usable = self._run_batch(worker, batch)
                if is_usable and self.pool.recycle_after is not None and self._num_calls >= self.pool.recycle_after:
                    self._spare = self._spare or self._start_spare()
                    is_usable = self._spare is None or not self._spare.is_ready(0.0)
                if is_usable:
                    continue
                worker.end()
                worker, self._spare = self._spare, None  # if something raises, `finally` ends both
                worker = self._ready_worker(worker)
                self._num_calls = 0
                self._spare = self._start_spare() if self.pool.calls.refusal is None else None
        except Exception as error:  # noqa: BLE001  # otherwise the calls would wait forever
            if not self.pool.ready.done():
                self.pool.ready.set_exception(error if isinstance(error, ValueError) else WorkerDied(str(error)))
            what = str(error) if isinstance(error, (ValueError, WorkerDied)) else repr(error)
            self.pool.calls.refuse(f"Reward function {self.pool.name} has no worker left: {what}")
            self.pool.calls.add(batch)  # refuses the unfinished calls
        finally:
            for each in (worker, self._spare):
                if each is not None:
                    each.end()
            if not self.pool.ready.done():
                self.pool.ready.set_exception(ValueError(str(self.pool.calls.refusal)))

    def _run_batch(self, worker: Worker[Request], batch: Sequence[_Call[Request]]) -> bool:
        """Runs a batch, or puts it back if the worker has died; returns False if the worker cannot be used again."""
        if not worker.is_alive():  # it died while idle, so no trajectory is at fault
            self.pool.calls.add(batch, first=True)
            self._num_deaths += 1
            if self._num_deaths > _MAX_RESTARTS:
                raise WorkerDied(f"its worker died {self._num_deaths} times in a row while idle.")
            return False
        self._num_deaths = 0
        self._num_calls += len(batch)
        began_s = time.monotonic()
        is_usable = self._receive(worker, batch)
        if not worker.runs_together:
            call_s = (time.monotonic() - began_s) / len(batch)
            self._max_batch = max(1, min(_MAX_BATCH, round(_BATCH_S / max(call_s, 1e-6))))
        return is_usable

    def _ready_worker(self, worker: Worker[Request] | None) -> Worker[Request]:
        """Waits until this worker, or else a new one, is ready; returns early if the pool is closing."""
        for attempt in range(1 + _MAX_RESTARTS):
            try:
                worker = worker or self._start_worker()
                self._wait_until_ready(worker)
                return worker
            except (ValueError, WorkerDied):
                if worker is not None:
                    worker.end()
                if attempt == _MAX_RESTARTS or not self.pool.ready.done():  # the first worker gets no second attempt
                    raise
                worker = None
                time.sleep(_RESTART_WAIT_S * attempt)  # the machine may have free processes or memory soon
        raise AssertionError("the last attempt returns or raises")

    def _start_worker(self) -> Worker[Request]:
        try:
            return self.pool.make_worker()
        except (OSError, MemoryError, RuntimeError) as error:  # no more processes, threads, memory or disk
            raise WorkerDied(f"its worker could not be started: {error!r}.") from error

    def _start_spare(self) -> Worker[Request] | None:
        try:
            return self._start_worker()
        except WorkerDied as error:
            log.warning("Reward function %s has no spare worker: %s", self.pool.name, error)
            return None

    def _wait_until_ready(self, worker: Worker[Request]) -> None:
        deadline = time.monotonic() + self.pool.startup_timeout_s
        while self.pool.calls.refusal is None:
            if worker.is_ready(_TICK_S):
                if not self.pool.ready.done():
                    self.pool.ready.set_result(None)
                return
            if time.monotonic() > deadline:
                raise WorkerDied(
                    f"Importing reward function {self.pool.name} took longer than "
                    f"startup_timeout_s={self.pool.startup_timeout_s:g}. Increase it, or make the import faster. The "
                    f"import is at:\n{worker.stack()}"
                )

    def _receive(self, worker: Worker[Request], batch: Sequence[_Call[Request]]) -> bool:
        """Sends a batch to the worker and settles its calls; returns False if the worker cannot be used again."""
        unfinished = dict(enumerate(batch))
        worker.send([call.request for call in batch])
        allowed_s = self.pool.timeout_s + (min(_ASYNC_GRACE_S, self.pool.timeout_s) if worker.runs_together else 0.0)
        since = time.monotonic()
        while unfinished:
            left_s = since + allowed_s - time.monotonic()
            outcomes: dict[int, Outcome] = {}
            death: WorkerDied | None = None
            try:
                for index, outcome in worker.receive(max(0.0, min(left_s, _TICK_S))):
                    if index in outcomes or index not in unfinished:
                        raise WorkerDied(f"it returned an unexpected outcome for position {index} of its batch")
                    if isinstance(outcome, RewardResult):  # results from a process are not checked elsewhere
                        outcome = RewardResult.of(outcome, unfinished[index].trajectory)
                    outcomes[index] = outcome
            except WorkerDied as error:
                death = error
            except RewardError as error:
                death = WorkerDied(f"its reply pipe carried an invalid result: {error}")
            if outcomes:
                settle_all((unfinished.pop(index).future, outcome) for index, outcome in outcomes.items())
            if death is not None:  # outcomes that arrived before it are kept
                if unfinished:
                    self._blame(worker, unfinished, functools.partial(killed_error, self.pool.name, str(death)))
                return False
            if outcomes:
                if any(isinstance(item, RewardError) and item.reason == "killed" for item in outcomes.values()):
                    self.pool.calls.add(list(unfinished.values()), first=True)  # the worker has no memory left
                    return False
                if not worker.runs_together:
                    since = time.monotonic()
                if unfinished:
                    time.sleep(_GATHER_S)  # wakes threads once for many outcomes
            elif self.pool.calls.refusal is not None:
                self.pool.calls.add(list(unfinished.values()), first=True)
                return False
            elif left_s <= 0:
                overdue = functools.partial(timeout_error, self.pool.name, self.pool.timeout_s, worker.stack())
                self._blame(worker, unfinished, overdue)
                return False
        return True

    def _blame(
        self,
        worker: Worker[Request],
        unfinished: dict[int, _Call[Request]],
        error_of: Callable[[Trajectory], RewardError],
    ) -> None:
        """Settles the call at fault and queues the others again; if the fault is unclear, queues each call alone."""
        calls = [unfinished[index] for index in sorted(unfinished)]
        if worker.runs_together and len(calls) > 1:
            for call in calls:
                call.is_alone = True
            self.pool.calls.add(calls, first=True)
            return
        settle_all([(calls[0].future, error_of(calls[0].trajectory))])
        self.pool.calls.add(calls[1:], first=True)


class Supervisor(ABC, Generic[Request]):
    """The base class of RewardPool and RewardHook: workers, their supervising threads, and the waiting calls.

    `start` and `close` may be called from any thread, `compute_rewards` on any event loop.

    Args:
        name: the reward function's name, for messages.
        make_worker: returns a new worker, which is still starting.
        workers: the number of workers.
        timeout_s: deadline for one call, in seconds, from the moment it starts to run.
        startup_timeout_s: deadline for `Worker.is_ready`, in seconds.
        recycle_after: calls after which a worker is replaced as soon as its successor is ready; None for never.
    """

    def __init__(
        self,
        name: str,
        make_worker: Callable[[], Worker[Request]],
        *,
        workers: int,
        timeout_s: float,
        startup_timeout_s: float,
        recycle_after: int | None = None,
    ) -> None:
        check_positive(workers=workers, timeout_s=timeout_s, startup_timeout_s=startup_timeout_s)
        self.name = name
        self.make_worker = make_worker
        self.timeout_s = timeout_s
        self.startup_timeout_s = startup_timeout_s
        self.recycle_after = recycle_after
        self.calls: CallQueue[Request] = CallQueue(workers)
        self.ready: Future[None] = Future()  # done when the first worker is ready
        self._num_workers = workers
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # guards `_threads`

    def start(self) -> None:
        """Waits until one worker is ready; the others start in the background. A second call has no effect.

        Raises:
            ValueError: if the function cannot be loaded, or importing it takes longer than `startup_timeout_s`.
        """
        with self._lock:
            if self.calls.refusal is not None:
                raise RuntimeError(f"{self.calls.refusal} Create a new one.")
            if not self._threads:
                self._add_thread()
        try:
            self.ready.result()
        except (ValueError, WorkerDied) as error:
            self.close()
            raise ValueError(str(error)) from error
        with self._lock:
            while len(self._threads) < self._num_workers and self.calls.refusal is None:
                self._add_thread()

    def close(self) -> None:
        """Stops all workers within seconds; pending calls raise RewardError. Safe to call twice."""
        with self._lock:  # no thread starts afterwards
            self.calls.refuse(f"The workers for reward function {self.name} were closed.")
            threads = list(self._threads)
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_TIMEOUT_S)

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        """Returns one future on the running loop per trajectory; each waits for a worker, then for the function.

        A future is done at most `timeout_s` after its call starts to run. If it is cancelled, a waiting call is
        discarded; a running call finishes and its outcome is ignored.

        Raises:
            RewardError: in a future; reason `raised` (also if the trajectory cannot be sent), `invalid`, `not_finite`,
                `timeout` or `killed` (also after `close`).
        """
        if not self._threads:
            raise RuntimeError(f"Call start() on reward function {self.name} before compute_rewards().")
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[RewardResult]] = []
        calls = []
        for trajectory in trajectories:
            futures.append(loop.create_future())
            try:
                request, num_bytes = self._request_of(trajectory)
                calls.append(_Call(trajectory, request, num_bytes, futures[-1]))
            except RewardError as error:
                futures[-1].set_exception(error)
        self.calls.add(calls)
        return futures

    @abstractmethod
    def _request_of(self, trajectory: Trajectory) -> tuple[Request, int]:
        """Encodes a trajectory for a worker; returns it with its size in bytes, or raises RewardError."""

    def _add_thread(self) -> None:
        name = f"reward-supervisor-{len(self._threads)}"
        thread = threading.Thread(target=SupervisedWorker(self).supervise, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
