"""RolloutController: keeps groups in flight and hands over judged batches that keep the staleness bound.

One asyncio loop in one daemon thread, on rank 0. All state belongs to that thread. The public methods are called from
the main thread: a coroutine does the work on the loop, and the main thread waits for it and keeps the deadlines, so
that a blocked event loop is noticed too. GroupBook decides what starts and what is taken; the controller acts.

    prompt stream ──position──► trajectory tasks × G ──► judge ──► finished groups ──► take() ──► commit()
                     start         workflow, engine                                  stream order  trained on
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightrl.concurrency.in_thread import in_thread
from lightrl.concurrency.loop_thread import LoopThread
from lightrl.engines import SGLangEngine
from lightrl.engines.engine import RolloutEngine
from lightrl.errors import RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import Drop
from lightrl.rollout.group_book import GroupBook
from lightrl.rollout.group_runs import GroupRuns
from lightrl.rollout.pooled_player import make_player
from lightrl.rollout.prompt_cursor import PromptCursor, Prompts
from lightrl.rollout.protocol import OnWait
from lightrl.rollout.saved_state import SavedState, Wave
from lightrl.rollout.settings import RolloutSettings
from lightrl.rollout.tasks import Tasks
from lightrl.trace import span
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.weights import Bucket
from lightrl.workflows.workflow import Workflow


@dataclass
class Wait:
    """One call of the main thread that waits for trajectories; written on the event loop, read by the main thread."""

    who: str  # waits, for messages
    total: int  # trajectories it needs
    for_what: str = "the first trajectory"
    done: int = 0
    last_news: float = field(default_factory=time.monotonic)  # seconds, when a trajectory that it waits for was done

    def count(self) -> None:
        self.done += 1
        self.note_news()

    def note_news(self) -> None:
        self.last_news = time.monotonic()


@dataclass
class Stragglers:
    """The slow groups that one batch waits for although enough others are finished."""

    num: int = 0  # now
    waited_s: float = 0.0  # for any of them
    _since_s: float = 0.0  # monotonic clock

    def count(self, num: int) -> None:
        """From now on the batch waits for this many of them."""
        now = time.monotonic()
        if self.num:
            self.waited_s += now - self._since_s
        self.num, self._since_s = num, now


class PromptsAhead:
    """Belongs to the controller's event loop.

    Args:
        cursor: whose prompts are made.
        tasks: where an error of the stream ends the run.
        then: starts what may start, once prompts have been made.
    """

    def __init__(self, cursor: PromptCursor, tasks: Tasks, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._cursor = cursor
        self._tasks = tasks
        self._then = then
        self._making: asyncio.Task[None] | None = None

    def lacks(self, positions: Sequence[int], num: int, run_seed: int) -> bool:
        """Whether a prompt of these positions, or of the next `num` choices, is not made yet; then makes it.

        After an error of the stream it says False, for nothing will start.
        """
        try:
            missing = self._cursor.unprepared(positions, num, run_seed)
        except RolloutError as error:
            self._tasks.fail(error)
            return False
        if missing is not None:
            self._begin(missing)
        return missing is not None

    def refill(self) -> None:
        """Makes more prompts, if few are left."""
        if self._cursor.may_prepare:
            self._begin(self._cursor.next_position)

    def _begin(self, first: int) -> None:
        if self._making is None or self._making.done():
            self._making = self._tasks.spawn(self._make(first))

    async def _make(self, first: int) -> None:
        with span("make prompts", "data", "prompts", first=first):
            await in_thread(self._cursor.prepare, first)
        self._making = None
        await self._then()


_T = TypeVar("_T")


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
        folder: of the run, for the journal of a workflow with side effects; None writes none.
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
        folder: Path | None = None,
    ) -> None:
        self.engine = engine
        self.workflow = workflow
        self.settings = settings
        self.sampling = sampling
        self.run_seed = run_seed

        self._book = GroupBook(settings)
        self._cursor = PromptCursor(prompts, settings.curriculum)
        self._tasks = Tasks()
        self._player = make_player(engine, workflow, self._tasks, judge, self._book.tally, settings)
        self._wave = Wave(engine)
        self._ahead = PromptsAhead(self._cursor, self._tasks, self._pump)
        self._runs = GroupRuns(
            self._book,
            self._cursor,
            self._player,
            self._tasks,
            sampling,
            on_done=lambda: self._tasks.spawn(self._pump()),
            on_news=lambda: self._take_wait.note_news() if self._take_wait is not None else None,
        )
        if folder is not None and self._player.workflow.has_side_effects:
            self._player.written.open_journal(folder)
        self._saved_state = SavedState(engine, self._book, self._cursor, self._player, self._wave)
        self._take_wait: Wait | None = None  # of the `take` in progress
        self._stragglers = Stragglers()
        self._is_closing = False

        self._thread = LoopThread(loop_timeout_s=settings.loop_timeout_s, on_exit=self._tasks.fail_on_exit)
        self._loop = self._thread.loop
        self._thread.start()
        if isinstance(engine, SGLangEngine):
            self._thread.call(engine.attach())
        self._thread.call(self._player.open())

    # ------------------------------------------------------------------ from the main thread

    @property
    def local(self) -> RolloutController:
        return self

    def take(self, weight_version: int, *, on_wait: OnWait | None = None) -> list[Group]:
        """The next P groups to train on, in stream order; they stay in `state_dict` until `commit`.

        They are judged, unless `judges_later`. Without a `commit` in between, the groups of the last `take` are
        candidates again.

        Args:
            weight_version: the trainer's version now, v.

        Raises:
            RolloutError: if nothing finishes for `rollout_timeout_s`, naming what it waits for; if too many fail; if
                the engine's weights are missing or too old for anything to be taken.
            EngineError: if the engine fails.
        """
        num = self.settings.groups_per_iteration * self.settings.group_size
        wait = Wait(f"The loop at weight version {weight_version}", num)
        return self._wait_for(self._take(weight_version, wait), wait, on_wait)

    def wait_for_rewards(self, groups: Sequence[Group], *, on_wait: OnWait | None = None) -> None:
        """With `judges_later`: sets the rewards of the groups from the last `take`.

        A trajectory whose reward failed is removed from its group, which may then be empty; `drain_drops` tells why.

        Raises:
            RolloutError: if nothing is judged for `rollout_timeout_s`, or if too many fail.
        """
        wait = Wait("The loop", sum(len(group.trajectories) for group in groups), "the rewards")
        self._wait_for(self._player.wait_for_rewards(groups, wait.count), wait, on_wait)

    def commit(self) -> None:
        """The groups of the last `take` have been trained on: forget them."""
        self._thread.call(_as_coroutine(self._book.commit))

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Gives the engine new weights and, when it has acknowledged them, starts what the new version admits.

        Raises:
            WeightSyncError: from the engine; it keeps serving the old weights.
            EngineTimeout: from the engine, which keeps the deadline of its load.
        """
        self.engine.load_weights(buckets, weight_version=weight_version)
        self._thread.call(self._pump())

    def evaluate(
        self, prompts: Sequence[Prompt], *, sampling: Sampling, num_samples: int = 1, on_wait: OnWait | None = None
    ) -> list[Group]:
        """Rolls out and judges prompts for validation, in order, outside admission; training rollouts continue.

        Trajectories whose reward failed are missing from their group; `drain_drops` tells why.

        Raises:
            RolloutError: if none of them finishes for `rollout_timeout_s`, or if too many fail.
            EngineError: if the engine fails.
        """
        what = f"{len(prompts)} prompts × {num_samples} samples"
        wait = Wait("Validation", len(prompts) * num_samples, what)
        return self._wait_for(self._evaluate(prompts, sampling, num_samples, wait), wait, on_wait)

    def drain_drops(self) -> list[Drop]:
        """The trajectories dropped since the last call."""
        return self._book.tally.drain()

    def drain_group_drops(self) -> dict[str, int]:
        """How many groups were dropped since the last call, by reason; each was replaced by another prompt."""
        return self._thread.call(_as_coroutine(self._book.tally.drain_groups))

    def progress(self) -> dict[str, float]:
        """Queue depths, stragglers, and sums over what was chosen and what was not; for messages and metrics."""
        return {
            **_depths(self._book, self._cursor, self.engine),
            "skipped_prompts": self._cursor.num_skipped,
            "redrawn_groups": self._book.num_redrawn,
            "stragglers": self._stragglers.num,
            "straggler_wait_s": self._stragglers.waited_s,
            **self._book.tally.thrown_away,
            **self._cursor.past_success,
        }

    def state_dict(self) -> dict[str, Any]:
        """What resume needs: cursor, curriculum, positions in flight, groups not yet trained on. Plain Python."""
        timeout_s = self.settings.loop_timeout_s / 2
        return self._thread.call(self._saved_state.take(self.run_seed, timeout_s=timeout_s))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first `take`: restores the cursor and finished groups; what was in flight starts again first."""
        self._thread.call(_as_coroutine(partial(self._restore, state)))

    def close(self, timeout_s: float = 10.0) -> None:
        """Cancels what runs and ends the thread; the engine is the caller's to close. May be called twice."""
        self._thread.close(self._cancel_all, timeout_s)

    def _wait_for(self, coroutine: Coroutine[Any, Any, _T], wait: Wait, on_wait: OnWait | None) -> _T:
        """The coroutine's result, or an error at the deadline; whatever is raised here cancels it."""

        def look() -> None:
            if time.monotonic() - wait.last_news > self.settings.rollout_timeout_s:
                raise RolloutError(
                    f"{wait.who} waited for {wait.for_what}, but no trajectory finished for "
                    f"rollout_timeout_s={self.settings.rollout_timeout_s:g}; {wait.done} of {wait.total} trajectories "
                    f"are done. Queue depths: "
                    f"{_depths(self._book, self._cursor, self.engine)}. Check the engine and the reward, or increase "
                    "StalenessControl.rollout_timeout_s."
                )
            if on_wait is not None:
                on_wait(min(wait.done, wait.total), wait.total)

        def count() -> None:
            if wait is self._take_wait:
                wait.done = self._book.num_done_trajectories

        return self._thread.wait_for(coroutine, on_answer=count, on_wait=look, who=wait.who)

    # ------------------------------------------------------------------ on the event loop

    def _restore(self, state: Mapping[str, Any]) -> None:
        self.run_seed = int(state["run_seed"])
        self._saved_state.load(state)

    async def _take(self, weight_version: int, wait: Wait) -> list[Group]:
        """Waits for `Tasks.changed`, set when a group is done or the run fails. If cancelled, it takes nothing."""
        served = self.engine.weight_version
        if self._tasks.failure is None and (served < 0 or weight_version - served > self.settings.max_staleness):
            raise RolloutError(
                f"The engine serves weight version {served} and the trainer is at {weight_version}. It needs weights "
                f"(-1 is none) at most max_staleness={self.settings.max_staleness} versions behind. Load them first."
            )
        if not self.settings.judges_later:
            unjudged = self._book.unjudged()
            await self._player.wait_for_rewards(unjudged, wait.count)
            self._book.rejudged(unjudged)
        self._book.begin_take(weight_version)
        self._stragglers = Stragglers()
        self._take_wait = wait
        self._tasks.spawn(self._pump())
        try:
            while True:
                if self._tasks.failure is not None:
                    raise self._tasks.failure
                batch = self._book.take(weight_version)
                self._stragglers.count(len(batch.waits_for) if self._book.is_held_back else 0)
                if batch.group_ids is not None:
                    self._runs.give_up(batch.gives_up)
                    if batch.gives_up:
                        self._tasks.spawn(self._pump())
                    return list(self._book.taken)
                stragglers = self._book.stragglers(batch, self.engine.weight_version)
                if stragglers:
                    version = self.engine.weight_version
                    for group_id in stragglers:
                        self._runs.start(group_id, self._runs.redraw(group_id), version, self.run_seed)
                    continue
                wait.for_what = batch.describe_wait()
                self._tasks.changed.clear()
                with span(f"waits for {wait.for_what}", "wait", "take"):
                    await self._tasks.changed.wait()
        finally:
            self._stragglers.count(0)
            if self._take_wait is wait:  # else a later `take` has begun
                self._take_wait = None

    async def _pump(self) -> None:
        """Starts what may start, on-policy as one wave. If it is cancelled, what it has started continues.

        Prompts that are not made yet are made in a thread first, and then what may start does.
        """
        if self._is_open() and self._book.may_start(self.engine.weight_version):
            version = self.engine.weight_version
            if self._ahead.lacks(self._book.startable(version), self._book.room(version), self.run_seed):
                return
            # Off-policy a wave would stop what already runs, and no order is promised.
            is_wave = self.settings.max_staleness == 0
            async with self._wave.begin() if is_wave else contextlib.nullcontext():
                self._start_groups()

    def _is_open(self) -> bool:
        """Whether groups may start at all; on-policy only while a batch is waited for."""
        is_idle = self.settings.max_staleness == 0 and self._take_wait is None
        has_prompts = self._cursor.prompts is not None
        return has_prompts and self._tasks.failure is None and not self._is_closing and not is_idle

    def _start_groups(self) -> None:
        if not self._is_open():
            return
        version = self.engine.weight_version
        try:
            for _ in range(self._book.plan(version)):
                self._book.queue(self._cursor.choose(self.run_seed))
            for position in self._book.startable(version):
                self._runs.start(position, self._cursor.read(position), version, self.run_seed)
        except RolloutError as error:
            self._tasks.fail(error)
        self._ahead.refill()

    async def _evaluate(
        self, prompts: Sequence[Prompt], sampling: Sampling, num_samples: int, wait: Wait
    ) -> list[Group]:
        """Waits for all trajectories, or for the first error. On cancellation they are cancelled and awaited."""
        groups = [Group(index, prompt) for index, prompt in enumerate(prompts)]
        tasks: list[asyncio.Task[Trajectory | None]] = []
        try:
            async with self._wave.begin():
                for group in groups:
                    seed_name = f"validation:{group.prompt.id}"
                    for sample in range(num_samples):
                        run = self._player.play(group, sample, sampling, self.run_seed, seed_name)
                        tasks.append(self._loop.create_task(run))
                        tasks[-1].add_done_callback(lambda task: wait.count())
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else ((), ())
            for task in done:
                task.result()  # raises what it raised
            trajectories = [item for task in tasks if (item := task.result()) is not None]
            for item in trajectories:
                groups[item.group_id].trajectories.append(item)
            self._book.tally.check_evaluation(len(trajectories), wait.total)
        finally:
            self._tasks.give_up(tasks)
            await asyncio.gather(*tasks, return_exceptions=True)
        return groups

    async def _cancel_all(self) -> None:
        self._is_closing = True
        await self._tasks.give_up_all(but=self._wave.resuming)
        if isinstance(self.engine, SGLangEngine):
            await self.engine.detach()
        await self._loop.shutdown_asyncgens()
        await self._loop.shutdown_default_executor()


async def _as_coroutine(function: Callable[[], _T]) -> _T:
    return function()


def _depths(book: GroupBook, cursor: PromptCursor, engine: RolloutEngine) -> dict[str, int]:
    return {
        "running_groups": len(book.running),
        "finished_groups": len(book.finished),
        "consumed_groups": book.num_consumed,
        "next_position": cursor.next_position,
        "weight_version": engine.weight_version,
    }
