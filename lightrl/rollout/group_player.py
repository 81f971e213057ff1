"""GroupPlayer: plays the trajectories of a group, with one request and one task where that is all they need."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.engines.engine import Completion
from lightrl.errors import RewardError, RolloutError
from lightrl.rewards import JudgesGroups, Judgment
from lightrl.rollout.player import Player, checked
from lightrl.trace import record
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.workflow import SingleTurn


class GroupPlayer(Player):
    """A Player of whole groups."""

    async def open(self) -> None:
        """Called on the event loop, before anything is played."""

    async def collect(self) -> None:
        """Called while the engine is paused: afterwards `written` is complete."""

    def parts(
        self,
        group: Group,
        samples: Sequence[int],
        sampling: Sampling,
        run_seed: int,
        seed_name: str,
        *,
        judge_now: bool = True,
    ) -> list[AsyncIterator[tuple[int, Trajectory | None]]]:
        """`play` for these samples, in parts that may run at the same time: all in one request if that is possible.

        Returns:
            Of each part an iterator of its samples, each with its trajectory, as they are done.
        """
        settings: Any = {"judge_now": judge_now}
        self.written.open(seed_name)
        seeds = [sampling_seed(run_seed, seed_name, sample, 0) for sample in samples]
        if self._plays_groups and self.written.begun.keys().isdisjoint(seeds):
            return [self._play_group(group, samples, seeds, sampling, seed_name, **settings)]

        async def alone(sample: int) -> AsyncIterator[tuple[int, Trajectory | None]]:
            yield sample, await self.play(group, sample, sampling, run_seed, seed_name, **settings)

        return [alone(sample) for sample in samples]

    @functools.cached_property
    def _plays_groups(self) -> bool:
        """Whether `_play_group` can be used: one completion is all, and the engine takes those of a group together.

        An engine whose class replaces `generate` alone gets each request by itself.
        """
        homes = [
            next((kind for kind in type(self.engine).__mro__ if name in vars(kind)), None)
            for name in ("generate", "write_group")
        ]
        return type(self.workflow).run is SingleTurn.run and homes[0] is homes[1]

    @functools.cached_property
    def _group_judge(self) -> JudgesGroups | None:
        return self.judge if isinstance(self.judge, JudgesGroups) else None

    async def _play_group(
        self,
        group: Group,
        samples: Sequence[int],
        seeds: Sequence[int],
        sampling: Sampling,
        seed_name: str,
        *,
        judge_now: bool,
    ) -> AsyncIterator[tuple[int, Trajectory | None]]:
        """`parts` with one request and one task."""
        num_left, samplings = len(samples), [sampling.with_seed(seed) for seed in seeds]
        arrived: list[tuple[int, asyncio.Future[Any]]] = []
        news = asyncio.Event()
        waits: list[asyncio.Future[Any]] = []
        played: dict[int, Trajectory] = {}  # by sample, while they are judged

        def follow(sample: int, step: asyncio.Future[Any]) -> None:
            waits.append(step)
            step.add_done_callback(functools.partial(arrive, sample))

        def arrive(sample: int, step: asyncio.Future[Any]) -> None:
            arrived.append((sample, step))
            news.set()

        written, seed_of = self.written.completions(seed_name), dict(zip(samples, seeds, strict=True))
        try:
            begun_ns = time.perf_counter_ns()
            for sample, completion in zip(samples, self._write_group(group.prompt, samplings, seed_name), strict=True):
                written[seed_of[sample]] = None
                follow(sample, completion)
            while num_left:
                await news.wait()
                news.clear()
                steps, done, unjudged = arrived.copy(), [], {}
                arrived.clear()
                for sample, step in steps:
                    trajectory: Trajectory | None
                    if sample in played:
                        trajectory = played.pop(sample)
                        done.append((sample, trajectory if self._take_judgment(trajectory, step) else None))
                        continue
                    record("generate", "generate", "generations", begun_ns, session=f"{seed_name}/{sample}")
                    written[seed_of[sample]] = None if step.exception() else step.result()
                    trajectory = self._finished(group, sample, step, sampling)
                    if trajectory is not None and judge_now:
                        unjudged[sample] = trajectory
                    else:
                        done.append((sample, self._begun_judging(trajectory)))
                played |= unjudged
                for sample, judging in zip(unjudged, self._judged_together(list(unjudged.values())), strict=True):
                    follow(sample, judging)
                for sample, trajectory in done:
                    num_left -= 1
                    yield sample, trajectory
        finally:
            self.tasks.give_up(step for step in waits if not step.done())
            for step in waits:  # an engine that fails tells each of them
                _ = step.cancelled() or (step.done() and step.exception())

    def _judged_together(self, trajectories: list[Trajectory]) -> list[asyncio.Future[Any]]:
        """Of each, what `_take_judgment` gets when it is done."""
        if trajectories and (judge := self._group_judge) is not None:
            begun_ns = time.perf_counter_ns()
            judgings = judge.score_group(trajectories)
            for judging in judgings:
                judging.add_done_callback(lambda _: record("reward", "reward", "rewards", begun_ns))
            return [*judgings]
        return [self.tasks.spawn(self._set_reward(trajectory)) for trajectory in trajectories]

    def _take_judgment(self, trajectory: Trajectory, judged: asyncio.Future[Any]) -> bool:
        """Sets the reward that came of it, if that is not done; False if the trajectory was dropped."""
        if isinstance(judged, asyncio.Task):  # of `_set_reward`
            return bool(judged.result())
        try:
            judgment: Judgment = judged.result()
        except RewardError as error:
            self.tally.drop_failed(error, trajectory.prompt)
            return False
        judgment.apply_to(trajectory)
        return True

    def _finished(
        self, group: Group, sample: int, written: asyncio.Future[Completion], sampling: Sampling
    ) -> Trajectory | None:
        """The trajectory of a completion; None if it was dropped."""
        workflow, prompt = self.workflow, group.prompt
        assert isinstance(workflow, SingleTurn)
        try:
            with named_user_code(f"{type(workflow).__name__}.run", on=f"prompt {prompt.id!r}"):
                trajectory = workflow.trajectory_of(prompt, checked(written.result(), sampling, 0, prompt))
        except RolloutError as error:
            self.tally.drop_failed(error, prompt)
            return None
        trajectory.group_id, trajectory.sample = group.id, sample
        return trajectory

    def _write_group(self, prompt: Prompt, samplings: list[Sampling], session: str) -> list[asyncio.Future[Completion]]:
        """The engine's futures; if it refuses the prompt, as many with that error."""
        engine: Any = self.engine
        images: dict[str, Any] = {"images": prompt.images} if prompt.images else {}
        try:
            futures: list[asyncio.Future[Completion]] = engine.write_group(
                prompt.token_ids or [], samplings, session=session, **images
            )
        except ValueError as error:
            futures = [asyncio.get_running_loop().create_future() for _ in samplings]
            for future in futures:
                future.set_exception(error)
        return futures
