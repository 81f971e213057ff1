"""Supervisor: hands trajectories to workers in batches, enforces the deadline of each call, and finds which one hangs.

A worker is a process (pool.py) or a thread (hook.py). Each has one supervising thread (SupervisedWorker), which starts
it, sends it a batch of the calls that wait (CallQueue), receives its outcomes, and ends and replaces it when a call is
overdue or the worker died.

Which call is at fault: a sync function runs one trajectory after another, so the first unfinished one of the batch is
at fault and the rest waits for the next worker. An async function runs the whole batch together; if its worker hangs or
dies, each unfinished trajectory gets one more try alone, which leaves no doubt.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from lightrl.checks.bounds import check_positive
from lightrl.concurrency.loop_thread import WakeUps
from lightrl.errors import RewardError
from lightrl.rewards.reward_result import Outcome, RewardResult, killed_error, timeout_error
from lightrl.trajectory import Trajectory

log = logging.getLogger(__name__)

_TICK_S = 0.1  # how often a waiting supervising thread checks whether it was closed
_ASYNC_GRACE_S = 1.0  # the worker cancels an overdue async call itself; it is ended only if that fails
_GATHER_S = 0.001  # outcomes of a batch that come within this are handed over together
_MAX_TOGETHER = 64  # calls of an async function that run at the same time
_MAX_BATCH = 256
_BATCH_S = 0.05  # a batch takes about as long: slow calls are shared out one by one, fast ones seldom wait for a batch
_MAX_BATCH_BYTES = 1 << 20
_MAX_RESTARTS = 3
_RESTART_WAIT_S = 1.0
_CLOSE_TIMEOUT_S = 10.0

Request = TypeVar("Request")
RequestIn = TypeVar("RequestIn", contravariant=True)


class WorkerDied(Exception):
    """A worker ended by itself; the message says how."""


class Worker(Protocol[RequestIn]):
    """Runs the reward function; its one supervising thread calls all methods."""

    @property
    def runs_together(self) -> bool:
        """Whether the rewards of a batch are computed at the same time."""
        ...

    def is_ready(self, wait_s: float) -> bool:
        """Waits up to `wait_s` for the function, then stays True; ValueError if there is none, WorkerDied."""
        ...

    def is_alive(self) -> bool: ...

    def send(self, requests: Sequence[RequestIn]) -> None:
        """Starts a batch; the previous one is finished."""
        ...

    def receive(self, wait_s: float) -> list[tuple[int, Outcome]]:
        """(position in the batch, outcome) of what finished, after at most `wait_s`; WorkerDied at its end."""
        ...

    def stack(self) -> str:
        """The line at which the function is now, for the message about a hang; "" if unknown."""
        ...

    def end(self) -> None:
        """Ends the worker and whatever it started, as far as that is possible."""
        ...


@dataclass(eq=False)
class _Call(Generic[Request]):
    trajectory: Trajectory
    request: Request
    num_bytes: int
    future: asyncio.Future[RewardResult]
    is_alone: bool = False  # it hung or died together with others: next time it gets a worker for itself


class CallQueue(Generic[Request]):
    """The calls that wait for a worker; all are refused once it is closed or no worker is left."""

    def __init__(self, num_workers: int) -> None:
        self.refusal: str | None = None  # why no more calls are taken
        self._num_workers = num_workers
        self._waiting: deque[_Call[Request]] = deque()
        self._changed = threading.Condition()

    def add(self, calls: Sequence[_Call[Request]], *, first: bool = False) -> None:
        """Adds calls in their order, with `first` before all that wait."""
        with self._changed:
            if self.refusal is None:
                if first:
                    self._waiting.extendleft(reversed(calls))
                else:
                    self._waiting.extend(calls)
                self._changed.notify(len(calls))
                return
        _settle((call, RewardError(str(self.refusal), reason="killed")) for call in calls)

    def refuse(self, why: str) -> None:
        """Refuses the calls that wait and all later ones; the first reason stays."""
        with self._changed:
            self.refusal = self.refusal or why
            calls, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        _settle((call, RewardError(why, reason="killed")) for call in calls)

    def take(self, most: int) -> list[_Call[Request]]:
        """The next calls for one worker, empty when closed; a fair share, so that all workers finish together."""
        batch: list[_Call[Request]] = []
        with self._changed:
            while not batch and self.refusal is None:
                if not self._waiting:
                    self._changed.wait()
                share = min(-(-len(self._waiting) // self._num_workers), most)
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


@dataclass(eq=False, kw_only=True)
class SupervisedWorker(Generic[Request]):
    """A worker, its spare, and when one replaces the other; `supervise` runs in a thread of its own."""

    name: str
    make_worker: Callable[[], Worker[Request]]
    timeout_s: float
    startup_timeout_s: float
    recycle_after: int | None
    calls: CallQueue[Request]
    ready: Future[None]  # done when the first worker of all is ready
    _spare: Worker[Request] | None = None  # starts while the worker works; exists after the first replacement
    _num_calls: int = 0  # that the worker has run
    _num_deaths: int = 0  # workers that died while idle, in a row
    _max_batch: int = _MAX_TOGETHER

    def supervise(self) -> None:
        """Runs batches until calls are refused; answers every call that it has taken, whatever happens."""
        worker: Worker[Request] | None = None
        batch: list[_Call[Request]] = []
        try:
            worker = self._ready_worker(None)
            while batch := self.calls.take(self._max_batch):
                if self._run_batch(worker, batch) and not self._is_worn_out():
                    continue
                worker.end()
                worker, self._spare = self._spare, None  # so that whatever is raised ends both
                worker = self._ready_worker(worker)
                self._num_calls = 0
                self._spare = self._start_spare() if self.calls.refusal is None else None
        except Exception as error:  # noqa: BLE001  # nobody else answers the calls, which would wait for ever
            if not self.ready.done():
                self.ready.set_exception(error if isinstance(error, ValueError) else WorkerDied(str(error)))
            what = str(error) if isinstance(error, (ValueError, WorkerDied)) else repr(error)
            self.calls.refuse(f"Reward function {self.name} has no worker left: {what}")
            self.calls.add(batch)  # refuses those without a result
        finally:
            for each in (worker, self._spare):
                if each is not None:
                    each.end()
            if not self.ready.done():
                self.ready.set_exception(ValueError(str(self.calls.refusal)))

    def _run_batch(self, worker: Worker[Request], batch: Sequence[_Call[Request]]) -> bool:
        """Runs a batch, or puts it back if the worker died before; False if the worker cannot be used again."""
        if not worker.is_alive():  # it died while idle: no trajectory is at fault
            self.calls.add(batch, first=True)
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

    def _is_worn_out(self) -> bool:
        """Whether the worker has run `recycle_after` calls and its successor, which this starts, is ready."""
        if self.recycle_after is None or self._num_calls < self.recycle_after:
            return False
        self._spare = self._spare or self._start_spare()
        return self._spare is not None and self._spare.is_ready(0.0)

    def _ready_worker(self, worker: Worker[Request] | None) -> Worker[Request]:
        """A worker that is ready, this one if possible; if this is being closed, one that is still starting."""
        for attempt in range(1 + _MAX_RESTARTS):
            try:
                worker = worker or self._start_worker()
                self._wait_until_ready(worker)
                return worker
            except (ValueError, WorkerDied):
                if worker is not None:
                    worker.end()
                if attempt == _MAX_RESTARTS or not self.ready.done():  # the very first one: fail at once
                    raise
                worker = None
                time.sleep(_RESTART_WAIT_S * attempt)  # a machine without processes or memory may have some soon
        raise AssertionError("the last attempt returns or raises")

    def _start_worker(self) -> Worker[Request]:
        try:
            return self.make_worker()
        except (OSError, MemoryError, RuntimeError) as error:  # no more processes, threads, memory or disk
            raise WorkerDied(f"its worker could not be started: {error!r}.") from error

    def _start_spare(self) -> Worker[Request] | None:
        """None if the machine cannot start one now; the next one may."""
        try:
            return self._start_worker()
        except WorkerDied as error:
            log.warning("Reward function %s has no spare worker: %s", self.name, error)
            return None

    def _wait_until_ready(self, worker: Worker[Request]) -> None:
        deadline = time.monotonic() + self.startup_timeout_s
        while self.calls.refusal is None:
            if worker.is_ready(_TICK_S):
                if not self.ready.done():
                    self.ready.set_result(None)
                return
            if time.monotonic() > deadline:
                raise WorkerDied(
                    f"Importing reward function {self.name} took longer than "
                    f"startup_timeout_s={self.startup_timeout_s:g}. Increase it, or make the import faster. It is "
                    f"at:\n{worker.stack()}"
                )

    def _receive(self, worker: Worker[Request], batch: Sequence[_Call[Request]]) -> bool:
        """Computes the rewards of a batch; False if the worker cannot be used again."""
        unfinished = dict(enumerate(batch))
        worker.send([call.request for call in batch])
        allowed_s = self.timeout_s + (min(_ASYNC_GRACE_S, self.timeout_s) if worker.runs_together else 0.0)
        since = time.monotonic()
        while unfinished:
            left_s = since + allowed_s - time.monotonic()
            outcomes: dict[int, Outcome] = {}
            death: WorkerDied | None = None
            try:
                for index, outcome in worker.receive(max(0.0, min(left_s, _TICK_S))):
                    if index in outcomes or index not in unfinished:
                        raise WorkerDied(f"it gave a second outcome for the call at position {index} of its batch")
                    if isinstance(outcome, RewardResult):  # nobody else checks what comes from a process
                        outcome = RewardResult.of(outcome, unfinished[index].trajectory)
                    outcomes[index] = outcome
            except WorkerDied as error:
                death = error
            except RewardError as error:
                death = WorkerDied(f"its reply pipe carried a result that is none: {error}")
            if outcomes:
                _settle((unfinished.pop(index), outcome) for index, outcome in outcomes.items())
            if death is not None:  # what came before it counts
                if unfinished:
                    self._blame(worker, unfinished, functools.partial(killed_error, self.name, str(death)))
                return False
            if outcomes:
                if any(isinstance(item, RewardError) and item.reason == "killed" for item in outcomes.values()):
                    self.calls.add(list(unfinished.values()), first=True)  # the worker has no memory left
                    return False
                if not worker.runs_together:
                    since = time.monotonic()
                if unfinished:
                    time.sleep(_GATHER_S)  # so that threads are woken once for many
            elif self.calls.refusal is not None:
                self.calls.add(list(unfinished.values()), first=True)
                return False
            elif left_s <= 0:
                overdue = functools.partial(timeout_error, self.name, self.timeout_s, worker.stack())
                self._blame(worker, unfinished, overdue)
                return False
        return True

    def _blame(
        self,
        worker: Worker[Request],
        unfinished: dict[int, _Call[Request]],
        error_of: Callable[[Trajectory], RewardError],
    ) -> None:
        calls = [unfinished[index] for index in sorted(unfinished)]
        if worker.runs_together and len(calls) > 1:
            for call in calls:
                call.is_alone = True
            self.calls.add(calls, first=True)
            return
        _settle([(calls[0], error_of(calls[0].trajectory))])
        self.calls.add(calls[1:], first=True)


class Supervisor(ABC, Generic[Request]):
    """The base of RewardPool and RewardHook: workers, their supervising threads, and the calls that wait for them.

    `start` and `close` may be called from any thread, `compute_reward` and `compute_rewards` on any event loop.

    Args:
        name: of the reward function, for messages.
        make_worker: gives a new worker that is starting.
        workers: how many of them.
        timeout_s: deadline of one call in seconds, from the moment it starts to run.
        startup_timeout_s: deadline of `Worker.is_ready` in seconds.
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
        self._name = name
        self._num_workers = workers
        self._calls: CallQueue[Request] = CallQueue(workers)
        self._ready: Future[None] = Future()  # done when the first worker is ready
        self._make_supervised = functools.partial(
            SupervisedWorker[Request],
            name=name,
            make_worker=make_worker,
            timeout_s=timeout_s,
            startup_timeout_s=startup_timeout_s,
            recycle_after=recycle_after,
            calls=self._calls,
            ready=self._ready,
        )
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()  # of `_threads`

    def start(self) -> None:
        """Returns when one worker has the function; the others get ready meanwhile. A second call changes nothing.

        Raises:
            ValueError: if there is no such function, or it is not there within `startup_timeout_s`.
        """
        with self._lock:
            if self._calls.refusal is not None:
                raise RuntimeError(f"{self._calls.refusal} Make a new one.")
            if not self._threads:
                self._add_thread()
        try:
            self._ready.result()
        except (ValueError, WorkerDied) as error:
            self.close()
            raise ValueError(str(error)) from error
        with self._lock:
            while len(self._threads) < self._num_workers and self._calls.refusal is None:
                self._add_thread()

    def close(self) -> None:
        """Ends all workers within seconds; pending calls raise RewardError. May be called twice."""
        self._calls.refuse(f"The workers of reward function {self._name} were closed.")
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_TIMEOUT_S)

    async def compute_reward(self, trajectory: Trajectory) -> RewardResult:
        """The result of one trajectory; waits for a worker and for the function, which has `timeout_s`.

        A supervising thread wakes it. On cancellation a waiting call is forgotten; a running one finishes and its
        outcome is ignored.

        Raises:
            RewardError: reason `raised` (also if the trajectory cannot be sent), `invalid`, `not_finite`, `timeout` or
                `killed` (also if this was closed).
        """
        return await self.compute_rewards([trajectory])[0]

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        """Futures of the running loop, one for each trajectory, with what `compute_reward` returns or raises."""
        if not self._threads:
            raise RuntimeError(f"Call start() of reward function {self._name} before compute_reward().")
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
        self._calls.add(calls)
        return futures

    @abstractmethod
    def _request_of(self, trajectory: Trajectory) -> tuple[Request, int]:
        """Encodes what a worker gets; returns it with its size in bytes; raises RewardError if it cannot be sent."""

    def _add_thread(self) -> None:
        name = f"reward-supervisor-{len(self._threads)}"
        thread = threading.Thread(target=self._make_supervised().supervise, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()


def _settle(outcomes: Iterable[tuple[_Call[Request], Outcome]]) -> None:
    wake_ups = WakeUps()
    for call, outcome in outcomes:
        wake_ups.settle(call.future, outcome)
    wake_ups.send()
