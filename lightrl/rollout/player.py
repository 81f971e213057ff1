"""Player: plays the trajectories of a workflow and judges them; a failure of user code becomes a drop with a reason."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import LightRLError, RewardError, RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.tasks import Tasks
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.workflow import Generate, SingleTurn, Workflow, check_trajectory


@dataclass(eq=False)
class Player:
    """Belongs to the controller's event loop. A failure drops the trajectory; only an EngineError is raised."""

    engine: RolloutEngine  # has been started
    workflow: Workflow
    judge: Judge  # has been started
    tally: DropTally  # counts what is dropped
    tasks: Tasks
    _judgings: dict[tuple[int, int], asyncio.Task[bool]] = field(default_factory=dict, init=False)  # by group, sample

    async def play(
        self, group: Group, sample: int, sampling: Sampling, run_seed: int, seed_name: str, *, judge_now: bool = True
    ) -> Trajectory | None:
        """One interaction of the workflow with the engine, judged; None if it was dropped.

        Waits for workflow and judge, without a deadline of its own. A cancellation by `Tasks.give_up` passes through.

        Args:
            sampling: of every turn; the seed is set here.
            run_seed, seed_name: with sample and turn they fix every draw.
            judge_now: False begins to judge, but leaves the waiting to `wait_for_rewards`.

        Raises:
            EngineError: from the engine.
        """
        generate = self._generate_for(group.prompt, sample, sampling, run_seed, seed_name)
        trajectory = await self._played(group, sample, generate)
        if trajectory is None or not judge_now:
            return self._begun_judging(trajectory)
        return trajectory if await self._set_reward(trajectory) else None

    def parts(
        self, group: Group, num: int, sampling: Sampling, run_seed: int, seed_name: str, *, judge_now: bool = True
    ) -> list[AsyncIterator[tuple[int, Trajectory | None]]]:
        """`play` for `num` samples, in parts that may run at the same time: the whole group if it can be one request.

        Returns:
            Of each part an iterator of its samples, each with its trajectory, as they are done.
        """
        settings: Any = {"judge_now": judge_now}
        if self._plays_groups:
            return [self._play_group(group, num, sampling, run_seed, seed_name, **settings)]

        async def alone(sample: int) -> AsyncIterator[tuple[int, Trajectory | None]]:
            yield sample, await self.play(group, sample, sampling, run_seed, seed_name, **settings)

        return [alone(sample) for sample in range(num)]

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

    async def _play_group(
        self, group: Group, num: int, sampling: Sampling, run_seed: int, seed_name: str, *, judge_now: bool
    ) -> AsyncIterator[tuple[int, Trajectory | None]]:
        """`parts` with one request and one task."""
        steps: asyncio.Queue[tuple[int, asyncio.Future[Any]]] = asyncio.Queue()
        waits: list[asyncio.Future[Any]] = []
        played: dict[int, Trajectory] = {}  # by sample, while they are judged

        def follow(sample: int, step: asyncio.Future[Any]) -> None:
            waits.append(step)
            step.add_done_callback(lambda done: steps.put_nowait((sample, done)))

        try:
            samplings = [_drawn(sampling, sampling_seed(run_seed, seed_name, sample, 0)) for sample in range(num)]
            for sample, completion in enumerate(self._write_group(group.prompt, samplings, seed_name)):
                follow(sample, completion)
            while num:
                sample, step = await steps.get()
                if sample in played:
                    num -= 1
                    yield sample, played.pop(sample) if step.result() else None
                    continue
                trajectory = await self._played(group, sample, _generate_once(step, group.prompt))
                if trajectory is None or not judge_now:
                    num -= 1
                    yield sample, self._begun_judging(trajectory)
                else:
                    played[sample] = trajectory
                    follow(sample, self.tasks.spawn(self._set_reward(trajectory)))
        finally:
            self.tasks.give_up(step for step in waits if not step.done())
            for step in waits:  # an engine that fails tells each of them
                _ = step.cancelled() or (step.done() and step.exception())

    async def wait_for_rewards(self, groups: Sequence[Group], on_judged: Callable[[], None]) -> None:
        """Waits until all rewards of these groups are set, or for the first error; begins those that have not begun.

        A trajectory whose reward failed is removed from its group.

        Args:
            groups: each trajectory's `group_id` is its group's.
            on_judged: called for each trajectory.

        Raises:
            RolloutError: if too many failed.
        """
        tasks: dict[tuple[int, int], asyncio.Task[bool]] = {}
        for item in (item for group in groups for item in group.trajectories):
            key = (item.group_id, item.sample)
            if item.reward is not None:
                self._judgings.pop(key, None)
                on_judged()
                continue
            tasks[key] = self._judgings.get(key) or self._begin_judging(item)
            tasks[key].add_done_callback(lambda task: on_judged())
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what it raised
        for key, task in tasks.items():
            self._judgings.pop(key, None)
            self.tally.count_trajectory(is_failed=not task.result())
        self.tally.begin_iteration()
        for group in groups:
            group.trajectories = [item for item in group.trajectories if item.reward is not None]

    async def _set_reward(self, trajectory: Trajectory) -> bool:
        """Sets the reward; False if the trajectory was dropped. The judge keeps its own deadline."""
        try:
            with named_user_code(f"{type(self.judge).__name__}.score", error_type=RewardError):
                judgment = await self.judge.score(trajectory)
        except (RewardError, RolloutError) as error:
            self.tally.drop_failed(error, trajectory.prompt)
            return False
        judgment.apply_to(trajectory)
        return True

    def _begun_judging(self, trajectory: Trajectory | None) -> Trajectory | None:
        if trajectory is not None:
            self._begin_judging(trajectory)
        return trajectory

    def _begin_judging(self, trajectory: Trajectory) -> asyncio.Task[bool]:
        task = self.tasks.spawn(self._set_reward(trajectory))
        self._judgings[trajectory.group_id, trajectory.sample] = task
        return task

    async def _played(self, group: Group, sample: int, generate: Generate) -> Trajectory | None:
        """The workflow's trajectory; None if it was dropped."""
        try:
            trajectory = await self._run_workflow(group.prompt, generate)
        except (RewardError, RolloutError) as error:
            self.tally.drop_failed(error, group.prompt)
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

    async def _run_workflow(self, prompt: Prompt, generate: Generate) -> Trajectory:
        name = f"{type(self.workflow).__name__}.run"
        try:
            return check_trajectory(await self.workflow.run(prompt, generate), self.workflow, prompt)
        except LightRLError:
            raise
        except asyncio.CancelledError as error:
            if asyncio.current_task() in self.tasks.given_up:
                raise
            raise RolloutError(f"{name} let a cancellation of its own escape on prompt {prompt.id!r}.") from error
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise RolloutError(f"{name} raised {error!r} on prompt {prompt.id!r}.") from error

    def _generate_for(self, prompt: Prompt, sample: int, sampling: Sampling, run_seed: int, seed_name: str) -> Generate:
        """What the workflow calls for each turn."""
        turn = 0
        images: dict[str, Any] = {"images": prompt.images} if prompt.images else {}

        async def generate(token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
            nonlocal turn
            seed = sampling_seed(run_seed, seed_name, sample, turn)
            turn += 1
            drawn = _drawn(sampling, seed, max_new_tokens)
            completions = await self.engine.generate(token_ids, drawn, session=f"{seed_name}/{sample}", **images)
            return _checked(completions[0], turn - 1, prompt)

        return generate


def _drawn(sampling: Sampling, seed: int, max_new_tokens: int | None = None) -> Sampling:
    longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
    shortest = min(sampling.min_new_tokens, longest)
    return replace(sampling, seed=seed, max_new_tokens=longest, min_new_tokens=shortest)


def _checked(completion: Completion, turn: int, prompt: Prompt) -> Completion:
    if completion.finish_reason == "abort":
        raise RolloutError(f"The engine aborted turn {turn} of prompt {prompt.id!r}.")
    return completion


def _generate_once(written: asyncio.Future[Completion], prompt: Prompt) -> Generate:
    """What a workflow of one completion calls once this has been written."""

    async def generate(token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
        return _checked(written.result(), 0, prompt)

    return generate
