"""RolloutController through its public door, with FakeEngine: order, staleness, failures, resume, cancellation."""

import asyncio
import io
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from local_rewards import LocalRewards
from transformers import Qwen3Config
from waits import comes_true
from worker_workflows import Words

from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import EngineError, RewardError, RolloutError, WeightSyncError
from lightrl.rollout import RolloutSettings
from lightrl.rollout.controller import RolloutController, Wait
from lightrl.rollout.prompts import Prompts
from lightrl.trajectory import Group, Prompt, Sampling, Trajectory, sampling_seed
from lightrl.weights import bucketed
from lightrl.workflows.workflow import Generate, SingleTurn, Workflow

SAMPLING = Sampling(max_new_tokens=4)
CONFIG = Qwen3Config(
    vocab_size=997, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
    num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
)  # fmt: skip
Make = Callable[..., RolloutController]


class Numbers(Prompts):
    """The prompt at position k has the one token k."""

    def __getitem__(self, position: int) -> Prompt:
        return Prompt(id=f"p{position}", token_ids=[position])


class Doing(Workflow):
    """SingleTurn after a coroutine of the test, which may wait, raise, or return something else instead."""

    def __init__(self, before: Callable[[Prompt, Generate], Coroutine[Any, Any, Any]]) -> None:
        self.before = before

    async def run(self, prompt: Prompt, generate: Generate) -> Trajectory:
        result = await self.before(prompt, generate)
        return result if result is not None else await single_turn().run(prompt, generate)


def single_turn() -> SingleTurn:
    return SingleTurn(Words())  # type: ignore[arg-type]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Makes controllers with weight version 0 loaded; in the end none has left anything behind."""
    made: list[RolloutController] = []

    def factory(engine: Any = None, *, load: bool = True, reward: Any = lambda trajectory: 1.0, **kwargs: Any) -> Any:
        engine = engine or FakeEngine()
        engine.start(CONFIG)
        arguments: dict[str, Any] = {"sampling": SAMPLING, "prompts": Numbers(), "groups_per_iteration": 2} | kwargs
        workflow = arguments.pop("workflow", None) or single_turn()
        plain = {name: arguments.pop(name) for name in ("sampling", "prompts", "run_seed") if name in arguments}
        rewards = LocalRewards(lambda trajectory: {"reward": reward(trajectory), "seen": 1.0})
        controller = RolloutController(engine, workflow, rewards, RolloutSettings(**arguments), **plain)
        made.append(controller)
        if load:
            load_version(controller, 0)
        return controller

    yield factory
    for controller in made:
        controller.close()
        assert controller.engine.num_running == 0  # type: ignore[attr-defined]
    assert "lightrl-rollout" not in {thread.name for thread in threading.enumerate()}
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


def load_version(controller: RolloutController, version: int) -> None:
    controller.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=version)


def iterate(controller: RolloutController, version: int) -> list[Group]:
    """One iteration: take, train, commit, sync."""
    groups = controller.take(version)
    controller.commit()
    load_version(controller, version + 1)
    return groups


def ids(groups: list[Group]) -> list[int]:
    return [group.id for group in groups]


def uneven(prompt: list[int], sampling: Sampling) -> float:
    return 0.0005 * (1 + prompt[0] * 7 % 5)


def test_on_policy_requests_come_in_one_batch_of_prompts_and_samples(make: Make) -> None:
    controller = make(FakeEngine(seconds_per_token=uneven), group_size=3, groups_per_iteration=4)
    groups = controller.take(0)
    assert [request.token_ids[0] for request in controller.engine.requests] == [k for k in range(4) for _ in range(3)]
    seeds = [sampling_seed(0, f"{k}:p{k}", sample, 0) for k in range(4) for sample in range(3)]
    assert [request.sampling.seed for request in controller.engine.requests] == seeds
    assert ids(groups) == [0, 1, 2, 3]
    assert [(item.group_id, item.sample) for group in groups for item in group.trajectories] == [
        (k, sample) for k in range(4) for sample in range(3)
    ]


def test_the_same_run_gives_the_same_trajectories_whatever_finishes_first(make: Make) -> None:
    runs = []
    for pace in (0.0, uneven):
        controller = make(FakeEngine(seconds_per_token=pace), group_size=2, run_seed=5)
        runs.append([iterate(controller, version) for version in range(3)])
    assert runs[0] == runs[1]
    other = make(group_size=2, run_seed=6).take(0)
    assert other[0].trajectories[0].token_ids != runs[0][0][0].trajectories[0].token_ids


def test_on_policy_nothing_starts_before_a_batch_is_waited_for(make: Make) -> None:
    controller = make()
    load_version(controller, 0)
    assert controller.progress()["running_groups"] == len(controller.engine.requests) == 0
    iterate(controller, 0)
    controller.state_dict()  # the event loop has handled all that came before
    assert len(controller.engine.requests) == 2


class PausingScript(list[int]):
    """Pauses the engine when its first token is sampled."""

    def __init__(self, engine: FakeEngine, paused: threading.Event) -> None:
        super().__init__([5, 6, 7, 8])
        self.engine, self.paused = engine, paused

    def __getitem__(self, index: Any) -> Any:
        if not self.paused.is_set():
            self.pausing = asyncio.ensure_future(self.engine.pause())
            self.pausing.add_done_callback(lambda done: self.paused.set())
        return super().__getitem__(index)


def test_a_sync_in_the_middle_of_a_generation_gives_two_versions_that_never_decrease(make: Make) -> None:
    paused = threading.Event()
    engine = FakeEngine(seconds_per_token=lambda prompt, sampling: 0.01 if prompt[0] == 2 else 0.0)
    engine.script = lambda prompt, sampling, sample: PausingScript(engine, paused) if prompt[0] == 2 else [9]
    controller = make(engine, max_staleness=1)
    assert ids(controller.take(0)) == [0, 1]
    paused.wait(600)
    controller.commit()
    load_version(controller, 1)
    asyncio.run(engine.resume())
    groups = controller.take(1)
    assert [group.trajectories[0].weight_versions for group in groups] == [[-1, 0, 1, 1, 1], [-1, 0]]
    assert [group.oldest_version for group in groups] == [0, 0]


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_every_token_keeps_the_bound_with_a_straggler_thirty_times_slower(make: Make, max_staleness: int) -> None:
    def pace(prompt: list[int], sampling: Sampling) -> float:
        return 0.0004 * (30 if prompt[0] % 10 == 7 else 1)

    controller = make(FakeEngine(seconds_per_token=pace), max_staleness=max_staleness, groups_per_iteration=3)
    seen: list[int] = []
    for version in range(15):
        groups = iterate(controller, version)
        assert ids(groups) == sorted(ids(groups))
        seen += ids(groups)
        tokens = [token for group in groups for item in group.trajectories for token in item.weight_versions[1:]]
        assert version - max_staleness <= min(tokens) <= max(tokens) <= version
    assert len(seen) == len(set(seen)) == 45


def test_groups_complete_in_any_order_and_are_taken_in_that_of_the_stream(make: Make) -> None:
    gates = {position: threading.Event() for position in range(6)}

    async def gate(prompt: Prompt, generate: Generate) -> None:
        while not gates.get(prompt.token_ids[0], gates[0]).is_set():  # type: ignore[index]
            await asyncio.sleep(0.001)

    controller = make(workflow=Doing(gate), max_staleness=2)
    for position in (5, 3, 1, 2, 4):
        gates[position].set()
    assert comes_true(lambda: controller.progress()["finished_groups"] == 5)
    seen: list[int] = []

    def look(done: int, total: int) -> None:
        if done == 1:  # of this batch, although five groups are done
            seen.append(controller.progress()["stragglers"])
            gates[0].set()

    assert ids(controller.take(0, on_wait=look)) == [0, 1]
    assert seen[0] == 1
    assert controller.progress()["stragglers"] == 0
    assert controller.progress()["straggler_wait_s"] > 0
    controller.commit()
    assert ids(controller.take(0)) == [2, 3]
    assert controller.progress()["straggler_wait_s"] == 0


def test_no_prompt_starts_beyond_what_the_run_needs(make: Make) -> None:
    controller = make(max_staleness=4, total_groups=6, reward=fails_for({3}), max_failed_fraction=1.0)
    seen = [position for version in range(3) for position in ids(iterate(controller, version))]
    assert sorted(seen) == [0, 1, 2, 4, 5, 6]
    controller.state_dict()
    assert controller.progress()["next_position"] == 7  # 6 and one for the dropped one
    assert len(controller.engine.requests) == 7


def fails_for(positions: set[int], reason: str = "raised") -> Callable[[Trajectory], float]:
    def reward(trajectory: Trajectory) -> float:
        if trajectory.token_ids[0] in positions:
            raise RewardError(f"no reward for {trajectory.token_ids[0]}", reason=reason)
        return 1.0

    return reward


@pytest.mark.parametrize("reason", ["raised", "not_finite", "timeout", "killed"])
def test_a_failed_reward_drops_its_trajectory_with_the_reason_and_is_never_zero(make: Make, reason: str) -> None:
    def reward(trajectory: Trajectory) -> float:
        return fails_for({0}, reason)(trajectory) if trajectory.sample == 1 else 1.0

    controller = make(reward=reward, group_size=3)
    groups = controller.take(0)
    assert [item.sample for item in groups[0].trajectories] == [0, 2]
    assert {item.reward for group in groups for item in group.trajectories} == {1.0}
    assert groups[0].trajectories[0].metrics == {"seen": 1.0}
    (drop,) = controller.drain_drops()
    assert (drop.reason, drop.message, drop.prompt_id) == (f"reward_{reason}", "no reward for 0", "p0")
    assert controller.drain_drops() == []


async def raises(prompt: Prompt, generate: Generate) -> None:
    raise KeyError("no such tool")


async def exits(prompt: Prompt, generate: Generate) -> None:
    raise SystemExit(3)


async def gives_up(prompt: Prompt, generate: Generate) -> None:
    raise RolloutError("the environment is gone")


async def cancels_itself(prompt: Prompt, generate: Generate) -> None:
    task = asyncio.ensure_future(asyncio.sleep(9))
    task.cancel()
    await task


async def returns_nonsense(prompt: Prompt, generate: Generate) -> str:
    return "nonsense"


async def asks_too_much(prompt: Prompt, generate: Generate) -> None:
    await generate([1] * 100)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (raises, "Doing.run raised KeyError"),
        (exits, "Doing.run raised SystemExit"),
        (gives_up, "the environment is gone"),
        (cancels_itself, "although nobody cancelled it"),
        (returns_nonsense, "must return a Trajectory, got 'nonsense'"),
        (asks_too_much, "exceed the context"),
    ],
)
def test_a_failed_workflow_drops_its_trajectory_and_the_run_continues(make: Make, before: Any, message: str) -> None:
    async def first_only(prompt: Prompt, generate: Generate) -> Any:
        return await before(prompt, generate) if prompt.id == "p0" else None

    controller = make(workflow=Doing(first_only))
    assert ids(controller.take(0)) == [1, 2]
    (drop,) = controller.drain_drops()
    assert drop.reason == "rollout"
    assert message in drop.message


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_groups_without_a_trajectory_are_replaced_by_new_prompts(make: Make, max_staleness: int) -> None:
    controller = make(reward=fails_for({1, 2, 5}), max_staleness=max_staleness, max_failed_fraction=1.0, group_size=2)
    seen = [ids(iterate(controller, version)) for version in range(3)]
    assert sorted(position for taken in seen for position in taken) == [0, 3, 4, 6, 7, 8]
    assert len(controller.drain_drops()) == 6


def test_dropped_groups_are_replaced_while_nobody_takes(make: Make) -> None:
    controller = make(reward=fails_for({1, 2}), max_staleness=1, max_failed_fraction=1.0)
    assert comes_true(lambda: controller.progress()["finished_groups"] == 4)
    assert controller.progress()["next_position"] == 6


def test_too_many_failures_end_the_run_with_the_last_reason(make: Make) -> None:
    controller = make(reward=fails_for(set(range(100)), "timeout"), groups_per_iteration=4, max_failed_fraction=0.25)
    with pytest.raises(
        RolloutError, match=r"2 of 4 trajectories failed .*max_failed_fraction=0.25.*reward_timeout.*no reward for"
    ):
        controller.take(0)


def test_failures_are_counted_for_each_iteration_alone(make: Make) -> None:
    controller = make(reward=fails_for({1, 5, 9}), groups_per_iteration=3, max_failed_fraction=0.4)
    assert [ids(iterate(controller, version)) for version in range(3)] == [[0, 2, 3], [4, 6, 7], [8, 10, 11]]


def test_a_group_in_which_the_policy_wrote_nothing_does_not_hold_the_others_up(make: Make) -> None:
    async def silent(prompt: Prompt, generate: Generate) -> Trajectory | None:
        if prompt.token_ids is None or prompt.token_ids[0] % 3:
            return None
        return Trajectory(prompt, -1, -1, [prompt.token_ids[0]], [False], [0.0], [-1], [], "")

    controller = make(workflow=Doing(silent), max_staleness=1)
    seen = [position for version in range(6) for position in ids(iterate(controller, version))]
    assert len(seen) == len(set(seen)) == 12


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_engine_error_reaches_take_at_once(make: Make, max_staleness: int) -> None:
    hanging = {0, 1, 2}
    controller = make(FakeEngine(fail_requests={3}, hang_requests=hanging), group_size=2, max_staleness=max_staleness)
    with pytest.raises(EngineError, match="request 3"):
        controller.take(0)
    with pytest.raises(EngineError, match="request 3"):
        controller.take(0)


def test_an_expired_wait_names_who_waits_for_whom(make: Make) -> None:
    controller = make(FakeEngine(hang_requests={1, 2}), groups_per_iteration=3, rollout_timeout_s=1.0)
    expected = r"weight version 0 waited for groups 1, 2, .*rollout_timeout_s=1.*'running_groups': 2"
    with pytest.raises(RolloutError, match=expected):
        controller.take(0)
    assert controller.state_dict()["in_flight"] == [1, 2]


def test_a_blocked_event_loop_is_found_with_the_line_that_blocks_it(make: Make) -> None:
    released = threading.Event()

    async def block(prompt: Prompt, generate: Generate) -> None:
        released.wait(600)

    controller = make(workflow=Doing(block), loop_timeout_s=2)
    with pytest.raises(RolloutError, match=r"did not answer for loop_timeout_s=2.*threading.py"):
        controller.take(0)
    with pytest.raises(RolloutError, match="Use await"):
        controller.state_dict()
    released.set()


def test_a_stray_task_that_exits_ends_the_run_not_the_event_loop(make: Make) -> None:
    async def leave() -> None:
        raise SystemExit(1)

    async def stray(prompt: Prompt, generate: Generate) -> None:
        task = asyncio.ensure_future(leave())
        task.add_done_callback(lambda done: done.exception())
        await asyncio.sleep(20)

    controller = make(workflow=Doing(stray))
    with pytest.raises(RolloutError, match="SystemExit"):
        controller.take(0)


def test_a_prompt_that_cannot_be_read_ends_the_run_and_is_not_lost(make: Make) -> None:
    class Broken(Numbers):
        def __getitem__(self, position: int) -> Prompt:
            if position == 3:
                raise OSError("disk")
            return super().__getitem__(position)

    controller = make(prompts=Broken())
    iterate(controller, 0)
    with pytest.raises(RolloutError, match=r"Prompt 3 .*disk"):
        controller.take(1)
    assert controller.state_dict()["next_position"] == 2


def test_an_engine_whose_pause_fails_ends_the_run(make: Make) -> None:
    class Unpausable(FakeEngine):
        async def pause(self) -> None:
            raise EngineError("no pause")

    with pytest.raises(EngineError, match="no pause"):
        make(Unpausable()).take(0)


def test_missing_or_too_old_weights_are_an_error_at_once(make: Make) -> None:
    controller = make(load=False, max_staleness=1)
    with pytest.raises(RolloutError, match=r"serves weight version -1 \(-1 means none\), and the trainer is at 0"):
        controller.take(0)
    load_version(controller, 0)
    with pytest.raises(RolloutError, match=r"serves weight version 0 .*, and the trainer is at 2"):
        controller.take(2)
    controller.take(0)
    controller.commit()
    assert len(controller.take(1)) == 2  # synced every second iteration, say


def test_a_failed_load_leaves_the_old_weights_and_the_rollouts_as_they_were(make: Make) -> None:
    controller = make(FakeEngine(fail_loads={1}))
    controller.take(0)
    with pytest.raises(WeightSyncError, match="version 1"):
        load_version(controller, 1)
    assert ids(controller.take(0)) == [0, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("group_size", 0), ("groups_per_iteration", 0), ("max_staleness", -1), ("max_concurrent", 0),
        ("rollout_timeout_s", 0), ("loop_timeout_s", float("inf")), ("max_failed_fraction", 1.5),
    ],
)  # fmt: skip
def test_settings_out_of_bounds_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        RolloutSettings(**{name: value})  # type: ignore[arg-type]


def test_an_unknown_way_to_treat_incomplete_groups_is_refused() -> None:
    with pytest.raises(ValueError, match=r"incomplete_groups must be train, resample or drop, got 'redraw'"):
        RolloutSettings(incomplete_groups="redraw")  # type: ignore[arg-type]


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    assert json.loads(json.dumps(state)) == state
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    assert loaded == state
    return loaded


def interrupt(done: int, total: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("point", ["committed", "synced", "rolling out", "taken"])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_nothing_is_lost_or_trained_on_twice_after_a_stop_anywhere(make: Make, max_staleness: int, point: str) -> None:
    state = None
    trained: list[int] = []
    interrupted: list[int] = []
    for version in range(6):
        engine = FakeEngine(seconds_per_token=uneven)
        controller = make(engine, load=False, max_staleness=max_staleness, groups_per_iteration=3, total_groups=18)
        if state is not None:
            controller.load_state_dict(state)
        load_version(controller, version)
        groups = controller.take(version)
        assert all(group.oldest_version >= version - max_staleness for group in groups)
        controller.commit()
        trained += ids(groups)
        if point != "committed":
            load_version(controller, version + 1)
        if point == "rolling out" and version < 5:
            engine.seconds_per_token = 0.2
            try:
                controller.take(version + 1, on_wait=interrupt)
            except KeyboardInterrupt:  # raised if there is something to wait for, as on-policy there is
                interrupted.append(version)
        if point == "taken" and version < 5:
            controller.take(version + 1)
        state = through_disk(controller.state_dict())
        controller.close()
    assert sorted(trained) == list(range(18))
    assert interrupted == list(range(5)) or max_staleness or point != "rolling out"


def test_a_resume_with_another_number_of_groups_per_iteration_continues(make: Make) -> None:
    first = make(groups_per_iteration=2)
    for version in range(3):
        iterate(first, version)
    second = make(load=False, groups_per_iteration=5)
    second.load_state_dict(first.state_dict())
    load_version(second, 3)
    assert ids(iterate(second, 3)) == [6, 7, 8, 9, 10]
    assert ids(second.take(4)) == [11, 12, 13, 14, 15]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda state: state.pop("begun"), id="a part is missing"),
        pytest.param(lambda state: state["finished"][0].update(trajectories=[{"prompt": {}}]), id="records"),
        pytest.param(lambda state: state["finished"][0].update(trajectories=["eyJ9"]), id="other texts"),
        pytest.param(lambda state: state.update(begun=[[0, 1]]), id="pairs"),
        pytest.param(lambda state: state.pop("curriculum"), id="curriculum"),
        pytest.param(lambda state: state.pop("prompts"), id="prompts"),
    ],
)
def test_a_state_in_the_form_of_another_build_is_refused_with_advice(make: Make, change: Callable[[Any], Any]) -> None:
    first = make(max_staleness=1)
    first.take(0)
    state = first.state_dict()
    change(state)
    second = make(load=False, max_staleness=1)
    with pytest.raises(RolloutError, match=r"different lightrl version.*Resume with that version, or run .* a new run"):
        second.load_state_dict(state)


def test_groups_of_an_interrupted_take_come_again(make: Make) -> None:
    controller = make(max_staleness=1)
    first = controller.take(0)
    assert controller.take(0) == first
    controller.commit()
    controller.commit()
    assert controller.progress()["consumed_groups"] == 2
    assert ids(controller.take(0)) == [2, 3]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_interrupt_while_waiting_leaves_every_group_in_the_state(make: Make, max_staleness: int) -> None:
    controller = make(FakeEngine(seconds_per_token=0.05), max_staleness=max_staleness)
    with pytest.raises(KeyboardInterrupt):
        controller.take(0, on_wait=interrupt)
    state = controller.state_dict()
    assert state["in_flight"] + [group["id"] for group in state["finished"]] == list(range(state["next_position"]))
    assert ids(controller.take(0)) == [0, 1]  # and nothing waits for ever


def test_progress_is_reported_while_it_waits(make: Make) -> None:
    reported: list[tuple[int, int]] = []
    controller = make(FakeEngine(hang_requests={3}), group_size=2, rollout_timeout_s=2)
    with pytest.raises(RolloutError):
        controller.take(0, on_wait=lambda *counts: reported.append(counts))
    assert reported[-1] == (3, 4)


def test_evaluation_keeps_the_order_and_lets_training_rollouts_continue(make: Make) -> None:
    pace = lambda prompt, sampling: 0.03 if prompt[0] in (900, 1, 2, 3) else 0.001  # noqa: E731
    controller = make(FakeEngine(seconds_per_token=pace), max_staleness=1)
    prompts = [Prompt(id=f"v{number}", token_ids=[900 + number]) for number in range(5)]
    groups = controller.evaluate(prompts, sampling=Sampling(max_new_tokens=3, temperature=0.0), num_samples=2)
    assert [group.prompt for group in groups] == prompts
    assert [[item.sample for item in group.trajectories] for group in groups] == [[0, 1]] * 5
    assert {len(item.completion_ids) for group in groups for item in group.trajectories} == {3}
    assert {version for group in groups for item in group.trajectories for version in item.weight_versions} == {-1, 0}
    assert [request.token_ids[0] for request in controller.engine.requests][4:] == [900 + k // 2 for k in range(10)]
    assert ids(controller.take(0) + iterate(controller, 0)) == [0, 1, 0, 1]
    assert controller.progress()["next_position"] == 6  # validation took no place of a training group


def test_failed_rewards_are_missing_from_validation_groups(make: Make) -> None:
    controller = make(reward=fails_for({901}), prompts=None)
    groups = controller.evaluate([Prompt(id="a", token_ids=[900]), Prompt(id="b", token_ids=[901])], sampling=SAMPLING)
    assert [len(group.trajectories) for group in groups] == [1, 0]
    assert [drop.prompt_id for drop in controller.drain_drops()] == ["b"]
    assert controller.evaluate([], sampling=SAMPLING) == []


def test_a_workflow_that_hangs_is_dropped_by_its_own_deadline_and_named(make: Make) -> None:
    async def before(prompt: Prompt, generate: Generate) -> None:
        await generate([1])  # takes longer than the deadline, which is for what the workflow does by itself
        if prompt.id == "p1":
            await asyncio.sleep(600)

    workflow = Doing(before)
    workflow.own_timeout_s = 1.0  # seconds
    controller = make(FakeEngine(delay_s=1.2), workflow=workflow, group_size=2)
    assert {group.prompt.id for group in controller.take(0)} == {"p0", "p2"}
    first, second = controller.drain_drops()
    assert first.message == second.message
    assert "Doing.run spent own_timeout_s=1 outside of generate on prompt 'p1'" in first.message


def test_an_engine_error_ends_validation_though_another_request_hangs(make: Make) -> None:
    controller = make(FakeEngine(hang_requests={0}, fail_requests={1, 2}))
    with pytest.raises(EngineError, match="fails request"):
        controller.evaluate([Prompt(id="a", token_ids=[1])], sampling=SAMPLING, num_samples=3)
    assert ids(controller.take(0)) == [0, 1]


def test_a_validation_that_hangs_says_how_far_it_came(make: Make) -> None:
    controller = make(FakeEngine(hang_requests={2}), rollout_timeout_s=1.0)
    with pytest.raises(
        RolloutError, match=r"Validation waited for 1 prompt × 4 samples, .*3 of 4 trajectories finished"
    ):
        controller.evaluate([Prompt(id="a", token_ids=[1])], sampling=SAMPLING, num_samples=4)
    assert comes_true(lambda: controller.engine.num_running == 0)


def test_an_interrupted_validation_is_cancelled_and_training_continues(make: Make) -> None:
    controller = make(FakeEngine(seconds_per_token=lambda prompt, sampling: 5.0 if prompt[0] > 800 else 0.0))
    with pytest.raises(KeyboardInterrupt):
        controller.evaluate([Prompt(id="a", token_ids=[900])], sampling=SAMPLING, on_wait=interrupt)
    assert comes_true(lambda: controller.engine.num_running == 0)
    assert ids(controller.take(0)) == [0, 1]


def test_close_cancels_what_runs_or_hangs_and_may_be_called_twice(make: Make) -> None:
    before = set(threading.enumerate())
    controller = make(FakeEngine(seconds_per_token=9.0, hang_requests={1}), max_staleness=3)
    assert comes_true(lambda: controller.engine.num_running == 7)
    controller.close()
    assert controller.engine.num_running == 0
    assert set(threading.enumerate()) == before
    controller.close()
    with pytest.raises(RolloutError, match="closed"):
        controller.take(0)
    with pytest.raises(RolloutError, match="closed"):
        controller.state_dict()


def test_close_ends_the_threads_of_to_thread(make: Make) -> None:
    before = set(threading.enumerate())

    async def in_thread(prompt: Prompt, generate: Generate) -> None:
        await asyncio.to_thread(lambda: None)

    controller = make(workflow=Doing(in_thread))
    controller.take(0)
    assert len(set(threading.enumerate()) - before) > 1
    controller.close()
    assert set(threading.enumerate()) == before


def test_close_waits_for_a_workflow_that_cleans_up(make: Make) -> None:
    cleaned: list[str] = []

    async def cleans_up(prompt: Prompt, generate: Generate) -> None:
        try:
            await asyncio.sleep(20)
        finally:
            await asyncio.sleep(0.05)
            cleaned.append(prompt.id)

    make(workflow=Doing(cleans_up), max_staleness=1).close()
    assert sorted(cleaned) == ["p0", "p1", "p2", "p3"]


def test_close_says_what_it_leaves_behind(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    released, is_blocked = threading.Event(), threading.Event()

    async def blocks(prompt: Prompt, generate: Generate) -> None:
        await asyncio.sleep(0.01)
        is_blocked.set()
        released.wait(600)

    controller = make(workflow=Doing(blocks), max_staleness=1, groups_per_iteration=1)
    is_blocked.wait(600)
    controller.close(timeout_s=0.05)
    assert "abandoning them" in caplog.text
    released.set()


class PausesSlowly(FakeEngine):
    """Its pause and resume need some turns of the event loop; like LocalEngine's, a cancelled pause stands."""

    async def pause(self) -> None:
        await super().pause()
        for _ in range(2):
            await asyncio.sleep(0)

    async def resume(self) -> None:
        await asyncio.sleep(0)
        await super().resume()


TICKS = range(0, 32)  # more than any coroutine here lives


def run_inside(controller: RolloutController, coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(coroutine, controller._loop).result(600)


def cancelled_after(controller: RolloutController, coroutine: Coroutine[Any, Any, Any], ticks: int) -> bool:
    """Runs the coroutine on the controller's loop, cancels it after so many turns; whether that came in time."""

    async def scenario() -> bool:
        task = asyncio.ensure_future(coroutine)
        for _ in range(ticks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    return run_inside(controller, scenario())


def assert_no_slot_leaks(controller: RolloutController) -> None:
    """Two whole iterations follow, every position is somewhere, and the engine is idle then."""
    assert ids(iterate(controller, 0)) + ids(controller.take(1)) == [0, 1, 2, 3]
    state = controller.state_dict()
    kept = state["in_flight"] + [group["id"] for group in state["finished"]]
    assert sorted([*kept, 0, 1]) == list(range(state["next_position"]))


def take(controller: RolloutController) -> Coroutine[Any, Any, Any]:
    return controller._take(0, Wait("a test", 2))


def admission(controller: RolloutController) -> Coroutine[Any, Any, Any]:
    controller._take_wait = Wait("a test", 2)  # as while a batch is waited for
    return controller._start_admissible()


def validation(controller: RolloutController) -> Coroutine[Any, Any, Any]:
    prompts = [Prompt(id=f"v{number}", token_ids=[900]) for number in range(2)]
    return controller._evaluate(prompts, SAMPLING, 2, Wait("a test", 4))


@pytest.mark.parametrize(("begin", "max_staleness"), [(take, 0), (take, 1), (admission, 0), (validation, 0)])
def test_what_is_cancelled_at_any_await_leaks_no_slot(make: Make, begin: Any, max_staleness: int) -> None:
    outcomes = set()
    for ticks in TICKS:
        controller = make(PausesSlowly(), max_staleness=max_staleness)
        outcomes.add(cancelled_after(controller, begin(controller), ticks))
        assert begin is not validation or controller.engine.num_running == 0
        assert_no_slot_leaks(controller)
        controller.close()
    assert outcomes == {True, False}


def test_everything_cancelled_at_any_await_leaves_an_idle_engine(make: Make) -> None:
    for ticks in TICKS:
        controller = make(PausesSlowly())

        async def scenario(controller: RolloutController = controller, ticks: int = ticks) -> None:
            task = asyncio.ensure_future(take(controller))
            for _ in range(ticks):
                await asyncio.sleep(0)
            await controller._cancel_all()
            assert task.done()

        run_inside(controller, scenario())
        controller.close()
        assert controller.engine.num_running == 0
        (completion,) = asyncio.run(controller.engine.generate([1], SAMPLING, session="it is not paused"))
        assert len(completion.token_ids) == 4


def test_a_group_given_up_at_any_await_of_its_trajectories_leaks_no_slot(make: Make) -> None:
    given_up: list[int] = []
    for ticks in TICKS:
        controller = make(max_staleness=1, groups_per_iteration=1, load=False)  # a load would start the groups
        controller.engine.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=0)

        async def scenario(controller: RolloutController = controller, ticks: int = ticks) -> None:
            controller._cursor.prompts.prepare(0, 8)  # or a thread makes them meanwhile
            await admission(controller)
            for _ in range(ticks):
                await asyncio.sleep(0)
            scheduler = controller._scheduler
            for group_id in list(scheduler.running):
                controller._give_up([group_id])
                scheduler._drop(group_id, "oversampled", "given up")
                scheduler.queue(group_id)
                given_up.append(group_id)

        run_inside(controller, scenario())
        groups = iterate(controller, 0) + iterate(controller, 1) + iterate(controller, 2)
        assert len(set(ids(groups))) == 3
        controller.close()
    assert set(given_up) == {0, 1}


@pytest.mark.parametrize(
    "setting", [{"max_staleness": 1}, {"incomplete_groups": "drop"}, {"oversample_fraction": 0.5}], ids=str
)
def test_rewards_cannot_come_later_where_they_choose_groups(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="defers_rewards cannot be combined"):
        RolloutSettings(defers_rewards=True, **setting)
