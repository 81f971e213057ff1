"""WorkflowPool: workflows in processes of their own, with engines that follow rank 0's; all else stays in rank 0.

    rank 0: GroupBook ─ PooledPlayer ─ WorkflowPool ══ channel ══► worker (workflow_worker.py) ── requests ──► servers
              one order, admission,        │   ▲                      workflow, tokens, text
              judging, what is trained on  └───┴─ engine: servers' states, weight versions, pauses

Prompt and seeds go to the worker that plays the fewest; the trajectory comes back. So numbers do not depend on which
worker plays what. A worker that dies or hangs is named and replaced, and others play its trajectories again from their
seeds, with tokens of the weights that serve then: the group's start remains the bound of its staleness.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import pickle
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightrl.concurrency.channel import Channel
from lightrl.concurrency.guarded_processes import ONE_THREAD, GuardedProcesses, command, import_path
from lightrl.engines.abilities import LeadsFollowers, ServesAdapters
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RolloutError
from lightrl.rollout.tasks import Tasks
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.workflow import Workflow

log = logging.getLogger(__name__)

START_S = 120.0  # until a worker has imported everything
END_S = 5.0  # for a worker to end, once it is told to
BEAT_S = 1.0  # between two messages to an idle worker
MAX_DEATHS = 3  # of workers, with a trajectory in progress: it may be what they die of
_STACK_S = 0.5  # for a worker that hangs to print where
_TICK_S = 0.05


class _WorkerLostError(Exception):
    """The worker ended before it answered."""


@dataclass(eq=False)
class _Worker:
    name: str
    guard: str  # its name among the guards
    channel: Channel
    pid: int
    asked: dict[int, asyncio.Future[Any]] = field(default_factory=dict)  # by key
    playing: set[int] = field(default_factory=set)  # keys of trajectories
    state: Any = None  # of its engine
    num_played: int = 0
    silent_s: float = 0.0  # counted in beats, not by the clock: a stopped run is not a worker that hangs

    def ask(self, key: int, kind: str, *values: Any) -> asyncio.Future[Any]:
        answer = self.asked[key] = asyncio.get_running_loop().create_future()
        self.channel.send(key, kind, *values)
        return answer


class WorkflowPool:
    """The workers of one controller, which are the engine's `Followers`; belongs to the controller's event loop.

    Args:
        engine: has been started.
        workflow: copied to each worker.
        num: of workers.
        tasks: of the controller; a worker that cannot be started ends the run there.
        silent_s: a worker that does not answer for so long hangs.

    Raises:
        ValueError: if other processes cannot use this engine or this workflow.
    """

    def __init__(self, engine: RolloutEngine, workflow: Workflow, num: int, tasks: Tasks, *, silent_s: float) -> None:
        check_workers(engine, num)
        _check_travels(workflow, num)
        self._leader = engine.leader(num)  # type: ignore[attr-defined]  # it is one of LeadsFollowers
        self._workflow = workflow
        self._num = num
        self._tasks = tasks
        self._silent_s = silent_s
        self._guards = GuardedProcesses()
        self._workers: list[_Worker] = []  # that are ready
        self._has_workers = asyncio.Event()
        self._was_ready = False  # one of them, at some time
        self._keys = itertools.count()

    async def open(self) -> None:
        """Starts the workers; who plays waits for the first one."""
        self._leader.lead(self)
        for number in range(self._num):
            self._tasks.spawn(self._keep(f"workflow worker {number}"))
        self._tasks.spawn(self._beat())

    async def play(self, prompt: Prompt, seed_name: str, lent: Mapping[str, Any] | None, *seeding: Any) -> Trajectory:
        """One interaction in a worker; a cancellation ends it there.

        Args:
            lent: see `LentWritten.lend`.
            seeding: sample, sampling and the run's seed.

        Raises:
            RolloutError, RewardError, EngineError: as `Interactions.interact`; RolloutError also if `MAX_DEATHS`
                workers died in turn.
        """
        for _ in range(MAX_DEATHS):
            while not self._workers:
                await self._has_workers.wait()
            worker = min(self._workers, key=lambda worker: len(worker.playing))
            key = next(self._keys)
            worker.playing.add(key)
            try:
                trajectory: Trajectory = await worker.ask(key, "play", seed_name, lent, prompt, *seeding)
            except _WorkerLostError:
                continue
            except asyncio.CancelledError:
                worker.asked.pop(key, None)
                worker.channel.send(key, "cancel")
                raise
            finally:
                worker.playing.discard(key)
            trajectory.prompt = trajectory.prompt or prompt
            trajectory.__post_init__()  # shares memory that was shared there
            return trajectory
        raise RolloutError(
            f"{MAX_DEATHS} workflow workers died in turn while they played prompt {prompt.id!r}, which is not tried "
            "again. Their output, above, may say what they died of."
        )

    async def tell(self) -> None:
        if told := self.post():
            await asyncio.wait(told)

    def post(self) -> list[asyncio.Future[Any]]:
        news = self._leader.news()
        told = []
        for worker in self._workers:
            told.append(worker.ask(next(self._keys), "follow", news))
            told[-1].add_done_callback(functools.partial(self._note, worker))
        return told

    async def written(self) -> list[dict[str, Any]]:
        """`Written.state_dict` of each worker, while the engine is paused; nothing of one that dies meanwhile."""
        answers = [worker.ask(next(self._keys), "written") for worker in self._workers]
        states = await asyncio.gather(*answers, return_exceptions=True)
        for state in states:
            if isinstance(state, BaseException) and not isinstance(state, _WorkerLostError):
                raise state
        return [state for state in states if not isinstance(state, BaseException)]

    def forget(self, seed_name: str) -> None:
        """The group is done, or given up."""
        for worker in self._workers:
            worker.channel.send(None, "forget", seed_name)

    def _note(self, worker: _Worker, answer: asyncio.Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is None:
            worker.state = answer.result()
        self._note_all()

    def _note_all(self) -> None:
        self._leader.note([each.state for each in self._workers if each.state is not None])

    async def _keep(self, name: str) -> None:
        """Keeps a worker of this name running, until it is cancelled."""
        num_useless = 0  # deaths in a row before a trajectory was done
        for start in itertools.count():
            guard = f"{name}/{start}"
            try:
                worker = await self._started(name, guard)
                num_lost = 0 if worker is None else await self._serve(worker)
            finally:
                code = await self._end(guard)
            how = f"signal {abs(code) % 128}" if code < 0 or code > 128 else f"exit code {code}"
            num_useless = 0 if worker is not None and worker.num_played else num_useless + 1
            if num_useless == MAX_DEATHS or not self._was_ready:
                raise RolloutError(
                    f"The {name} ended with {how} before it had played a trajectory, {num_useless} times in a row. Its "
                    "output is above. Fix what it died of, or set workflow_workers to 0."
                )
            again = f"Trajectories to play again: {num_lost}." if num_lost else "It was playing nothing."
            log.warning("The %s ended with %s. %s", name, how, again)

    async def _started(self, name: str, guard: str) -> _Worker | None:
        """A worker that is ready; None if it ended before."""
        ours, theirs = socket.socketpair()
        with theirs:
            worker = command("lightrl.rollout.workflow_worker", str(theirs.fileno()), import_path())
            self._guards.start(
                guard, worker, environment=ONE_THREAD, secret_files={}, log_file=None, grace_s=0.0,
                folder=str(Path.cwd()), pass_fds=[theirs.fileno()],
            )  # fmt: skip
        channel = await Channel.open(ours)
        level = logging.getLogger("lightrl").getEffectiveLevel()
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            channel.send(name, level, self._leader.follower, self._workflow)
            try:
                ready = await asyncio.wait_for(channel.receive(), START_S)
            except asyncio.TimeoutError:
                raise RolloutError(f"The {name} was not ready {START_S:g} s after its start.") from None
            if ready is None:
                return None
            undo.pop_all()
        return _Worker(name, guard, channel, *ready)

    async def _serve(self, worker: _Worker) -> int:
        """Takes what a worker sends until it ends, then tells those who wait; how many trajectories it was playing."""
        self._workers.append(worker)
        self._has_workers.set()
        self._was_ready = True
        self.post()
        try:
            while (message := await worker.channel.receive()) is not None:
                worker.silent_s = 0.0
                key, value = message
                answer = worker.asked.pop(key, None)
                if key is None:
                    self._leader.hear(*value)
                elif answer is not None and not answer.done():
                    worker.num_played += key in worker.playing
                    _settle(answer, value)
            return len(worker.playing)
        finally:
            self._workers.remove(worker)
            if not self._workers:
                self._has_workers.clear()
            worker.channel.close()
            for answer in worker.asked.values():
                _settle(answer, _WorkerLostError())
            self._note_all()

    async def _beat(self) -> None:
        """Finds workers that hang."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                self.post()
                for worker in self._workers:
                    worker.silent_s += BEAT_S
                    if 0 < worker.silent_s - self._silent_s <= BEAT_S:
                        self._end_hanging(worker)
        finally:
            self._leader.lead(None)

    def _end_hanging(self, worker: _Worker) -> None:
        log.warning(
            "The %s (process %d) did not answer for loop_timeout_s=%g and is ended. A workflow or environment blocks "
            "its event loop, unless the process was stopped:",
            worker.name,
            worker.pid,
            self._silent_s,
        )
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGUSR1)  # it prints its stack
        asyncio.get_running_loop().call_later(_STACK_S, self._guards.ask_to_end, [worker.guard], 0.0)

    async def _end(self, guard: str) -> int:
        """Waits for the end of a worker whose channel is closed, and makes it end; its exit code."""
        try:
            await self._wait(guard)
        finally:  # a controller that closes does not wait for it so long: it cancels this too
            self._guards.ask_to_end([guard], 0.0)
            await self._wait(guard)
            self._guards.kill(guard)  # Linux kills its command
        code = self._guards.codes().get(guard, 0)
        return -signal.SIGKILL if code is None else code

    async def _wait(self, guard: str) -> None:
        for _ in range(round(END_S / _TICK_S)):
            if self._guards.codes().get(guard, 0) is not None:
                return
            await asyncio.sleep(_TICK_S)


def check_workers(engine: object, num: int) -> None:
    """Raises ValueError if this engine cannot be used by workers; before it is started."""
    if not isinstance(engine, LeadsFollowers):
        raise ValueError(
            f"workflow_workers={num} needs an engine of servers, such as SGLangEngine; {type(engine).__name__} "
            "generates in rank 0's process. Set workflow_workers to 0."
        )
    if isinstance(engine, ServesAdapters) and engine.adapters == "served":
        raise ValueError(f"workflow_workers={num} needs adapters='merged'. Set that, or workflow_workers to 0.")


def _check_travels(workflow: Workflow, num: int) -> None:
    """Raises ValueError if a worker cannot have a copy of this workflow."""
    name = type(workflow).__qualname__
    if workflow.has_side_effects:
        raise ValueError(
            f"workflow_workers={num}: the environment of {name} has side effects, whose journal has one writer. Set "
            "workflow_workers to 0."
        )
    try:
        data = pickle.dumps(workflow)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ValueError(
            f"workflow_workers={num}: {name} cannot be pickled for other processes: {error}. Keep what cannot be "
            "copied out of its attributes, or set workflow_workers to 0."
        ) from error
    if b"__main__" in data:
        raise ValueError(
            f"workflow_workers={num}: {name} uses a class or function of the main script, which other processes cannot "
            "import. Move it to a module of its own, or set workflow_workers to 0."
        )


def _settle(answer: asyncio.Future[Any], value: Any) -> None:
    if answer.done():
        return
    if isinstance(value, Exception):
        answer.set_exception(value)
        answer.exception()  # nobody may wait for it any more
    else:
        answer.set_result(value)
