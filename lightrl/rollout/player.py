"""Player: plays one trajectory of a workflow and judges it; a failure of user code becomes a drop with a reason."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import LightRLError, RewardError, RolloutError, user_code
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import DropTally
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.workflow import Generate, Workflow, check_trajectory


class Player:
    """Belongs to the controller's event loop. What is dropped is reported to the tally; an EngineError is raised.

    Args:
        engine, judge: have been started.
        workflow: maps a prompt to a trajectory.
        tally: counts what is dropped.
        spawn: starts a task whose error ends the run.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        workflow: Workflow,
        judge: Judge,
        tally: DropTally,
        spawn: Callable[[Coroutine[Any, Any, bool]], asyncio.Task[bool]],
    ) -> None:
        self._engine = engine
        self._workflow = workflow
        self._judge = judge
        self._tally = tally
        self._spawn = spawn
        self._given_up: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        self._judgings: dict[tuple[int, int], asyncio.Task[bool]] = {}  # by group and sample, until they are awaited

    def give_up(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancels these tasks; their trajectories are not failures."""
        for task in tasks:
            self._given_up.add(task)
            task.cancel()

    def was_given_up(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._given_up

    async def play(
        self, group: Group, sample: int, sampling: Sampling, *, run_seed: int, seed_name: str
    ) -> Trajectory | None:
        """One interaction of the workflow with the engine, without reward; None if it was dropped.

        Waits for the workflow, without a deadline of its own. A cancellation by `give_up` passes through.

        Args:
            sampling: of every turn; the seed is set here.
            run_seed, seed_name: with sample and turn they fix every draw.

        Raises:
            EngineError: from the engine.
        """
        prompt = group.prompt
        generate = self._generate_for(prompt, sample, sampling, run_seed, seed_name)
        try:
            trajectory = await self._run_workflow(prompt, generate)
        except (RewardError, RolloutError) as error:
            self._tally.drop_failed(error, prompt)
            return None
        trajectory.group_id, trajectory.sample = group.id, sample
        return trajectory

    async def play_and_judge(
        self, group: Group, sample: int, sampling: Sampling, *, run_seed: int, seed_name: str
    ) -> Trajectory | None:
        """As `play`, with the reward."""
        trajectory = await self.play(group, sample, sampling, run_seed=run_seed, seed_name=seed_name)
        return trajectory if trajectory is not None and await self.judge(trajectory) else None

    async def judge(self, trajectory: Trajectory) -> bool:
        """Sets the reward; False if the trajectory was dropped. Waits for the judge, which keeps its own deadline."""
        try:
            with user_code(f"{type(self._judge).__name__}.score", error_type=RewardError):
                judgment = await self._judge.score(trajectory)
        except (RewardError, RolloutError) as error:
            self._tally.drop_failed(error, trajectory.prompt)
            return False
        judgment.apply_to(trajectory)
        return True

    def begin_judging(self, trajectory: Trajectory) -> asyncio.Task[bool]:
        """As `judge`, in a task of its own, for `wait_for_rewards`."""
        task = self._spawn(self.judge(trajectory))
        self._judgings[trajectory.group_id, trajectory.sample] = task
        return task

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
            tasks[key] = self._judgings.get(key) or self.begin_judging(item)
            tasks[key].add_done_callback(lambda task: on_judged())
        if not tasks:
            return
        done, _ = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()  # raises what it raised
        for key, task in tasks.items():
            self._judgings.pop(key, None)
            self._tally.count_trajectory(is_failed=not task.result())
        self._tally.begin_iteration()
        for group in groups:
            group.trajectories = [item for item in group.trajectories if item.reward is not None]

    async def _run_workflow(self, prompt: Prompt, generate: Generate) -> Trajectory:
        name = f"{type(self._workflow).__name__}.run"
        try:
            return check_trajectory(await self._workflow.run(prompt, generate), self._workflow, prompt)
        except LightRLError:
            raise
        except asyncio.CancelledError as error:
            if self.was_given_up(asyncio.current_task()):
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
            longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
            shortest = min(sampling.min_new_tokens, longest)
            drawn = replace(sampling, seed=seed, max_new_tokens=longest, min_new_tokens=shortest)
            completions = await self._engine.generate(token_ids, drawn, session=f"{seed_name}/{sample}", **images)
            if completions[0].finish_reason == "abort":
                raise RolloutError(f"The engine aborted turn {turn - 1} of prompt {prompt.id!r}.")
            return completions[0]

        return generate
