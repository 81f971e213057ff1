"""RolloutController: starts groups, judges what comes back, and hands over batches that keep the staleness bound.

One asyncio loop in one daemon thread, on rank 0. All state below belongs to that thread; the public methods are called
from the main thread and cross over. What may start and what may be taken is decided in buffer.py.

    prompt stream ──position──► trajectory tasks × G ──► judge ──► finished groups ──► take() ──► commit()
                     admit         workflow, engine                  by version         oldest     trained on
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from lightrl.errors import EngineError, LightRLError, RewardError, RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.buffer import choose_batch, describe_waiting, num_admissible
from lightrl.rollout.engine import Completion, RolloutEngine
from lightrl.rollout.workflow import Workflow
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.weights import Bucket

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Ticks of the event loop after which every new trajectory task has reached its first `generate`: one starts the task,
# the others leave room for a workflow that awaits something ready first.
WAVE_TICKS = 4


class Prompts(Protocol):
    """Prompts by position, without end."""

    def __getitem__(self, position: int) -> Prompt: ...


@dataclass(frozen=True)
class Drop:
    """A trajectory that was left out, and why."""

    reason: str  # one word, for counting
    message: str
    prompt_id: str


@dataclass
class _Running:
    """A group in flight."""

    group: Group
    started_version: int  # of the weights that served when it started: no token of it is older
    tasks: list[asyncio.Task[Trajectory | None]] = field(default_factory=list)
    num_done: int = 0
    redraws: int = 0


class RolloutController:
    """Keeps as many groups in flight as the staleness bound allows, and hands finished ones to the loop.

    Args:
        engine: has been started.
        workflow: maps a prompt to a trajectory.
        judge: has been started; gives the reward, while other trajectories still generate.
        sampling: of training rollouts; the seed of each generation is set here.
        run_seed: with position, sample and turn it fixes every draw.
        group_size: G, trajectories of a prompt.
        groups_per_iteration: P.
        prompts: the stream, by position; None where only `evaluate` is used.
        total_groups: what the whole run needs; None if it has no known end.
        max_staleness: η, in versions; 0 is on-policy.
        max_concurrent: bound on groups in flight; None for no bound but the staleness.
        redraw_stragglers: give up a group that the next batch would have to wait for and start it again, once the
            others are there. Faster with a heavy tail, but short completions are then drawn too often.
        rollout_timeout_s: the run ends if for so long no trajectory finishes that a batch waits for.
        max_failed_fraction: the run ends if more than this fraction of an iteration's trajectories fails.
        load_timeout_s: deadline of one weight load.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        workflow: Workflow,
        judge: Judge,
        *,
        sampling: Sampling,
        run_seed: int = 0,
        group_size: int = 1,
        groups_per_iteration: int = 1,
        prompts: Prompts | None = None,
        total_groups: int | None = None,
        max_staleness: int = 0,
        max_concurrent: int | None = None,
        redraw_stragglers: bool = False,
        rollout_timeout_s: float = 1800.0,
        max_failed_fraction: float = 0.5,
        load_timeout_s: float = 600.0,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        self.judge = judge
        self.sampling = sampling
        self.run_seed = run_seed
        self.group_size = group_size
        self.groups_per_iteration = groups_per_iteration
        self.prompts = prompts
        self.total_groups = total_groups
        self.max_staleness = max_staleness
        self.max_concurrent = max_concurrent
        self.redraw_stragglers = redraw_stragglers
        self.rollout_timeout_s = rollout_timeout_s
        self.max_failed_fraction = max_failed_fraction
        self.load_timeout_s = load_timeout_s

        self.num_consumed = 0  # groups that an iteration was trained on
        self._next_position = 0
        self._restart: collections.deque[int] = collections.deque()  # positions in flight at the checkpoint
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, Group] = {}
        self._taken: list[Group] = []
        self._drops: list[Drop] = []
        self._num_failed = 0  # trajectories, since the last batch was taken
        self._failure: BaseException | None = None
        self._is_taking = False
        self._last_news = time.monotonic()

        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._admitting = asyncio.Lock()
        self._waving = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run_loop, name="lightrl-rollout", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ from the main thread

    def take(self, weight_version: int, *, on_wait: Callable[[int, int], None] | None = None) -> list[Group]:
        """The next P groups to train on, in stream order; they stay in `state_dict` until `commit`.

        Args:
            weight_version: the trainer's version now, v.
            on_wait: called with (trajectories finished, trajectories needed) about ten times a second; may raise.

        Raises:
            RolloutError: if nothing finishes for `rollout_timeout_s`, naming what is waited for; or if too many fail.
            EngineError: if the engine fails.
        """
        future = self._submit(self._take(weight_version))
        try:
            while True:
                try:
                    return future.result(timeout=0.1)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                if on_wait is not None:
                    on_wait(*self._progress())
        finally:
            future.cancel()

    def commit(self) -> None:
        """The groups of the last `take` have been trained on: forget them."""
        self._run(self._commit())

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Gives the engine new weights and, when it has acknowledged them, starts what the new version admits.

        Raises:
            WeightSyncError: from the engine; the old weights serve on.
        """
        self.engine.load_weights(buckets, weight_version=weight_version)
        self._run(self._pump())

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        num_samples: int = 1,
        on_wait: Callable[[int, int], None] | None = None,
    ) -> list[Group]:
        """Rolls out and judges prompts for validation: outside admission, in order, training rollouts go on.

        Trajectories whose reward failed are missing from their group; `drain_drops` tells why.

        Raises:
            RolloutError: if nothing finishes for `rollout_timeout_s`.
        """
        done = [0]
        total = len(prompts) * num_samples
        future = self._submit(self._evaluate(prompts, sampling, num_samples, done))
        started, seen = time.monotonic(), 0
        try:
            while True:
                try:
                    return future.result(timeout=0.1)
                except concurrent.futures.TimeoutError:
                    if future.done():
                        raise
                if done[0] > seen:
                    started, seen = time.monotonic(), done[0]
                if time.monotonic() - started > self.rollout_timeout_s:
                    raise RolloutError(
                        f"Validation got no trajectory for {self.rollout_timeout_s:.0f} s ({done[0]} of {total} are "
                        "there), expected one at least. Look at the engine and the reward, or raise rollout_timeout_s."
                    )
                if on_wait is not None:
                    on_wait(done[0], total)
        finally:
            future.cancel()

    def drain_drops(self) -> list[Drop]:
        """The trajectories dropped since the last call."""
        drops, self._drops = self._drops, []
        return drops

    def progress(self) -> dict[str, int]:
        """Queue depths, for messages and metrics."""
        return {
            "running_groups": len(self._running),
            "finished_groups": len(self._finished),
            "consumed_groups": self.num_consumed,
            "next_position": self._next_position,
            "weight_version": self.engine.weight_version,
        }

    def state_dict(self) -> dict[str, Any]:
        """What resume needs: cursor, positions in flight, groups finished but not trained on. Plain Python."""
        return self._run(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first `take`: restores the cursor and finished groups; what was in flight starts again first."""
        self._run(self._restore(state))

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancels what runs and ends the thread; the engine is the caller's to close. May be called twice."""
        if not self._thread.is_alive():
            return
        try:
            self._submit(self._cancel_all()).result(timeout_s)
        except (concurrent.futures.TimeoutError, concurrent.futures.CancelledError):
            log.warning("Rollout tasks did not end within %.0f s after cancellation; leaving them behind.", timeout_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._loop.close()

    # ------------------------------------------------------------------ crossing over

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _submit(self, coroutine: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if not self._thread.is_alive():
            coroutine.close()
            raise RolloutError("The rollout controller is closed, expected it open. Start a new run.")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float = 60.0) -> _T:
        try:
            return self._submit(coroutine).result(timeout_s)
        except concurrent.futures.TimeoutError:
            raise RolloutError(
                f"The rollout event loop did not answer for {timeout_s:.0f} s, expected milliseconds. A workflow, "
                "environment or async reward blocks it: let it await, or move its work to a thread."
            ) from None

    # ------------------------------------------------------------------ on the event loop

    async def _commit(self) -> None:
        self.num_consumed += len(self._taken)
        self._taken = []

    async def _state(self) -> dict[str, Any]:
        return {
            "run_seed": self.run_seed,
            "num_consumed": self.num_consumed,
            "next_position": self._next_position,
            "in_flight": sorted([*self._running, *self._restart]),
            "finished": [group.to_json() for group in [*self._taken, *self._finished.values()]],
        }

    async def _restore(self, state: Mapping[str, Any]) -> None:
        self.run_seed = int(state["run_seed"])
        self.num_consumed = int(state["num_consumed"])
        self._next_position = int(state["next_position"])
        self._restart = collections.deque(state["in_flight"])
        groups = [Group.from_json(record) for record in state["finished"]]
        self._finished = {group.id: group for group in groups}

    async def _take(self, weight_version: int) -> list[Group]:
        self._is_taking = True
        self._last_news = time.monotonic()
        try:
            while True:
                await self._pump()
                if self._failure is not None:
                    raise self._failure
                batch = choose_batch(
                    {group.id: group.oldest_version for group in self._finished.values()},
                    {group_id: item.started_version for group_id, item in self._running.items()},
                    weight_version=weight_version,
                    groups_per_iteration=self.groups_per_iteration,
                    max_staleness=self.max_staleness,
                )
                if batch.group_ids is not None:
                    self._taken = [self._finished.pop(group_id) for group_id in batch.group_ids]
                    self._num_failed = 0
                    return self._taken
                if self.redraw_stragglers and len(self._finished) >= self.groups_per_iteration and batch.waits_for:
                    self._redraw(batch.waits_for)
                    continue
                await self._wait_for_news(weight_version, batch.waits_for)
        finally:
            self._is_taking = False

    async def _wait_for_news(self, weight_version: int, waits_for: Sequence[int]) -> None:
        self._changed.clear()
        left = self._last_news + self.rollout_timeout_s - time.monotonic()
        try:
            await asyncio.wait_for(self._changed.wait(), max(left, 0.0))
        except asyncio.TimeoutError:
            for_whom = f"groups {describe_waiting(waits_for)}" if waits_for else "more finished groups"
            raise RolloutError(
                f"The loop at weight version {weight_version} has waited for {for_whom} and no trajectory finished for "
                f"{self.rollout_timeout_s:.0f} s, expected {self.groups_per_iteration} groups. Queue depths: "
                f"{self.progress()}. Look at the engine and the reward, or raise StalenessControl.rollout_timeout_s."
            ) from None

    async def _pump(self) -> None:
        """Starts what may start. On-policy only while a batch is waited for, as one wave in a fixed order."""
        async with self._admitting:
            if self.prompts is None or self._failure is not None or (self.max_staleness == 0 and not self._is_taking):
                return
            num = num_admissible(
                running=len(self._running),
                accepted=self.num_consumed + len(self._taken) + len(self._finished),
                weight_version=self.engine.weight_version,
                groups_per_iteration=self.groups_per_iteration,
                max_staleness=self.max_staleness,
                max_concurrent=self.max_concurrent,
                total=self.total_groups,
            )
            if num == 0:
                return
            try:
                async with self._wave():
                    for _ in range(num):
                        self._start_group(self._restart.popleft() if self._restart else self._advance())
            except EngineError as error:
                self._fail(error)

    @contextlib.asynccontextmanager
    async def _wave(self) -> AsyncIterator[None]:
        """What is started inside reaches the engine while it stands still, so that it is admitted at once, in order."""
        async with self._waving:
            await self.engine.pause()
            try:
                yield
                for _ in range(WAVE_TICKS):
                    await asyncio.sleep(0)
            finally:
                await self.engine.resume()

    def _pump_soon(self) -> None:
        task = self._loop.create_task(self._pump())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _advance(self) -> int:
        position = self._next_position
        self._next_position += 1
        return position

    def _start_group(self, position: int, redraws: int = 0) -> None:
        assert self.prompts is not None
        try:
            prompt = self.prompts[position]
        except Exception as error:  # noqa: BLE001 - the user's own dataset
            self._fail(RolloutError(f"Prompt at position {position} cannot be read: {error!r}. Mend the data set."), error)
            return
        running = _Running(Group(position, prompt), started_version=self.engine.weight_version, redraws=redraws)
        self._running[position] = running
        seed_name = f"{position}:{prompt.id}" + (f":{redraws}" if redraws else "")
        for sample in range(self.group_size):
            task = self._loop.create_task(self._trajectory(prompt, position, sample, self.sampling, seed_name))
            running.tasks.append(task)
            task.add_done_callback(lambda done, item=running: self._on_done(item, done))  # type: ignore[misc]

    def _redraw(self, group_ids: Sequence[int]) -> None:
        for group_id in group_ids:
            item = self._running.pop(group_id)
            for task in item.tasks:
                task.cancel()
            self._drops.append(Drop("straggler", f"Group {group_id} was given up and drawn again.", item.group.prompt.id))
            self._start_group(group_id, item.redraws + 1)

    async def _trajectory(
        self, prompt: Prompt, group_id: int, sample: int, sampling: Sampling, seed_name: str
    ) -> Trajectory | None:
        """One interaction, judged; None if it was dropped."""
        turn = 0
        session = f"{seed_name}/{sample}"

        async def generate(token_ids: list[int]) -> Completion:
            nonlocal turn
            seed = sampling_seed(self.run_seed, seed_name, sample, turn)
            turn += 1
            completions = await self.engine.generate(token_ids, replace(sampling, seed=seed), session=session)
            return completions[0]

        try:
            trajectory = await self._workflow_trajectory(prompt, generate)
            trajectory.group_id, trajectory.sample = group_id, sample
            judgment = await self.judge.score(trajectory)
        except RewardError as error:
            self._drop(f"reward_{error.reason}", str(error), prompt)
            return None
        except RolloutError as error:
            self._drop("rollout", str(error), prompt)
            return None
        trajectory.reward, trajectory.rewards = judgment.reward, judgment.rewards
        trajectory.metrics.update(judgment.metrics)
        return trajectory

    async def _workflow_trajectory(
        self, prompt: Prompt, generate: Callable[[list[int]], Awaitable[Completion]]
    ) -> Trajectory:
        try:
            return await self.workflow.run(prompt, generate)
        except LightRLError:
            raise
        except Exception as error:
            name = type(self.workflow).__name__
            raise RolloutError(f"{name}.run raised {error!r} on prompt {prompt.id!r}, expected a Trajectory.") from error

    def _drop(self, reason: str, message: str, prompt: Prompt) -> None:
        self._drops.append(Drop(reason, message, prompt.id))

    def _on_done(self, running: _Running, task: asyncio.Task[Trajectory | None]) -> None:
        if task.cancelled() or self._running.get(running.group.id) is not running:
            return
        self._last_news = time.monotonic()
        running.num_done += 1
        error = task.exception()
        if error is not None:
            self._fail(error)
            return
        if task.result() is None:
            self._num_failed += 1
            self._check_failures()
        if running.num_done == self.group_size:
            del self._running[running.group.id]
            results = [item.result() for item in running.tasks]
            running.group.trajectories = [item for item in results if item is not None]
            if running.group.trajectories:
                self._finished[running.group.id] = running.group
            self._changed.set()
            if not self._is_taking:
                self._pump_soon()

    def _check_failures(self) -> None:
        total = self.groups_per_iteration * self.group_size
        if self._num_failed > self.max_failed_fraction * total:
            last = self._drops[-1] if self._drops else Drop("unknown", "", "")
            self._fail(
                RolloutError(
                    f"{self._num_failed} trajectories failed while one iteration of {total} was collected, expected at "
                    f"most max_failed_fraction={self.max_failed_fraction} of them. The last one: {last.reason}: "
                    f"{last.message}"
                )
            )

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        if self._failure is None:
            if cause is not None:
                error.__cause__ = cause
            self._failure = error
        self._changed.set()

    def _progress(self) -> tuple[int, int]:
        total = self.groups_per_iteration * self.group_size
        done = sum(item.num_done for item in list(self._running.values())) + len(self._finished) * self.group_size
        return min(done, total), total

    async def _evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, done: list[int]
    ) -> list[Group]:
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]

        async def one(group: Group, sample: int) -> Trajectory | None:
            result = await self._trajectory(group.prompt, group.id, sample, sampling, f"validation:{group.prompt.id}")
            done[0] += 1
            return result

        tasks: list[list[asyncio.Task[Trajectory | None]]] = []
        try:
            async with self._wave():
                for group in groups:
                    tasks.append([self._loop.create_task(one(group, sample)) for sample in range(num_samples)])
            for group, row in zip(groups, tasks, strict=True):
                group.trajectories = [item for item in await asyncio.gather(*row) if item is not None]
        finally:
            for row in tasks:
                for task in row:
                    task.cancel()
        return groups

    async def _cancel_all(self) -> None:
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
