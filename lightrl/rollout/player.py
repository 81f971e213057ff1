"""Player: plays the trajectories of a workflow and judges them; a failure of user code becomes a drop with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightrl.checks.user_code import named_user_code
from lightrl.engines.abilities import ContinuesCompletions
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError, LightRLError, RewardError, RolloutError
from lightrl.rewards import Judge
from lightrl.rollout.drop_tally import DropTally
from lightrl.rollout.tasks import Tasks
from lightrl.rollout.written import Written
from lightrl.trace import span
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.workflows.own_time import OwnTime
from lightrl.workflows.workflow import Generate, Workflow, check_trajectory


@dataclass(eq=False)
class Interactions:
    """Runs of a workflow, in which an engine generates. Belongs to one event loop."""

    engine: RolloutEngine  # has been started
    workflow: Workflow
    tasks: Tasks
    written: Written = field(default_factory=Written, init=False)

    async def interact(
        self, prompt: Prompt, sample: int, sampling: Sampling, run_seed: int, seed_name: str
    ) -> Trajectory:
        """One run of the workflow, not judged; a RolloutError or RewardError drops it, an EngineError ends the run."""
        own_time = OwnTime(self.workflow.own_timeout_s)
        generate = self._generate_for(prompt, sample, sampling, run_seed, seed_name, own_time)
        return await self._run_workflow(prompt, generate, own_time)

    async def _run_workflow(self, prompt: Prompt, generate: Generate, own_time: OwnTime) -> Trajectory:
        name = f"{type(self.workflow).__name__}.run"
        own_timeout_s = own_time.timeout_s
        try:
            with own_time:
                trajectory = await self.workflow.run(prompt, generate)
            return check_trajectory(trajectory, self.workflow, prompt)
        except LightRLError:
            raise
        except asyncio.CancelledError as error:
            if asyncio.current_task() in self.tasks.given_up:
                raise
            if own_time.is_over:
                raise RolloutError(
                    f"{name} spent own_timeout_s={own_timeout_s:g} outside of generate on prompt {prompt.id!r}. Give "
                    "what it awaits a deadline, or increase the attribute own_timeout_s of the class."
                ) from error
            raise RolloutError(f"{name} let a cancellation of its own escape on prompt {prompt.id!r}.") from error
        except (Exception, SystemExit) as error:  # user code may raise anything
            raise RolloutError(f"{name} raised {error!r} on prompt {prompt.id!r}.") from error

    def _generate_for(
        self, prompt: Prompt, sample: int, sampling: Sampling, run_seed: int, seed_name: str, own_time: OwnTime
    ) -> Generate:
        """What the workflow calls for each turn."""
        turn = 0
        session = f"{seed_name}/{sample}"
        log = self.written.turn_log(self.workflow, seed_name, session)
        images: dict[str, Any] = {"images": prompt.images} if prompt.images else {}

        async def generate(token_ids: list[int], *, max_new_tokens: int | None = None) -> Completion:
            nonlocal turn
            seed = sampling_seed(run_seed, seed_name, sample, turn)
            turn += 1
            asked = drawn(sampling, seed, max_new_tokens)
            written = self.written.completions(seed_name)
            written[seed] = None
            if log is not None and turn <= len(log.completions):
                completion = log.completions[turn - 1]
            else:
                with (
                    own_time.generating(),
                    span("generate", "generate", "generations", session=session, prompt=len(token_ids)),
                ):
                    completion = await self._write(token_ids, asked, session=session, **images)
                if log is not None and log.journal is not None:
                    await log.journal.add(session, completion=completion.state_dict())
            written[seed] = completion
            return checked(completion, asked, turn - 1, prompt)

        if log is not None:
            vars(generate)["log"] = log
        return generate

    async def _write(self, token_ids: list[int], sampling: Sampling, **of_request: Any) -> Completion:
        """The engine's completion, or the rest of one that was begun before a resume."""
        written = self.written.begun.pop(sampling.seed, None)
        if written is not None and written.finish_reason != "abort":
            return written
        if written is not None and isinstance(self.engine, ContinuesCompletions):
            of_request["written"] = written
        completions = await self.engine.generate(token_ids, sampling, **of_request)
        return completions[0]


@dataclass(eq=False)
class Player(Interactions):
    """Belongs to the controller's event loop. A failure drops the trajectory; only an EngineError is raised."""

    judge: Judge = field(kw_only=True)  # has been started
    tally: DropTally = field(kw_only=True)  # counts what is dropped
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
        try:
            trajectory = await self.interact(group.prompt, sample, sampling, run_seed, seed_name)
        except (RewardError, RolloutError) as error:
            self.tally.drop_failed(error, group.prompt)
            return None
        trajectory.group_id, trajectory.sample = group.id, sample
        if not judge_now:
            return self._begun_judging(trajectory)
        return trajectory if await self._set_reward(trajectory) else None

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
            judge = type(self.judge).__name__
            with span("reward", "reward", "rewards"), named_user_code(f"{judge}.score", error_type=RewardError):
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


def drawn(sampling: Sampling, seed: int, max_new_tokens: int | None = None) -> Sampling:
    longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
    shortest = min(sampling.min_new_tokens, longest)
    return replace(sampling, seed=seed, max_new_tokens=longest, min_new_tokens=shortest)


def checked(completion: Completion, sampling: Sampling, turn: int, prompt: Prompt) -> Completion:
    lengths = [len(values) for values in (completion.token_ids, completion.logprobs, completion.weight_versions)]
    if len(set(lengths)) > 1:
        raise EngineError(
            f"The engine returned {lengths[0]} token ids, {lengths[1]} logprobs and {lengths[2]} weight versions for "
            f"turn {turn} of prompt {prompt.id!r}. Each token needs one of each."
        )
    if sampling.is_truncated and completion.supports is None:
        raise EngineError(
            f"The engine returned no supports, but top_p={sampling.top_p:g} and top_k={sampling.top_k} truncate its "
            "draws: the trainer's logprobs would be wrong. Set top_p to 1 and top_k to -1, or return "
            "Completion.supports (functional.encode_supports)."
        )
    if completion.finish_reason == "abort":
        raise RolloutError(f"The engine aborted turn {turn} of prompt {prompt.id!r}.")
    return completion
