"""RolloutController: keeps groups in flight, and hands over batches with rewards within the staleness bound.

On rank 0, an asyncio loop in a daemon thread owns all state. The public methods are called from the main thread: a
coroutine does the work on the loop, and the main thread waits for it and enforces the deadlines, so it also notices a
blocked event loop. GroupScheduler decides which groups start and are taken; the controller executes its decisions.

    prompt stream ──position──► a task per group ──► rewards ──► finished groups ──► take() ──► commit()
                     start      workflow, engine                                   stream order  trained on
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from lightrl.checks.printable import count_text
from lightrl.concurrency.abandon import Tasks, abandon, is_abandoned
from lightrl.concurrency.loop_thread import LoopThread
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, RolloutError
from lightrl.rewards import FailureLog, RewardWorker
from lightrl.rollout.group_scheduler import Drop, GroupScheduler, RolloutSettings, RunningGroup, success_rate
from lightrl.rollout.prompts import PromptCursor, Prompts, PromptsAhead, State
from lightrl.rollout.protocol import OnWait
from lightrl.rollout.runner import ADMISSION_TICKS, AdmissionBatch, Rewards, TrajectoryRunner
from lightrl.rollout.workflow_pool import WorkflowPool
from lightrl.trace import span
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.weights import Bucket
from lightrl.workflows.workflow import Workflow

log = logging.getLogger(__name__)


@dataclass
class Wait:
    """A call in which the main thread waits for trajectories. The event loop writes it, the main thread reads it."""

    who: str  # the caller, for messages
    total: int  # trajectories that the call needs
    for_what: str = "the first trajectory"
    done: int = 0
    last_progress: float = field(default_factory=time.monotonic)  # monotonic time when the last trajectory was done

    def count(self) -> None:
        self.done += 1
        self.last_progress = time.monotonic()


@dataclass
class Stragglers:
    """The slow groups that a batch waits for although enough other groups are finished."""

    num: int = 0  # current number
    waited_s: float = 0.0  # time with at least one slow group
    _since_s: float = 0.0  # monotonic clock

    def count(self, num: int) -> None:
        """Records that the batch waits for `num` slow groups from now on."""
        now = time.monotonic()
        if self.num:
            self.waited_s += now - self._since_s
        self.num, self._since_s = num, now


_T = TypeVar("_T")


class RolloutController:
    """Keeps as many groups in flight as the staleness bound allows, and hands finished groups to the training loop.

    Args:
        engine, reward_worker: must have been started; rewards are computed while other trajectories are generated.
        settings: group and batch sizes, limits, and rules for dropping groups.
        sampling: settings for training rollouts; the controller sets the seed of each generation.
        run_seed: together with position, sample and turn, determines everything that is sampled.
        prompts: the prompt stream; None if only `evaluate` is used.
        failures: the log of trajectories with a failed reward.
    """

    is_recorded = False

    def __init__(
        self,
        engine: RolloutEngine,
        workflow: Workflow,
        reward_worker: RewardWorker,
        settings: RolloutSettings,
        *,
        sampling: Sampling,
        run_seed: int = 0,
        prompts: Prompts | None = None,
        failures: FailureLog | None = None,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        self.settings = settings
        self.sampling = sampling
        self.run_seed = run_seed

        self._scheduler = GroupScheduler(settings)
        self._cursor = PromptCursor(prompts, settings.curriculum)
        self._tasks = Tasks()
        counter, names = self._scheduler.counter, settings.reward_metrics
        self._rewards = Rewards(reward_worker, counter, self._tasks, workflow, failures, names)
        self._runner: TrajectoryRunner | WorkflowPool
        if settings.workflow_workers:
            self._runner = WorkflowPool(
                engine, workflow, settings.workflow_workers, self._tasks, silent_s=settings.loop_timeout_s
            )
        else:
            self._runner = TrajectoryRunner(engine, workflow)
        self._running: dict[int, tuple[str, asyncio.Task[None]]] = {}  # group id → seed name, task
        self._admission = AdmissionBatch(engine)
        self._ahead = PromptsAhead(self._cursor, self._tasks, self._start_admissible)
        self._take_wait: Wait | None = None  # the wait of the `take` in progress
        self._stragglers = Stragglers()
        self._is_closing = False

        self._thread = LoopThread(loop_timeout_s=settings.loop_timeout_s, on_exit=self._tasks.fail_on_exit)
        self._loop = self._thread.loop
        self._thread.start()
        self._thread.call(engine.attach())
        if isinstance(self._runner, WorkflowPool):
            self._thread.call(self._runner.open())

    @property
    def weight_version(self) -> int:
        return self.engine.weight_version

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]:
        """Returns the next batch of groups to train on, in stream order. `state_dict` contains it until `commit`.

        The groups have rewards unless `defers_rewards` is set. Groups that were not committed can be taken again.

        Args:
            weight_version: the trainer's current version, v.

        Raises:
            RolloutError: if no trajectory finishes for `rollout_timeout_s` (the message says what is missing), if too
                many fail, or if the engine has no weights or weights that are too old for training.
            EngineError: if the engine fails.
        """
        num = self.settings.groups_per_iteration * self.settings.group_size
        wait = Wait(f"The loop at weight version {weight_version}", num)
        return self._wait_for(self._take(weight_version, wait), wait, on_wait)

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None:
        """Sets the rewards of the groups from the last `take`; needed only with `defers_rewards`.

        Trajectories with a failed reward are removed from their groups, which may then be empty; see `drain_drops`.
        Raises RolloutError if no reward arrives for `rollout_timeout_s`, or if too many fail.
        """
        wait = Wait("The loop", sum(len(group.trajectories) for group in groups), "the rewards")
        self._wait_for(self._rewards.wait_for(groups, wait.count), wait, on_wait)

    def commit(self) -> None:
        """Forgets the groups from the last `take`, which have been trained on."""
        self._thread.call(_as_coroutine(self._scheduler.commit))

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Loads new weights into the engine, then starts the groups that the new version admits.

        On failure, the engine raises WeightSyncError and keeps the old weights, or EngineTimeout at its deadline.
        """
        self.engine.load_weights(buckets, weight_version=weight_version)
        self._thread.call(self._start_admissible())

    def evaluate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int = 1, on_wait: OnWait | None = None
    ) -> list[Group]:
        """Rolls out validation prompts and computes rewards, without waiting for admission; training rollouts continue.

        Returns groups in the order of the prompts, without trajectories with a failed reward; see `drain_drops`.

        Raises:
            RolloutError: if no trajectory finishes for `rollout_timeout_s`, or if too many fail.
            EngineError: if the engine fails.
        """
        size = f"{count_text(len(prompts), 'prompt')} × {count_text(num_samples, 'sample')}"
        wait = Wait("Validation", len(prompts) * num_samples, size)
        return self._wait_for(self._evaluate(prompts, sampling, num_samples, wait), wait, on_wait)

    def drain_drops(self) -> list[Drop]:
        """Returns the trajectories dropped since the last call."""
        return self._scheduler.counter.drain()

    def drain_group_drops(self) -> dict[str, int]:
        """Returns reason → number of groups dropped and replaced by a new prompt since the last call."""
        return self._thread.call(_as_coroutine(self._scheduler.counter.drain_groups))

    def progress(self) -> dict[str, float]:
        """Returns queue depths, stragglers, and sums over chosen and skipped prompts, for messages and metrics."""
        return {
            "running_groups": len(self._scheduler.running),
            "finished_groups": len(self._scheduler.finished),
            "consumed_groups": self._scheduler.num_consumed,
            "next_position": self._cursor.next_position,
            "weight_version": self.weight_version,
            "skipped_prompts": self._cursor.num_skipped,
            "stragglers": self._stragglers.num,
            "straggler_wait_s": self._stragglers.waited_s,
            **self._scheduler.counter.thrown_away,
            **self._cursor.past_success,
        }

    def state_dict(self) -> State:
        """Returns the state for a checkpoint, in plain Python: cursor, curriculum, and groups in flight or finished."""
        return self._thread.call(self._state_at_boundary(self.settings.loop_timeout_s / 2))

    def load_state_dict(self, state: State) -> None:
        """Restores the cursor and finished groups before the first `take`; requeues groups that were in flight.

        Raises RolloutError if a different version of lightrl wrote the state.
        """
        self.run_seed = int(state["run_seed"])
        self._thread.call(_as_coroutine(partial(self._load, state)))

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancels all tasks and stops the thread; the caller closes the engine. Safe to call twice."""
        self._thread.close(self._cancel_all, timeout_s)

    async def _state_at_boundary(self, timeout_s: float) -> State:
        """Returns the state between two tokens; omits unfinished completions if the engine does not pause in time."""
        if not (self._scheduler.running and self._runner.in_flight.workflow.continues):
            return self._state({})
        taking = asyncio.ensure_future(self._paused_state())
        await asyncio.wait({taking}, timeout=timeout_s)
        if taking.done() and taking.exception() is None:
            return taking.result()
        error = taking.exception() if taking.done() else "the engine did not answer in time"
        taking.cancel()
        if isinstance(error, BaseException) and not isinstance(error, EngineError):
            raise error
        log.warning("The engine's unfinished completions are not in the checkpoint and will start again: %s", error)
        return self._state({})

    async def _paused_state(self) -> State:
        async with self._admission.batch():
            for _ in range(ADMISSION_TICKS):  # time to record completions that finished before the pause
                await asyncio.sleep(0)
            return self._state(await self.engine.unfinished(), await self._runner.states_of_workers())

    def _state(self, unfinished: Mapping[int, Completion], states_of_workers: Sequence[State] = ()) -> State:
        cursor, prompts = self._cursor, self._cursor.prompts
        groups = self._scheduler.state_dict()
        first = min([cursor.next_position, *groups["in_flight"]])
        return {
            "run_seed": self.run_seed,
            "next_position": cursor.next_position,
            "prompts": None if prompts is None else prompts.fingerprint,
            "stream": None if prompts is None else prompts.state_dict(first),
            "curriculum": cursor.state_dict(),
            **groups,
            **self._runner.in_flight.state_dict(unfinished, states_of_workers),
        }

    def _load(self, state: State) -> None:
        cursor, prompts = self._cursor, self._cursor.prompts
        try:
            self._scheduler.load_state_dict(state)
            if self._scheduler.started:  # otherwise all groups start again
                self._runner.in_flight.load_state_dict(state)
            cursor.next_position = int(state["next_position"])
            if prompts is not None and state.get("stream") is not None:
                prompts.load_state_dict(state["stream"])
            saved_prompts, curriculum = state["prompts"], state["curriculum"]
        except (AttributeError, LookupError, TypeError, ValueError, struct.error) as error:
            raise RolloutError(
                f"The checkpoint's rollout state was written by a different lightrl version ({error!r}). Resume with "
                "that version, or run `lightrl export` on the checkpoint and start a new run from the exported model."
            ) from error
        cursor.load_state_dict(curriculum)
        if saved_prompts is not None and prompts is not None and saved_prompts != prompts.fingerprint:
            log.warning(
                "The checkpoint was written with prompts %s, but this run has %s: some prompts will be repeated and "
                "others skipped. Restore the data module's files, seed and shuffle, or start a new run.",
                saved_prompts,
                prompts.fingerprint,
            )

    def _wait_for(self, coroutine: Coroutine[object, None, _T], wait: Wait, on_wait: OnWait | None) -> _T:
        """Returns the coroutine's result, or raises at the deadline; any error raised here cancels the coroutine."""

        def check() -> None:
            if time.monotonic() - wait.last_progress > self.settings.rollout_timeout_s:
                raise RolloutError(
                    f"{wait.who} waited for {wait.for_what}, but no trajectory finished for "
                    f"rollout_timeout_s={self.settings.rollout_timeout_s:g}; {wait.done} of "
                    f"{count_text(wait.total, 'trajectory')} finished. Progress: {self.progress()}. Check the engine "
                    "and the reward, or increase StalenessControl.rollout_timeout_s."
                )
            if on_wait is not None:
                on_wait(min(wait.done, wait.total), wait.total)

        def count() -> None:
            if wait is self._take_wait:
                wait.done = self._scheduler.num_done_trajectories
                wait.total = max(wait.done, round(self._scheduler.num_expected))

        return self._thread.wait_for(coroutine, on_answer=count, on_wait=check, who=wait.who)

    async def _take(self, weight_version: int, wait: Wait) -> list[Group]:
        """Asks the scheduler for a batch after each change until it returns one. If cancelled, takes no group."""
        served = self.weight_version
        if self._tasks.failure is None and (served < 0 or weight_version - served > self.settings.max_staleness):
            raise RolloutError(
                f"The engine serves weight version {served} (-1 means none), and the trainer is at {weight_version}. "
                f"The engine may lag by at most max_staleness={self.settings.max_staleness}. Load newer weights first."
            )
        if not self.settings.defers_rewards and (unrewarded := self._scheduler.unrewarded()):
            await self._rewards.wait_for(unrewarded, wait.count)
            self._scheduler.on_rewards(unrewarded)
        self._scheduler.begin_take(weight_version)
        self._stragglers = Stragglers()
        self._take_wait = wait
        self._tasks.spawn(self._start_admissible())
        try:
            while True:
                if self._tasks.failure is not None:
                    raise self._tasks.failure
                batch = self._scheduler.take(weight_version)
                has_stragglers = len(self._scheduler.finished) >= self.settings.groups_per_iteration
                self._stragglers.count(len(batch.waits_for) if has_stragglers else 0)
                if batch.group_ids is not None:
                    if batch.gives_up:
                        self._give_up(batch.gives_up)
                        self._tasks.spawn(self._start_admissible())
                    return list(self._scheduler.taken)
                wait.for_what = batch.describe_wait()
                self._tasks.changed.clear()
                with span(f"waits for {wait.for_what}", "wait", "take"):
                    await self._tasks.changed.wait()
        finally:
            self._stragglers.count(0)
            if self._take_wait is wait:  # otherwise a later `take` has started
                self._take_wait = None

    async def _start_admissible(self) -> None:
        """Starts all admissible groups; on-policy, in one admission batch. A cancellation does not stop started groups.

        If a prompt has not been made yet, a thread makes it first and then this method is called again.
        """
        version = self.weight_version
        if self._is_open() and self._scheduler.may_start(version):
            if self._ahead.lacks(self._scheduler.startable(version), self._scheduler.max_new(version), self.run_seed):
                return
            # Off-policy runs do not guarantee an order, and an admission batch would pause running groups.
            async with self._admission.batch() if self.settings.max_staleness == 0 else contextlib.nullcontext():
                if self._is_open():  # check again, because pausing the engine took time
                    self._start_groups()

    def _is_open(self) -> bool:
        """Whether groups may start at all; on-policy, only while a `take` waits."""
        is_idle = self.settings.max_staleness == 0 and self._take_wait is None
        return self._cursor.prompts is not None and self._tasks.failure is None and not self._is_closing and not is_idle

    def _start_groups(self) -> None:
        """Chooses as many new positions as the scheduler plans, then starts all groups that may start."""
        version = self.weight_version
        try:
            for _ in range(self._scheduler.plan(version)):
                self._scheduler.queue(self._cursor.choose(self.run_seed))
            for position in self._scheduler.startable(version):
                prompt = self._cursor.at(position)
                assert prompt is not None  # it was chosen
                running = self._scheduler.start(position, prompt, version)
                self._runner.in_flight.open(running.seed_name)
                run = self._run_group(
                    running.group,
                    [sample for sample in range(self.settings.size_of(prompt)) if sample not in running.results],
                    self.sampling,
                    running.seed_name,
                    on_done=partial(self._report, running),
                    defers_rewards=self.settings.defers_rewards,
                )
                self._running[position] = (running.seed_name, self._tasks.spawn(run))
        except RolloutError as error:
            self._tasks.fail(error)
        self._ahead.refill()

    async def _run_group(
        self,
        group: Group,
        samples: Sequence[int],
        sampling: Sampling,
        seed_name: str,
        *,
        on_done: Callable[[int, Trajectory | None], None],
        defers_rewards: bool = False,
    ) -> None:
        """Runs samples in a group and waits for their rewards unless they are deferred. A cancellation stops both.

        Calls `on_done` with each sample's number and trajectory; the trajectory is None if it was dropped.
        """
        rewards: list[asyncio.Future[bool]] = []

        def on_reward(trajectory: Trajectory, is_kept: asyncio.Future[bool]) -> None:
            if not is_kept.cancelled() and is_kept.exception() is None:
                on_done(trajectory.sample, trajectory if is_kept.result() else None)

        run = self._runner.run_group(group.prompt, samples, sampling, self.run_seed, seed_name)
        try:
            async with contextlib.aclosing(run) as results:
                async for sample, result in results:
                    if is_abandoned(asyncio.current_task()):  # the workflow ignored its cancellation
                        if isinstance(result, Trajectory):
                            self.workflow.clean_up(result)
                        return
                    if not isinstance(result, Trajectory):
                        self._scheduler.counter.drop_failed(result, group.prompt)
                        self._rewards.log_failed(result, group.id, sample)
                        on_done(sample, None)
                        continue
                    result.group_id, result.sample = group.id, sample
                    if defers_rewards:
                        self._rewards.defer(result)
                        on_done(sample, result)
                    else:
                        rewards.append(self._rewards.compute(result))
                        rewards[-1].add_done_callback(partial(on_reward, result))
            for reward in rewards:
                await reward
        finally:
            self._rewards.cancel(rewards)

    def _report(self, running: RunningGroup, sample: int, trajectory: Trajectory | None) -> None:
        """Reports to the scheduler that a trajectory in a running group is done; None means that it was dropped."""
        group = running.group
        if self._scheduler.running.get(group.id) is not running:
            return  # the group was given up in this event-loop tick
        if self._take_wait is not None:
            self._take_wait.last_progress = time.monotonic()
        try:
            is_done = self._scheduler.record(running, sample, trajectory)
            if is_done and group.trajectories and self.settings.curriculum is not None:
                self._cursor.observe(group.id, group.prompt.id, success_rate(group))
            if is_done:
                self._scheduler.settle(group)
        except RolloutError as error:
            self._tasks.fail(error)
        if len(running.results) == self.settings.size_of(group.prompt):
            self._running.pop(group.id, None)
            self._runner.end_group(running.seed_name)
            self._tasks.changed.set()
            self._tasks.spawn(self._start_admissible())

    def _give_up(self, group_ids: Iterable[int]) -> None:
        for group_id in group_ids:
            if group_id in self._running:
                seed_name, task = self._running.pop(group_id)
                self._runner.end_group(seed_name)
                abandon([task])

    async def _evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, wait: Wait
    ) -> list[Group]:
        """Waits for all trajectories or the first error. If cancelled, cancels and awaits all tasks."""
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        done: dict[tuple[int, int], Trajectory] = {}  # group and sample → trajectory
        tasks: list[asyncio.Task[None]] = []

        def on_done(group: Group, sample: int, trajectory: Trajectory | None) -> None:
            wait.count()
            if trajectory is not None:
                done[group.id, sample] = trajectory

        try:
            async with self._admission.batch():
                for group in groups:
                    name = f"validation:{group.prompt.id}"
                    run = self._run_group(group, range(num_samples), sampling, name, on_done=partial(on_done, group))
                    tasks.append(self._loop.create_task(run))
            finished, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
            for task in finished:
                task.result()  # raises the task's error
            for (index, _), trajectory in sorted(done.items(), key=lambda item: item[0]):
                groups[index].trajectories.append(trajectory)
            self._scheduler.counter.check_failed(wait.total - len(done), wait.total, "in validation")
        finally:
            abandon(tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
        return groups

    async def _cancel_all(self) -> None:
        self._is_closing = True
        self._rewards.close()
        await self._tasks.abandon_all(but=self._admission.resuming)
        await self.engine.detach()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


async def _as_coroutine(function: Callable[[], _T]) -> _T:
    return function()
