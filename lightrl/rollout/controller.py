"""RolloutController: starts groups, judges what comes back, and hands over batches that keep the staleness bound.

One asyncio loop in one daemon thread, on rank 0. All state below belongs to that thread; the public methods are called
from the main thread and cross over: a coroutine does the work there, the main thread waits for it and keeps the
deadlines, so that a blocked event loop is noticed too. What may start and what may be taken is decided in buffer.py.

    prompt stream ──position──► trajectory tasks × G ──► judge ──► finished groups ──► take() ──► commit()
                     admit         workflow, engine                  by version         oldest     trained on
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightrl.concurrency.loop_thread import LoopThread
from lightrl.engines.abilities import LivesOnLoop
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RewardError, RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.buffer import choose_batch, describe_waiting, find_overdue, num_admissible
from lightrl.rollout.drop_tally import Drop, DropTally
from lightrl.rollout.group_filter import success_rate
from lightrl.rollout.judging import Judging
from lightrl.rollout.prompt_cursor import PromptCursor, Prompts
from lightrl.rollout.settings import RolloutSettings
from lightrl.rollout.trajectory_task import play_trajectory
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.weights import Bucket
from lightrl.workflows.workflow import Workflow

log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Ticks of the event loop after which every new trajectory task has reached its first `generate`: one starts the task,
# the others leave room for a workflow that awaits something ready first.
WAVE_TICKS = 4
MAX_REDRAWS = 3  # of a group for which a trajectory failed; then it is dropped


@dataclass
class _Running:
    """A group in flight."""

    group: Group
    started_version: int  # of the weights that served when it started: no token of it is older
    tasks: list[asyncio.Task[Trajectory | None]] = field(default_factory=list)
    num_done: int = 0


@dataclass
class _Wait:
    """One call of the main thread that waits for trajectories; written on the event loop, read by the main thread."""

    total: int  # trajectories it needs
    done: int = 0
    for_whom: str = "the first trajectory"
    last_news: float = field(default_factory=time.monotonic)  # seconds, when a trajectory that it waits for was done

    def count(self) -> None:
        self.done += 1
        self.last_news = time.monotonic()


class RolloutController:
    """Keeps as many groups in flight as the staleness bound allows, and hands finished ones to the loop.

    Args:
        engine: has been started.
        workflow: maps a prompt to a trajectory.
        judge: has been started; gives the reward, while other trajectories still generate.
        settings: sizes, bounds and which groups are dropped.
        sampling: of training rollouts; the seed of each generation is set here.
        run_seed: with position, sample and turn it fixes every draw.
        prompts: the stream, by position; None where only `evaluate` is used.
    """

    is_recorded = False

    def __init__(
        self,
        engine: RolloutEngine,
        workflow: Workflow,
        judge: Judge,
        settings: RolloutSettings,
        *,
        sampling: Sampling,
        run_seed: int = 0,
        prompts: Prompts | None = None,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        self.settings = settings
        self.sampling = sampling
        self.run_seed = run_seed

        self.num_consumed = 0  # groups that an iteration was trained on
        self._cursor = PromptCursor(prompts, settings.curriculum) if prompts is not None else None
        self._queued: collections.deque[int] = collections.deque()  # positions chosen, to start next
        self._again: list[int] = []  # on-policy, positions to draw again in the next wave
        self._redraws: dict[int, int] = {}  # how often a position in flight was started again with new seeds
        self._running: dict[int, _Running] = {}
        self._finished: dict[int, Group] = {}
        self._oldest_versions: dict[int, int] = {}  # of finished groups: each has many tokens to look at
        self._taken: list[Group] = []
        self._tally = DropTally(
            group_size=settings.group_size,
            groups_per_iteration=settings.groups_per_iteration,
            max_failed_fraction=settings.max_failed_fraction,
            max_dropped_groups=settings.max_dropped_groups,
        )
        self._judging = Judging(judge, self._tally, self._fail)
        self._failure: BaseException | None = None
        self._take_wait: _Wait | None = None  # of the `take` in progress
        self._is_closing = False

        self._thread = LoopThread(loop_timeout_s=settings.loop_timeout_s, on_exit=self._on_exit)
        self._loop = self._thread.loop
        self._changed = asyncio.Event()
        self._waving = asyncio.Lock()
        self._background: set[asyncio.Task[None]] = set()
        self._resuming: set[asyncio.Task[None]] = set()
        self._given_up: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()  # tasks that we cancelled
        self._thread.start()
        if isinstance(engine, LivesOnLoop):
            self._thread.call(engine.attach())

    # ------------------------------------------------------------------ from the main thread

    @property
    def local(self) -> RolloutController:
        return self

    def take(self, weight_version: int, *, on_wait: Callable[[int, int], None] | None = None) -> list[Group]:
        """The next P groups to train on, in stream order; they stay in `state_dict` until `commit`.

        They are judged, unless `judges_later`. Without a `commit` in between, the groups of the last `take` are
        candidates again.

        Args:
            weight_version: the trainer's version now, v.
            on_wait: called with (trajectories finished, trajectories needed) about ten times a second; may raise.

        Raises:
            RolloutError: if nothing finishes for `rollout_timeout_s`, naming what is waited for; if too many fail; if
                the engine's weights are missing or too old for anything to be taken.
            EngineError: if the engine fails.
        """
        wait = _Wait(self.settings.groups_per_iteration * self.settings.group_size)
        who = f"The loop at weight version {weight_version}"
        return self._wait_for(self._take(weight_version, wait), wait, on_wait, who)

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: Callable[[int, int], None] | None = None) -> None:
        """With `judges_later`: sets the rewards of the groups that the last `take` gave.

        A trajectory whose reward failed is taken out of its group, which may be empty then; `drain_drops` tells why.

        Args:
            groups: of `take`.
            on_wait: called with (trajectories judged, trajectories) about ten times a second; may raise.

        Raises:
            RolloutError: if nothing is judged for `rollout_timeout_s`, or if too many fail.
        """
        wait = _Wait(sum(len(group.trajectories) for group in groups), for_whom="the rewards")
        self._wait_for(self._judging.wait(groups, wait.count), wait, on_wait, "The loop")

    def commit(self) -> None:
        """The groups of the last `take` have been trained on: forget them."""
        self._thread.call(self._commit())

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Gives the engine new weights and, when it has acknowledged them, starts what the new version admits.

        Raises:
            WeightSyncError: from the engine; the old weights serve on.
            EngineTimeout: from the engine, which keeps the deadline of its load.
        """
        self.engine.load_weights(buckets, weight_version=weight_version)
        self._thread.call(self._pump())

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
            RolloutError: if none of them finishes for `rollout_timeout_s`.
            EngineError: if the engine fails.
        """
        wait = _Wait(len(prompts) * num_samples, for_whom=f"{len(prompts)} prompts × {num_samples} samples")
        return self._wait_for(self._evaluate(prompts, sampling, num_samples, wait), wait, on_wait, "Validation")

    def drain_drops(self) -> list[Drop]:
        """The trajectories dropped since the last call."""
        return self._tally.drain()

    def drain_group_drops(self) -> dict[str, int]:
        """How many groups were left out since the last call, by reason; each was replaced by another prompt."""
        return self._thread.call(self._take_group_drops())

    def progress(self) -> dict[str, int]:
        """Queue depths, for messages and metrics."""
        cursor = self._cursor
        return {
            "running_groups": len(self._running),
            "finished_groups": len(self._finished),
            "consumed_groups": self.num_consumed,
            "next_position": cursor.next_position if cursor is not None else 0,
            "skipped_prompts": cursor.num_skipped if cursor is not None else 0,
            "weight_version": self.engine.weight_version,
        }

    def state_dict(self) -> dict[str, Any]:
        """What resume needs: cursor, curriculum, positions in flight, groups not yet trained on. Plain Python."""
        return self._thread.call(self._state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first `take`: restores the cursor and finished groups; what was in flight starts again first."""
        self._thread.call(self._restore(state))

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancels what runs and ends the thread; the engine is the caller's to close. May be called twice."""
        self._thread.close(self._cancel_all, timeout_s)

    # ------------------------------------------------------------------ crossing over

    def _wait_for(
        self, coroutine: Coroutine[Any, Any, _T], wait: _Wait, on_wait: Callable[[int, int], None] | None, who: str
    ) -> _T:
        """The coroutine's result, or an error at the deadline; whatever is raised here cancels it."""

        def look() -> None:
            if time.monotonic() - wait.last_news > self.settings.rollout_timeout_s:
                raise self._overdue_error(wait, who)
            if on_wait is not None:
                on_wait(min(wait.done, wait.total), wait.total)

        return self._thread.wait_for(coroutine, on_answer=lambda: self._count_done(wait), on_wait=look, who=who)

    def _count_done(self, wait: _Wait) -> None:
        if wait is self._take_wait:
            wait.done = sum(item.num_done for item in self._running.values())
            wait.done += len(self._finished) * self.settings.group_size

    def _overdue_error(self, wait: _Wait, who: str) -> RolloutError:
        return RolloutError(
            f"{who} has waited for {wait.for_whom} and no trajectory finished for "
            f"rollout_timeout_s={self.settings.rollout_timeout_s:g}, expected {wait.total} trajectories and have "
            f"{wait.done}. Queue depths: {self.progress()}. Look at the engine and the reward, or raise "
            "StalenessControl.rollout_timeout_s."
        )

    # ------------------------------------------------------------------ on the event loop: batches

    async def _commit(self) -> None:
        self.num_consumed += len(self._taken)
        self._taken = []

    async def _state(self) -> dict[str, Any]:
        in_flight = sorted([*self._running, *self._queued, *self._again])
        return {
            "run_seed": self.run_seed,
            "groups_per_iteration": self.settings.groups_per_iteration,
            "num_consumed": self.num_consumed,
            "next_position": self._cursor.next_position if self._cursor is not None else 0,
            "curriculum": self._cursor.state_dict() if self._cursor is not None else None,
            "prompts": self._fingerprint(),
            "in_flight": in_flight,
            "redraws": [[position, self._redraws[position]] for position in in_flight if position in self._redraws],
            "finished": [group.to_json() for group in [*self._taken, *self._finished.values()]],
        }

    def _fingerprint(self) -> str | None:
        """What tells the prompts of two runs apart, where the stream can say it."""
        return getattr(self._cursor.prompts, "fingerprint", None) if self._cursor is not None else None

    async def _restore(self, state: Mapping[str, Any]) -> None:
        before, now = state.get("prompts"), self._fingerprint()
        if before is not None and now is not None and before != now:
            log.warning(
                "The checkpoint's prompts were %s, these are %s, expected the same: some come twice, some never. "
                "Restore the files, seed and shuffle of the data module, or start a new run.",
                before,
                now,
            )
        num_iterations = int(state["num_consumed"]) // int(state["groups_per_iteration"])
        self.run_seed = int(state["run_seed"])
        self.num_consumed = (
            num_iterations * self.settings.groups_per_iteration
        )  # admission counts in iterations of this run
        if self._cursor is not None:
            self._cursor.next_position = int(state["next_position"])
            self._cursor.load_state_dict(state.get("curriculum"))
        self._queued = collections.deque(state["in_flight"])
        self._redraws = dict(state.get("redraws", []))
        groups = [Group.from_json(record) for record in state["finished"]]
        self._finished = {group.id: group for group in groups}

    async def _take_group_drops(self) -> dict[str, int]:
        return self._tally.drain_groups()

    async def _take(self, weight_version: int, wait: _Wait) -> list[Group]:
        """Waits for `_changed`, set by each group that finishes and by each failure. A cancelled one takes nothing."""
        if self._failure is None:
            self._check_versions(weight_version)
        self._finished.update((group.id, group) for group in self._taken)
        self._taken = []
        if not self.settings.judges_later:
            await self._judge_restored(wait)
        self._give_back_overdue(weight_version)
        self._take_wait = wait
        self._pump_soon()
        try:
            while True:
                if self._failure is not None:
                    raise self._failure
                batch = choose_batch(
                    self._finished_versions(weight_version),
                    {group_id: item.started_version for group_id, item in self._running.items()},
                    weight_version=weight_version,
                    groups_per_iteration=self.settings.groups_per_iteration,
                    max_staleness=self.settings.max_staleness,
                    max_given_up=self.settings.num_oversampled,
                )
                if batch.group_ids is not None:
                    self._taken = [self._finished.pop(group_id) for group_id in batch.group_ids]
                    self._give_up_groups(batch.gives_up)
                    self._tally.begin_iteration()
                    return list(self._taken)
                may_redraw = (
                    self.settings.redraw_stragglers and len(self._finished) >= self.settings.groups_per_iteration
                )
                if may_redraw and self._redraw(batch.waits_for):
                    continue
                whom = f"groups {describe_waiting(batch.waits_for)}" if batch.waits_for else "more finished groups"
                wait.for_whom = whom
                self._changed.clear()
                await self._changed.wait()
        finally:
            if self._take_wait is wait:  # else a later `take` has begun
                self._take_wait = None

    async def _judge_restored(self, wait: _Wait) -> None:
        """The rewards of a checkpoint's groups that an earlier run, which judged later, was still waiting for."""
        groups = [group for group in self._finished.values() if any(item.reward is None for item in group.trajectories)]
        await self._judging.wait(groups, wait.count)
        for group in groups:
            if not group.trajectories:
                del self._finished[group.id]
                self._queued.append(group.id)

    def _check_versions(self, weight_version: int) -> None:
        served = self.engine.weight_version
        if served < 0 or weight_version - served > self.settings.max_staleness:
            raise RolloutError(
                f"The engine serves weight version {served} and the trainer is at {weight_version}, expected at most "
                f"max_staleness={self.settings.max_staleness} between them. Load the weights before the next batch."
            )

    def _finished_versions(self, weight_version: int) -> dict[int, int]:
        versions: dict[int, int] = {}
        for group in self._finished.values():
            known = self._oldest_versions.get(group.id)
            versions[group.id] = group.oldest_version if known is None else known
        self._oldest_versions = versions
        # A group in which the policy wrote nothing cannot be stale.
        return {group_id: version if version >= 0 else weight_version for group_id, version in versions.items()}

    def _give_back_overdue(self, weight_version: int) -> None:
        overdue = find_overdue(
            self._finished_versions(weight_version),
            weight_version=weight_version,
            groups_per_iteration=self.settings.groups_per_iteration,
            max_staleness=self.settings.max_staleness,
        )
        for group_id in overdue:
            group = self._finished.pop(group_id)
            self._queued.append(group_id)
            bound = f"max_staleness={self.settings.max_staleness}"
            message = f"Group {group_id} is too old for {bound}; its prompt is drawn again."
            self._tally.drop_all(group, "stale", message)

    # ------------------------------------------------------------------ on the event loop: groups in flight

    def _num_accepted(self) -> int:
        return self.num_consumed + len(self._taken) + len(self._finished)

    def _num_admissible(self, max_concurrent: int | None) -> int:
        """On-policy groups start only while a batch is waited for."""
        is_idle = self.settings.max_staleness == 0 and self._take_wait is None
        if self._cursor is None or self._failure is not None or self._is_closing or is_idle:
            return 0
        return num_admissible(
            running=len(self._running),
            accepted=self._num_accepted(),
            weight_version=self.engine.weight_version,
            groups_per_iteration=self.settings.groups_per_iteration,
            max_staleness=self.settings.max_staleness,
            max_concurrent=max_concurrent,
            total=self.settings.total_groups,
            oversampled=self.settings.num_oversampled,
        )

    async def _pump(self) -> None:
        """Starts what may start; on-policy as one wave in a fixed order. What a cancelled one has started runs on."""
        if not self._num_admissible(self.settings.max_concurrent):
            return
        if (
            self.settings.max_staleness > 0
        ):  # what runs already would have to stand still, and the order is not promised
            self._start_groups()
            return
        # What replaces dropped groups waits until all of the wave before it are in: what is drawn, and beside what it
        # is decoded, then follows from the seed, not from who was done first.
        if self._running and not self._queued:
            return
        async with self._wave():
            self._start_groups()

    @contextlib.asynccontextmanager
    async def _wave(self) -> AsyncIterator[None]:
        """What is started inside reaches the engine while it stands still, so that it is admitted at once, in order.

        Waits for the wave before it and for the engine's pause. On cancellation the engine is resumed, and the resume
        itself is never cancelled: a cancelled pause stands.
        """
        async with self._waving:
            try:
                await self.engine.pause()
                yield
                for _ in range(WAVE_TICKS):
                    await asyncio.sleep(0)
            finally:
                resuming = self._loop.create_task(self.engine.resume())
                self._resuming.add(resuming)
                resuming.add_done_callback(self._resuming.discard)
                try:
                    await asyncio.shield(resuming)
                except asyncio.CancelledError:
                    await asyncio.wait({resuming})
                    raise

    def _pump_soon(self) -> None:
        task = self._loop.create_task(self._pump())
        self._background.add(task)
        task.add_done_callback(self._on_pumped)

    def _on_pumped(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._fail(error)

    def _start_groups(self) -> None:
        try:
            if self.settings.max_staleness == 0 and not self._running and not self._queued:
                self._plan_wave()
            for _ in range(self._num_admissible(self.settings.max_concurrent)):
                if not self._queued and self.settings.max_staleness == 0:
                    return
                self._start_next_group()
        except RolloutError as error:
            self._fail(error)

    def _plan_wave(self) -> None:
        assert self._cursor is not None
        self._queued.extend(sorted(self._again))
        self._again = []
        for _ in range(self._num_admissible(None) - len(self._queued)):
            self._queued.append(self._cursor.choose(self.run_seed))

    def _start_next_group(self) -> None:
        assert self._cursor is not None
        if not self._queued:
            self._queued.append(self._cursor.choose(self.run_seed))
        position = self._queued[0]
        prompt = self._cursor.read(position)
        self._queued.popleft()
        self._start_group(position, prompt)

    def _start_group(self, position: int, prompt: Prompt) -> None:
        self._oldest_versions.pop(position, None)
        running = _Running(Group(position, prompt), started_version=self.engine.weight_version)
        self._running[position] = running
        redraws = self._redraws.get(position)
        seed_name = f"{position}:{prompt.id}" + (f":{redraws}" if redraws else "")
        for sample in range(self.settings.group_size):
            task = self._loop.create_task(self._training_trajectory(prompt, position, sample, seed_name))
            running.tasks.append(task)
            task.add_done_callback(lambda done, item=running: self._on_done(item, done))  # type: ignore[misc]

    def _redraw(self, group_ids: Sequence[int]) -> int:
        """Starts these groups again, except those that would get no newer weights than they had; how many it were."""
        outdated = [
            group_id for group_id in group_ids if self._running[group_id].started_version < self.engine.weight_version
        ]
        for group_id in outdated:
            item = self._running[group_id]
            message = f"Group {group_id} of version {item.started_version} held a batch back and is drawn again."
            self._abandon(item, "straggler", message)
            self._redraws[group_id] = self._redraws.get(group_id, 0) + 1
            self._start_group(group_id, item.group.prompt)
        return len(outdated)

    def _give_up_groups(self, group_ids: Sequence[int]) -> None:
        """Leaves these over-sampled groups out, running or finished."""
        for group_id in group_ids:
            message = f"Group {group_id} was started beyond what the iteration needs, and enough others were done."
            if group_id in self._running:
                self._abandon(self._running.pop(group_id), "oversampled", message)
            else:
                self._tally.drop_all(self._finished.pop(group_id), "oversampled", message)
            self._redraws.pop(group_id, None)
            self._tally.count_given_up("oversampled")
        if group_ids:
            self._pump_soon()

    def _abandon(self, item: _Running, reason: str, message: str) -> None:
        self._give_up(item.tasks)
        for task in item.tasks:
            if not task.done() or task.cancelled() or task.result() is not None:  # else it was dropped before
                self._tally.drop(reason, message, item.group.prompt)

    def _give_up(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        for task in tasks:
            self._given_up.add(task)
            task.cancel()

    def _on_done(self, running: _Running, task: asyncio.Task[Trajectory | None]) -> None:
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or self._running.get(running.group.id) is not running:
            return
        if self._take_wait is not None:
            self._take_wait.last_news = time.monotonic()
        running.num_done += 1
        if error is not None:
            self._fail(error)
            return
        try:
            self._tally.count_trajectory(is_failed=task.result() is None)
            if running.num_done == self.settings.group_size:
                self._on_group_done(running)
        except RolloutError as raised:
            self._fail(raised)
        if running.num_done == self.settings.group_size:
            self._changed.set()
            self._pump_soon()

    def _on_group_done(self, running: _Running) -> None:
        """Keeps the group, or drops it, or has it drawn again."""
        group = running.group
        del self._running[group.id]
        results = [task.result() for task in running.tasks]
        group.trajectories = [item for item in results if item is not None]
        redraws = self._redraws.pop(group.id, 0)
        is_incomplete = len(group.trajectories) < self.settings.group_size
        if is_incomplete and self.settings.incomplete_groups == "redraw" and redraws < MAX_REDRAWS:
            self._redraws[group.id] = redraws + 1
            (self._again if self.settings.max_staleness == 0 else self._queued).append(group.id)
            self._tally.drop_all(group, "incomplete", f"Group {group.id} lost a trajectory and is drawn again.")
            return
        verdict = self._reason_to_drop(group, is_incomplete)
        if verdict is None:
            self._tally.count_kept()
            self._finished[group.id] = group
            return
        reason, message = verdict
        self._tally.drop_all(group, reason, message)
        self._tally.count_dropped(reason, message)

    def _reason_to_drop(self, group: Group, is_incomplete: bool) -> tuple[str, str] | None:
        assert self._cursor is not None
        if not group.trajectories:
            return "failed", f"Every trajectory of group {group.id} failed: {self._tally.last.message}"
        self._cursor.observe(group.id, group.prompt.id, success_rate(group))
        if is_incomplete and self.settings.incomplete_groups != "train":
            return (
                "incomplete",
                f"Group {group.id} has {len(group.trajectories)} of its {self.settings.group_size} trajectories.",
            )
        try:
            return self.settings.group_filter(group) if self.settings.group_filter is not None else None
        except Exception as error:
            self._queued.append(group.id)  # for the state: a run with a mended rule judges it anew
            raise RolloutError(f"The group filter raised {error!r} on group {group.id}. Mend the rule.") from error

    def _on_exit(self, error: BaseException) -> None:
        self._fail(RolloutError(f"A task on the event loop raised {error!r}, expected it not to exit."), error)

    def _fail(self, error: BaseException, cause: BaseException | None = None) -> None:
        if self._failure is None:
            if cause is not None:
                error.__cause__ = cause
            self._failure = error
        self._changed.set()

    # ------------------------------------------------------------------ on the event loop: one trajectory

    async def _training_trajectory(
        self, prompt: Prompt, group_id: int, sample: int, seed_name: str
    ) -> Trajectory | None:
        if not self.settings.judges_later:
            return await self._trajectory(prompt, group_id, sample, self.sampling, seed_name)
        trajectory = await self._write(prompt, group_id, sample, self.sampling, seed_name)
        if trajectory is not None:
            self._judging.begin(trajectory, prompt)
        return trajectory

    async def _trajectory(
        self, prompt: Prompt, group_id: int, sample: int, sampling: Sampling, seed_name: str
    ) -> Trajectory | None:
        """One interaction, judged; None if it was dropped. Waits for the workflow, then for the judge."""
        trajectory = await self._write(prompt, group_id, sample, sampling, seed_name)
        return trajectory if trajectory is not None and await self._judging.judge(trajectory, prompt) else None

    async def _write(
        self, prompt: Prompt, group_id: int, sample: int, sampling: Sampling, seed_name: str
    ) -> Trajectory | None:
        """One interaction without its reward; None if it was dropped."""
        try:
            trajectory = await play_trajectory(
                prompt,
                engine=self.engine,
                workflow=self.workflow,
                sampling=sampling,
                seed_of_turn=lambda turn: sampling_seed(self.run_seed, seed_name, sample, turn),
                session=f"{seed_name}/{sample}",
                was_given_up=lambda: self._is_closing or asyncio.current_task() in self._given_up,
            )
        except (RewardError, RolloutError) as error:
            self._tally.drop_failed(error, prompt)
            return None
        trajectory.group_id, trajectory.sample = group_id, sample
        return trajectory

    async def _evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, wait: _Wait
    ) -> list[Group]:
        """Waits for all trajectories, or for the first error. On cancellation they are cancelled and awaited."""
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        rows: list[list[asyncio.Task[Trajectory | None]]] = [[] for _ in groups]

        try:
            async with self._wave():
                for group, row in zip(groups, rows, strict=True):
                    for sample in range(num_samples):
                        seed_name = f"validation:{group.prompt.id}"
                        run = self._trajectory(group.prompt, group.id, sample, sampling, seed_name)
                        row.append(self._loop.create_task(run))
                        row[-1].add_done_callback(lambda task: wait.count())
            tasks = [task for row in rows for task in row]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
            for task in done:
                task.result()  # raises what it raised
            for group, row in zip(groups, rows, strict=True):
                group.trajectories = [item for task in row if (item := task.result()) is not None]
            self._tally.check_evaluation(sum(len(group.trajectories) for group in groups), wait.total)
        finally:
            self._give_up(task for row in rows for task in row)
            await asyncio.gather(*(task for row in rows for task in row), return_exceptions=True)
        return groups

    async def _cancel_all(self) -> None:
        self._is_closing = True
        while tasks := asyncio.all_tasks(self._loop) - {asyncio.current_task()}:
            for task in tasks - self._resuming:
                task.cancel()
            await asyncio.wait(tasks)
        if isinstance(self.engine, LivesOnLoop):
            await self.engine.detach()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()
