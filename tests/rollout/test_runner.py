"""One request and one task for a group: what comes of it is what one of each for every trajectory gives."""

import asyncio
import os
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_texts import chat_tokenizer
from local_rewards import LocalRewards
from test_controller import CONFIG, Numbers, iterate, load_version
from waits import comes_true, until
from worker_workflows import Words

from lightrl.concurrency.abandon import Tasks
from lightrl.engines.engine import Completion, check_request
from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import EngineError, RewardError, RolloutError
from lightrl.rewards import RewardResult
from lightrl.rollout import RolloutSettings
from lightrl.rollout.controller import RolloutController
from lightrl.rollout.runner import Rewards
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory
from lightrl.workflows import AgentWorkflow
from lightrl.workflows.agent_workflow.command import root_of
from lightrl.workflows.workflow import Generate, GroupGenerate, SingleTurn


class GroupEngine(FakeEngine):
    """Takes groups; each of their completions is a request of FakeEngine. `abort_samples` end as aborted."""

    def __init__(self, *, abort_samples: Sequence[int] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.abort_samples = abort_samples
        self.num_groups = 0

    def generate_group(self, token_ids, samplings, *, session, images=(), started=None):
        check_request(token_ids, samplings[0], len(samplings), vocab_size=CONFIG.vocab_size, max_context=64)
        self.num_groups += 1

        async def generate(sample: int, sampling: Sampling) -> Completion:
            (completion,) = await self.generate(token_ids, sampling, session=f"{session}/{sample}")
            if sample not in self.abort_samples:
                return completion
            return Completion(completion.token_ids, completion.logprobs, completion.weight_versions, "abort")

        return [asyncio.ensure_future(generate(*pair)) for pair in enumerate(samplings)]


class RunAlone(SingleTurn):
    """A user's workflow, which replaces `run` and knows nothing of groups."""

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        return await super().run(prompt, generate)


class SlowRewards(LocalRewards):
    """Rewards of the same request come in the reverse order."""

    async def compute(self, trajectory: Trajectory) -> RewardResult:
        await asyncio.sleep(0.01 * (3 - trajectory.sample))
        return await super().compute(trajectory)


@pytest.fixture(params=[LocalRewards, SlowRewards])
def make(request: pytest.FixtureRequest) -> Any:
    made: list[RolloutController] = []

    def factory(
        engine: FakeEngine, reward: Any = lambda trajectory: 1.0, workflow: Any = SingleTurn, **settings: Any
    ) -> RolloutController:
        engine.start(CONFIG)
        settings = {"group_size": 3, "groups_per_iteration": 2} | settings
        prompts = settings.pop("prompts", Numbers())
        controller = RolloutController(
            engine,
            workflow(Words()),
            request.param(reward),
            RolloutSettings(**settings),
            sampling=Sampling(max_new_tokens=4),
            run_seed=7,
            prompts=prompts,
        )
        made.append(controller)
        load_version(controller, 0)
        return controller

    yield factory
    for controller in made:
        controller.close()
        assert controller.engine.num_running == 0  # type: ignore[attr-defined]


def records(groups: list[Group]) -> list[Any]:
    return [group.state_dict() for group in groups]


@pytest.mark.parametrize("settings", [{}, {"defers_rewards": True}, {"max_staleness": 1}], ids=str)
def test_a_group_with_one_request_equals_one_of_single_requests(make: Any, settings: dict[str, Any]) -> None:
    iterations = []
    for workflow in (SingleTurn, RunAlone):
        engine = GroupEngine()
        controller = make(engine, lambda trajectory: float(sum(trajectory.completion_ids)), workflow, **settings)
        groups = []
        for version in (0, 1):
            groups += controller.take(version)
            if settings.get("defers_rewards"):
                controller.wait_for_rewards(groups[-2:])
            controller.commit()
            load_version(controller, version + 1)
        iterations.append(records(groups))
        assert bool(engine.num_groups) == (workflow is SingleTurn)
    assert iterations[0] == iterations[1]
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests)


def test_a_group_is_one_request(make: Any) -> None:
    engine = GroupEngine()
    iterate(make(engine), 0)
    assert (engine.num_groups, len(engine.requests)) == (2, 6)


def test_a_reward_is_computed_while_others_of_its_group_are_generated(make: Any) -> None:
    rewarded: list[tuple[int, int]] = []

    def reward(trajectory: Trajectory) -> float:
        rewarded.append((trajectory.group_id, trajectory.sample))
        return 1.0

    make(GroupEngine(hang_requests=[1]), reward, groups_per_iteration=1, max_staleness=1)
    assert comes_true(lambda: {(0, 0), (0, 2)} <= set(rewarded))
    assert (0, 1) not in rewarded


def test_one_failure_drops_one_trajectory(make: Any) -> None:
    def reward(trajectory: Trajectory) -> float:
        if trajectory.sample == 2:
            raise RewardError("no")
        return 1.0

    controller = make(GroupEngine(abort_samples=[0]), reward, max_failed_fraction=1.0)
    groups = controller.take(0)
    assert [[item.sample for item in group.trajectories] for group in groups] == [[1], [1]]
    messages = sorted(drop.message for drop in controller.drain_drops())
    assert messages[:2] == ["The engine aborted turn 0 of prompt 'p0'.", "The engine aborted turn 0 of prompt 'p1'."]
    assert messages[2:] == ["no", "no"]


@pytest.mark.parametrize("make", [LocalRewards], indirect=True)
def test_rewards_of_what_is_given_up_are_cancelled(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[asyncio.Future[RewardResult]] = []

    def never(rewards: LocalRewards, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        started.extend(asyncio.get_running_loop().create_future() for _ in trajectories)
        return started[-len(trajectories) :]

    monkeypatch.setattr(LocalRewards, "compute_rewards", never)
    controller = make(GroupEngine(), rollout_timeout_s=2)
    with pytest.raises(RolloutError, match="no trajectory finished"):
        controller.take(0)
    controller.close()
    assert started
    assert all(reward.cancelled() for reward in started)


def test_rewards_of_what_arrives_together_are_one_request(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    compute_rewards = LocalRewards.compute_rewards

    def counted(rewards: LocalRewards, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        sizes.append(len(trajectories))
        return compute_rewards(rewards, trajectories)

    monkeypatch.setattr(LocalRewards, "compute_rewards", counted)
    make(GroupEngine(), groups_per_iteration=1).take(0)
    assert sizes == [3]


class HalfDone(SingleTurn):
    """Yields what `yielded` says for each sample, and then raises."""

    yielded: Sequence[Any] = ()

    async def run_group(self, prompt: Prompt, generate: GroupGenerate) -> AsyncGenerator[Any, None]:
        for sample, result in enumerate(self.yielded):
            done = self.trajectory_of(prompt, await generate.for_sample(sample)([1])) if result is None else result
            yield sample, done
        raise KeyError("no such tool")


@pytest.mark.parametrize(
    ("results", "messages"),
    [
        ([None, None], ["HalfDone.run_group raised KeyError('no such tool') on prompt 'p0'."]),
        ([None, RolloutError("its own")], ["its own", "HalfDone.run_group raised KeyError('no such tool') on prompt"]),
        ([None, "nonsense", None], ["must return a Trajectory, got 'nonsense' for prompt 'p0'."]),
        ([None, None, None, None], []),
    ],
    ids=["a missing sample", "an error that is yielded", "no trajectory", "one too many"],
)
def test_what_a_group_does_not_yield_is_dropped_by_name(make: Any, results: list[Any], messages: list[str]) -> None:
    workflow = type("HalfDone", (HalfDone,), {"yielded": results})
    controller = make(FakeEngine(), workflow=workflow, groups_per_iteration=1, max_failed_fraction=1.0)
    (group,) = controller.take(0)
    assert [item.sample for item in group.trajectories] == [
        sample for sample, result in enumerate(results[:3]) if result is None
    ]
    for drop, message in zip(controller.drain_drops(), messages, strict=True):
        assert message in drop.message


def test_a_prompt_that_the_engine_refuses_drops_its_trajectories_alone(make: Any) -> None:
    class Wrong(Numbers):
        def __getitem__(self, position: int) -> Prompt:
            return Prompt(id=f"p{position}", token_ids=[10_000 if position == 0 else position])

    controller = make(GroupEngine(), prompts=Wrong(), max_failed_fraction=1.0)
    assert 0 not in [group.id for group in controller.take(0) if group.trajectories]
    assert {"outside the model's vocabulary" in drop.message for drop in controller.drain_drops()} == {True}


def test_an_engine_that_fails_ends_the_run(make: Any) -> None:
    controller = make(GroupEngine(fail_requests=[4]))
    with pytest.raises(EngineError, match="fails request 4"):
        controller.take(0)


@pytest.mark.parametrize("engine", [FakeEngine, GroupEngine])
def test_an_engine_whose_fields_differ_in_length_ends_the_run_by_name(engine: Any, make: Any) -> None:
    class Short(engine):  # type: ignore[misc]
        async def generate(self, *args: Any, **kwargs: Any) -> list[Completion]:
            (completion,) = await super().generate(*args, **kwargs)
            return [replace(completion, logprobs=completion.logprobs[:-1])]

    with pytest.raises(
        EngineError, match=r"(\d+) token ids?, \d+ logprobs? and \1 weight versions? for turn 0 of prompt"
    ):
        make(Short()).take(0)


def test_a_reward_that_comes_after_its_trajectory_was_given_up_sets_nothing() -> None:
    async def main() -> tuple[list[str], bool]:
        loop, problems = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: problems.append(context["message"]))
        computing: list[asyncio.Future[RewardResult]] = [loop.create_future()]
        worker: Any = SimpleNamespace(compute_rewards=lambda trajectories: computing)
        drops: Any = SimpleNamespace()
        rewards = Rewards(worker, drops, Tasks(), SingleTurn(Words()))
        prompt = Prompt("a", token_ids=[1])
        trajectory = Trajectory(prompt, 0, 0, [1, 2], [False, True], [0.0, -1.0], [-1, 0], [2], "2")
        is_kept = rewards.compute(trajectory)
        await asyncio.sleep(0.01)  # the request is sent
        is_kept.cancel()  # as the end of its group does, in the tick in which the reward comes
        computing[0].set_result(RewardResult(1.0))
        await asyncio.sleep(0.01)
        return problems, trajectory.reward is None

    assert asyncio.run(main()) == ([], True)


def test_a_workspace_lasts_until_its_reward_is_there_or_given_up(tmp_path: Path) -> None:
    root = Path(root_of(os.getpid()))

    async def main() -> tuple[list[bool], list[str]]:
        reasons: list[str] = []
        computing: list[asyncio.Future[RewardResult]] = [asyncio.get_running_loop().create_future() for _ in range(4)]
        worker: Any = SimpleNamespace(compute_rewards=lambda trajectories: computing[: len(trajectories)])
        drops: Any = SimpleNamespace(drop_failed=lambda error, prompt: reasons.append(str(error)))
        workflow = AgentWorkflow(chat_tokenizer(), len)  # type: ignore[arg-type]
        rewards = Rewards(worker, drops, Tasks(), workflow)
        made = []
        for name in ("set", "failed", "of another", "given up", "given up at once"):
            one = Trajectory(Prompt(name, token_ids=[1]), 0, 0, [1, 2], [False, True], [0.0, -1.0], [-1, 0], [2], "2")
            folder = (tmp_path if name == "of another" else root) / name / "work"
            folder.mkdir(parents=True)
            one.workspace = str(folder)
            made.append(one)
        kept = [rewards.compute(one) for one in made]
        rewards.cancel([kept[4]])
        await until(lambda: not (root / "given up at once").exists())
        assert all((root / name).is_dir() for name in ("set", "failed", "given up"))
        computing[0].set_result(RewardResult(1.0))
        computing[1].set_exception(RewardError("no"))
        computing[2].set_result(RewardResult(1.0))
        rewards.cancel([kept[3]])
        await until(lambda: not list(root.iterdir()))
        return [future.result() for future in kept[:3]], reasons

    assert asyncio.run(main()) == ([True, False, True], ["no"])
    assert (tmp_path / "of another" / "work").is_dir()  # a path that only a file names is not deleted
