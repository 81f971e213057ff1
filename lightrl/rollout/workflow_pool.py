"""WorkflowPool: runs groups in other processes, whose engines follow rank 0's engine. The rest stays on rank 0.

    rank 0: GroupScheduler ─ WorkflowPool ══ channel ══► worker (workflow_worker.py) ── requests ──► servers
              order, admission,      │  ▲                   TrajectoryRunner: workflow, tokens, text
              rewards, batches       └──┴─ engine: servers' states, weight versions, pauses

The worker that runs the fewest trajectories gets a trajectory's prompt and seeds, and sends the trajectory back. The
result does not depend on the worker. If a worker dies or hangs, it is logged and replaced, and other workers run its
trajectories again from their seeds, with the current weights; the version at the group's start bounds the staleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import pickle
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightrl.columns import registered
from lightrl.concurrency.abandon import Tasks
from lightrl.concurrency.child_process import ChildProcess, ending_of, import_path
from lightrl.concurrency.streams import BadMessage, Channel
from lightrl.engines import RolloutEngine
from lightrl.engines.servers.leader import FollowerState
from lightrl.errors import EngineError, RewardError, RolloutError
from lightrl.rollout.prompts import State
from lightrl.rollout.runner import InFlightCompletions
from lightrl.trace import record
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.workflows.workflow import GroupResult, Workflow, check_trajectory

log = logging.getLogger(__name__)

START_S = 120.0  # time for a worker to import everything
END_S = 5.0  # time for a worker to exit after its channel is closed
BEAT_S = 1.0  # interval between messages to an idle worker
MAX_DEATHS = 3  # a trajectory that was running when this many workers died may be the cause, and is not run again
_STACK_S = 0.5  # time for a hung worker to print its stack
_ANSWERS = {"state": dict, "follow": FollowerState}  # kind of request → type of its answer, unless it is an EngineError


class _WorkerLostError(Exception):
    """The worker exited before it sent the answer."""


_Results = asyncio.Queue[tuple[int, Any]]  # samples and their results, see `WorkflowPool.run_group`


@dataclass(eq=False)
class _Worker:
    name: str
    workflow: Workflow  # the controller's copy
    child: ChildProcess
    channel: Channel
    pid: int
    answers: dict[int, tuple[type, asyncio.Future[Any]]] = field(default_factory=dict)  # key of the request → answer
    # Key of a run → its prompt, its running samples, and the queue of their results.
    runs: dict[int, tuple[Prompt, set[int], _Results]] = field(default_factory=dict)
    state: Any = None  # the state of the worker's engine
    num_done: int = 0  # finished trajectories
    silent_s: float = 0.0  # counted in beats, because a clock would be wrong after the run was suspended

    def ask(self, key: int, kind: str, *values: object) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        self.answers[key] = _ANSWERS[kind], answer
        self.channel.send(key, kind, *values)
        return answer

    @property
    def num_running(self) -> int:
        return sum(len(samples) for _, samples, _ in self.runs.values())

    def on_result(self, key: int, sample: int | None, result: object) -> None:
        """Puts a sample's trajectory or error in the run's queue; if sample is None, the error is for all samples."""
        if key not in self.runs:  # the run was given up
            if isinstance(result, Trajectory):
                self.workflow.clean_up(result)
            return
        _, samples, results = self.runs[key]
        for finished in [sample] if sample is not None else list(samples):
            samples.discard(finished)
            results.put_nowait((finished, result))
        if not samples:
            del self.runs[key]


@dataclass(eq=False)
class WorkflowPool:
    """The pool of a controller's workers (the engine's `FollowerProcesses`); belongs to the controller's event loop.

    Raises ValueError if this engine or workflow cannot be used in other processes.
    """

    engine: RolloutEngine  # has been started
    workflow: Workflow  # copied to each worker
    num: int  # the number of workers
    tasks: Tasks  # the controller's tasks; the run ends if a worker cannot be started
    silent_s: float  # a worker that does not answer for this long counts as hanging

    def __post_init__(self) -> None:
        self.engine.check_workers(self.num)
        _check_copyable(self.workflow, self.num)
        self._leader, self._follower = self.engine.open_to_workers(self.num)
        self.in_flight = InFlightCompletions(self.workflow)
        self._workers: list[_Worker] = []  # only workers that are ready
        self._has_workers = asyncio.Event()
        self._was_ready = False  # whether any worker has ever been ready
        self._keys = itertools.count()

    async def open(self) -> None:
        """Starts the workers; groups wait for the first one."""
        self._leader.lead(self)
        for number in range(self.num):
            self.tasks.spawn(self._keep_running(f"workflow worker {number}"))
        self.tasks.spawn(self._beat())

    async def run_group(
        self, prompt: Prompt, samples: Sequence[int], sampling: Sampling, run_seed: int, seed_name: str
    ) -> AsyncGenerator[GroupResult, None]:
        """Yields the results of `TrajectoryRunner.run_group` in the workers; a cancellation also stops it there.

        If workers die `MAX_DEATHS` times while they run a sample, the sample fails with a RolloutError.
        """
        results: _Results = asyncio.Queue()
        num_deaths: Counter[int] = Counter()
        keys: list[tuple[_Worker, int]] = []
        start_ns = time.perf_counter_ns()

        async def start(samples: Sequence[int]) -> None:
            """Sends each sample to the worker with the fewest trajectories; first waits until there is a worker."""
            while not self._workers:
                await self._has_workers.wait()
            samples_of: dict[_Worker, list[int]] = {}
            num_running = {worker: worker.num_running for worker in self._workers}
            for sample in samples:
                worker = min(num_running, key=num_running.__getitem__)
                num_running[worker] += 1
                samples_of.setdefault(worker, []).append(sample)
            for worker, assigned in samples_of.items():
                keys.append((worker, next(self._keys)))
                worker.runs[keys[-1][1]] = (prompt, set(assigned), results)
                started = self.in_flight.hand_over(seed_name, assigned, run_seed)
                worker.channel.send(keys[-1][1], "run", started, prompt, assigned, sampling, run_seed, seed_name)

        try:
            await start(samples)
            num_remaining = len(samples)
            while num_remaining:
                sample, result = await results.get()
                if isinstance(result, EngineError):
                    raise result
                if isinstance(result, _WorkerLostError):
                    num_deaths[sample] += 1
                    if num_deaths[sample] < MAX_DEATHS:
                        await start([sample])
                        continue
                    result = RolloutError(
                        f"{MAX_DEATHS} workflow workers died while they ran prompt {prompt.id!r}, so it is not run "
                        "again. The workers' output above may show the cause."
                    )
                record("interaction", "generate", "generations", start_ns, session=f"{seed_name}/{sample}")
                num_remaining -= 1
                yield sample, result
        finally:
            for worker, key in keys:
                if worker.runs.pop(key, None) is not None:
                    worker.channel.send(key, "cancel")

    def end_group(self, seed_name: str) -> None:
        self.in_flight.close(seed_name)
        for worker in self._workers:
            worker.channel.send(None, "end group", seed_name)

    async def states_of_workers(self) -> list[State]:
        """Returns the state of each worker's runs while the engine is paused; omits workers that die meanwhile."""
        answers = [worker.ask(next(self._keys), "state") for worker in self._workers]
        states = await asyncio.gather(*answers, return_exceptions=True)
        for state in states:
            if isinstance(state, BaseException) and not isinstance(state, _WorkerLostError):
                raise state
        return [state for state in states if not isinstance(state, BaseException)]

    async def notify(self) -> None:
        if answers := self.post():
            await asyncio.wait(answers)

    def post(self) -> list[asyncio.Future[Any]]:
        """Sends the leader's state to every worker; returns futures for their acknowledgements."""
        state = self._leader.state()
        answers = []
        for worker in self._workers:
            answers.append(worker.ask(next(self._keys), "follow", state))
            answers[-1].add_done_callback(functools.partial(self._on_state, worker))
        return answers

    def _on_state(self, worker: _Worker, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            worker.state = answer.result()
        self._report_states()

    def _report_states(self) -> None:
        self._leader.on_follower_states([worker.state for worker in self._workers if worker.state is not None])

    async def _keep_running(self, name: str) -> None:
        num_early_deaths = 0  # deaths in a row of workers that had not finished a trajectory
        while True:
            child, end = ChildProcess.of_module("lightrl.rollout.workflow_worker", import_path())
            try:
                worker = await self._wait_until_ready(name, child, end)
                num_lost = 0 if worker is None else await self._serve(worker)
            finally:
                ending = ending_of(await _end(child))
            num_early_deaths = 0 if worker is not None and worker.num_done else num_early_deaths + 1
            if num_early_deaths == MAX_DEATHS or not self._was_ready:
                raise RolloutError(
                    f"The {name} ended with {ending} before it had finished a trajectory (deaths in a row: "
                    f"{num_early_deaths}). See its output above. Fix the cause, or set workflow_workers to 0."
                )
            lost = f"Trajectories to run again: {num_lost}." if num_lost else "It was running no trajectories."
            log.warning("The %s ended with %s. %s", name, ending, lost)

    async def _wait_until_ready(self, name: str, child: ChildProcess, end: socket.socket) -> _Worker | None:
        """Returns the worker at the other end once it is ready, or None if it exited before that."""
        channel = await Channel.open(end)
        level = logging.getLogger("lightrl").getEffectiveLevel()
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            channel.send(name, level, registered(), self._follower, self.workflow)
            try:
                ready = await asyncio.wait_for(channel.receive(), START_S)
            except TimeoutError:
                raise RolloutError(f"The {name} was not ready {START_S:g} s after it started.") from None
            except BadMessage as error:
                raise RolloutError(f"The {name} sent an invalid message when it started: {error}.") from error
            if ready is None:
                return None
            undo.pop_all()
        return _Worker(name, self.workflow, child, channel, *ready)

    async def _serve(self, worker: _Worker) -> int:
        """Handles a worker's messages until it exits, then fails its runs; returns the number of lost trajectories."""
        self._workers.append(worker)
        self._has_workers.set()
        self._was_ready = True
        self.post()
        try:
            while (message := await worker.channel.receive()) is not None:
                worker.silent_s = 0.0
                self._on_message(worker, message)
            return worker.num_running
        except BadMessage as error:
            log.warning("Ending the %s, which sent an invalid message: %s.", worker.name, error)
            return worker.num_running
        finally:
            self._workers.remove(worker)
            if not self._workers:
                self._has_workers.clear()
            worker.channel.close()
            for _, answer in worker.answers.values():
                _settle(answer, _WorkerLostError())
            for key in list(worker.runs):
                worker.on_result(key, None, _WorkerLostError())
            self._report_states()

    def _on_message(self, worker: _Worker, message: tuple[Any, ...]) -> None:
        """Checks a message's structure and handles it; raises BadMessage if the message is invalid."""
        match message:
            case None, (str(kind), str(url), str(reason)):
                self._leader.on_server_failed(kind, url, reason)
            case int(key), answer if key in worker.answers and isinstance(answer, worker.answers[key][0] | EngineError):
                _settle(worker.answers.pop(key)[1], answer)
            case int(key), None, EngineError() as error:
                worker.on_result(key, None, error)
            case int(key), int(sample), bytes() | RolloutError() | RewardError() as result:
                prompt, samples, _ = worker.runs.get(key, (Prompt("given up", token_ids=[]), {sample}, None))
                if sample not in samples:
                    raise BadMessage(f"an unrequested result of sample {sample} for prompt {prompt.id!r}")
                done = self._trajectory(result, prompt) if isinstance(result, bytes) else result
                worker.num_done += 1
                worker.on_result(key, sample, done)
            case _:
                raise BadMessage(f"{message!r:.200}")

    def _trajectory(self, data: bytes, prompt: Prompt) -> Trajectory:
        try:
            trajectory = check_trajectory(Trajectory.from_bytes(data, prompt), self.workflow, prompt)
            if not all(isinstance(value, int | float) for value in trajectory.metrics.values()):
                raise TypeError(f"metrics={trajectory.metrics!r:.100}")
            return trajectory
        except Exception as error:  # a decoder may raise anything
            raise BadMessage(f"an invalid trajectory for prompt {prompt.id!r} ({error!r})") from error

    async def _beat(self) -> None:
        """Posts to the workers every second, and kills those that hang."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self.post()
                for worker in self._workers:
                    worker.silent_s += BEAT_S
                    if 0 < worker.silent_s - self.silent_s <= BEAT_S:
                        self._end_hanging(worker)
        finally:
            self._leader.lead(None)

    def _end_hanging(self, worker: _Worker) -> None:
        log.warning(
            "The %s (process %d) did not answer for loop_timeout_s=%g and will be killed. A workflow or environment "
            "blocks its event loop, or the process was stopped. Its stack:",
            worker.name,
            worker.pid,
            self.silent_s,
        )
        worker.child.show_stack()
        asyncio.get_running_loop().call_later(_STACK_S, worker.child.ask_to_end, 0.0)


async def _end(child: ChildProcess) -> int:
    """Waits for a worker to exit after its channel was closed, kills it after END_S, and returns its exit code."""
    try:
        await child.ended(END_S)
    finally:  # a closing controller also cancels this task, and again while it waits here
        child.ask_to_end(0.0)
        try:
            await child.ended(END_S)
        finally:
            code = child.end(0.0)
    return code


def _check_copyable(workflow: Workflow, num: int) -> None:
    name = type(workflow).__qualname__
    try:
        data = pickle.dumps((workflow, registered()))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"workflow_workers={num}: {name} cannot be pickled for other processes: {error}. Remove attributes that "
            "cannot be copied, or set workflow_workers to 0."
        ) from error
    if b"__main__" in data:
        raise ValueError(
            f"workflow_workers={num}: {name} uses a class or function in the main script, which other processes cannot "
            "import. Move it to a separate module, or set workflow_workers to 0."
        )


def _settle(answer: asyncio.Future[Any], value: object) -> None:
    if answer.done():
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
        answer.exception()  # so that asyncio does not log it if no task waits
    else:
        answer.set_result(value)
