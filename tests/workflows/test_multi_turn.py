"""MultiTurn: what the policy wrote stays as it was drawn; rewards, limits, failing environments, many at once."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from chat_texts import (
    CHATML,
    CONFIG,
    END,
    LETTERS,
    ONLY_USERS,
    SAMPLING,
    TAKES_THINKING_OUT,
    TEXT_END,
    TRIMS,
    Scripted,
    chat_prompt,
    chat_tokenizer,
    ids,
    letters,
    play,
    played,
    started,
    writes,
)
from local_rewards import LocalRewards
from moe_cases import engine_of
from transformers import AutoModelForCausalLM
from waits import comes_true

from lightrl.engines import FakeEngine
from lightrl.errors import RolloutError
from lightrl.functional.supports import decode_supports
from lightrl.models.chat_template import set_chat_template
from lightrl.rewards import environment_reward
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.rollout.prompts import Prompts
from lightrl.trajectory import Prompt, Sampling
from lightrl.weights import bucketed
from lightrl.workflows import Environment, MultiTurn, RetryWithFeedback
from lightrl.workflows.multi_turn import Step

AGAIN = ("again", 0.0, False)
DONE = (None, 1.0, True)
BETWEEN = "\n<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"


def workflow(*steps: Any, template: str | None = CHATML, **settings: Any) -> MultiTurn:
    return MultiTurn(chat_tokenizer(template), lambda: Scripted(*steps), **settings)


def test_what_the_policy_wrote_is_never_encoded_again():
    said = [*letters("ab"), END]  # an encoder would write `ab` as one token
    engine = writes(said, [*letters("2"), END])
    trajectory = played(workflow(AGAIN, DONE), engine)
    prompt = chat_prompt().token_ids
    assert trajectory.token_ids == prompt + said + ids(BETWEEN) + letters("2") + [END]
    assert engine.requests[1].token_ids == trajectory.token_ids[: -len(letters("2")) - 1]


def test_supports_are_those_of_the_policys_tokens_and_end_with_its_last():
    engine = writes([*letters("ab"), END], [*letters("2"), END])
    trajectory = played(workflow(AGAIN, AGAIN, max_turns=2), engine, sampling=replace(SAMPLING, top_k=3))
    is_every, num_others, ids_of = decode_supports(np.asarray(trajectory.columns["supports"]))
    assert is_every.tolist() == [not trains for trains in trajectory.loss_mask]
    assert num_others[~is_every].tolist() == [3 - (token < 3) for token in [*letters("ab"), END, *letters("2"), END]]
    assert set(ids_of.tolist()) <= {0, 1, 2}  # FakeEngine keeps the lowest ids
    assert "supports" not in played(workflow(DONE), writes([*letters("2"), END])).columns


def test_a_token_belongs_to_a_turn_and_equal_observations_have_equal_hashes():
    trajectory = played(workflow(AGAIN, AGAIN, DONE), writes(*([*letters(text), END] for text in ("ab", "2", "b"))))
    starts, ends = zip(*((turn.start, turn.end) for turn in trajectory.turns), strict=True)
    expected = [-1] * len(trajectory.token_ids)
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        expected[start:end] = [index] * (end - start)
    assert trajectory.columns["turn_indices"].tolist() == expected
    states = trajectory.columns["turn_states"]
    assert [states[start] for start in starts] == [states[end - 1] for end in ends]
    assert states[starts[0]] != states[starts[1]] == states[starts[2]]  # the prompt, and AGAIN's observation twice
    assert {states[index] for index, turn in enumerate(expected) if turn < 0} == {-1}


def test_the_loss_mask_is_true_on_the_policys_tokens_only():
    trajectory = played(workflow(AGAIN, DONE), writes([*letters("3"), END], [*letters("22"), END]))
    written = [token for token, trains in zip(trajectory.token_ids, trajectory.loss_mask, strict=True) if trains]
    assert written == [*letters("3"), END, *letters("22"), END]
    assert [trajectory.token_ids[turn.start : turn.end] for turn in trajectory.turns] == [written[:2], written[2:]]
    assert [version >= 0 for version in trajectory.weight_versions] == trajectory.loss_mask
    assert [logprob != 0 for logprob in trajectory.behavior_logprobs] == trajectory.loss_mask
    assert trajectory.completion == "22"
    assert trajectory.completion_ids == written[2:]


def test_the_environment_hears_text_without_the_end_of_the_turn():
    heard = Scripted(DONE)
    played(MultiTurn(chat_tokenizer(), lambda: heard), writes([*letters("a\n"), END]))
    assert heard.heard == ["a\n"]


def test_another_stop_token_is_kept_and_the_templates_own_end_follows():
    said = [*letters("3"), TEXT_END]
    trajectory = played(workflow(AGAIN, DONE), writes(said, [END]))
    start = trajectory.turns[0].start
    assert trajectory.token_ids[start:-1] == said + ids("<|im_end|>" + BETWEEN)


def test_without_a_template_the_observation_is_encoded_as_it_is():
    prompt = Prompt("a", token_ids=ids("7?"))
    trajectory = played(workflow(AGAIN, DONE, template=None), writes([*letters("3"), END], [END]), prompt)
    assert trajectory.token_ids == [*ids("7?"), *letters("3"), END, *ids("again"), END]


def test_several_messages_and_an_opening_are_rendered_in_place():
    class Opening(Scripted):
        async def reset(self, prompt: Prompt) -> dict[str, str]:
            return {"role": "system", "content": "go"}

    both = [{"role": "system", "content": "no"}, {"role": "user", "content": "again"}]
    trajectory = played(MultiTurn(chat_tokenizer(), lambda: Opening((both, 0, False), DONE)), writes([END], [END]))
    start, end = (turn.start for turn in trajectory.turns)
    opening = chat_tokenizer().decode(trajectory.token_ids[:start])
    assert opening.endswith("1+1?<|im_end|>\n<|im_start|>system\ngo<|im_end|>\n<|im_start|>assistant\n")
    assert trajectory.token_ids[start + 1 : end] == ids("\n<|im_start|>system\nno<|im_end|>" + BETWEEN)
    assert trajectory.prompt.token_ids == trajectory.token_ids[:start]


def test_every_logprob_over_several_turns_is_that_of_a_plain_forward():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
    with engine_of(model) as engine:
        stops = tuple(range(0, len(LETTERS), 4))  # a random policy soon draws one
        sampling = Sampling(max_new_tokens=40, stop_token_ids=stops, seed=5)
        trajectory = played(workflow(AGAIN, AGAIN, DONE), engine, sampling=sampling)
    assert len(trajectory.turns) == 3
    with torch.no_grad():
        logits = model(torch.tensor([trajectory.token_ids])).logits[0].float()
    slow = torch.log_softmax(logits, -1)[torch.arange(len(logits) - 1), trajectory.token_ids[1:]]
    mask = torch.tensor(trajectory.loss_mask[1:])
    torch.testing.assert_close(torch.tensor(trajectory.behavior_logprobs[1:])[mask], slow[mask], atol=1e-5, rtol=0)


def test_each_turn_has_the_weight_version_that_wrote_it():
    engine = writes([*letters("3"), END], [*letters("22"), END])

    class Syncing(Scripted):
        def step(self, completion: str) -> Step:  # type: ignore[override]
            started_version = engine.weight_version + 1
            engine.load_weights(bucketed([("weight", torch.zeros(1))], 8), weight_version=started_version)
            return (None, 0.0, True) if started_version == 2 else ("again", 0.0, False)

    trajectory = played(MultiTurn(chat_tokenizer(), Syncing), engine)
    assert [version for version in trajectory.weight_versions if version >= 0] == [0, 0, 1, 1, 1]
    assert (trajectory.oldest_version, trajectory.newest_version) == (0, 1)


def test_a_template_that_only_adds_is_taken_though_it_trims_white_space():
    trajectory = played(workflow(AGAIN, DONE, template=TRIMS), writes([*letters(" 3\n"), END], [END]))
    assert trajectory.token_ids[-1 - len(ids(BETWEEN)) : -1] == ids(BETWEEN)


def test_a_template_that_takes_thinking_out_is_refused_and_the_named_fix_works():
    with pytest.raises(ValueError, match=r"rewrites history.*</think>.*Set data.chat_template to"):
        workflow(AGAIN, template=TAKES_THINKING_OUT)
    tokenizer = chat_tokenizer(TAKES_THINKING_OUT)
    set_chat_template(tokenizer, CHATML)  # as data.chat_template does
    fixed = MultiTurn(tokenizer, lambda: Scripted(AGAIN, DONE))
    assert len(played(fixed, writes([*letters("3"), END], [END])).turns) == 2


def test_history_that_is_rewritten_for_what_the_policy_wrote_drops_the_trajectory():
    template = CHATML.replace("message['content']", "message['content'].replace('bad', 'good')")
    with pytest.raises(RolloutError, match=r"rewrites history.*bad"):
        played(workflow(AGAIN, DONE, template=template), writes([*letters("bad"), END], [END]))


def test_a_template_that_cannot_render_the_answer_is_refused():
    class WithTool(Scripted):
        def tool_schemas(self):
            return [{"type": "function", "function": {"name": "add"}}]

    with pytest.raises(ValueError, match=r"role 'tool'.*no tools here"):
        MultiTurn(chat_tokenizer(ONLY_USERS), WithTool)


def test_a_prompt_of_another_template_is_refused():
    prompt = Prompt("a", messages=[{"role": "user", "content": "1+1?"}], token_ids=ids("1+1?"))
    with pytest.raises(RolloutError, match=r"set data.chat_template to the template that made them"):
        played(workflow(DONE), writes([END]), prompt)


def test_each_turns_reward_is_discounted_and_stands_on_its_last_token():
    steps = [("again", 1.0, False), ("again", 0.0, False), (None, 2.0, True)]
    trajectory = played(workflow(*steps, discount=0.5), writes([*letters("3"), END], [END], [*letters("22"), END]))
    placed = {place: reward for place, reward in enumerate(trajectory.rewards or []) if reward}
    assert placed == {trajectory.turns[0].end - 1: 1.0, trajectory.turns[2].end - 1: 0.5}
    assert all(trajectory.loss_mask[place] for place in placed)
    assert len(trajectory.rewards or []) == len(trajectory.token_ids)
    assert trajectory.reward is None  # until it is computed
    assert trajectory.metrics == {"turns": 3.0}


def test_retrying_earns_the_best_reward_and_failing_first_never_pays():
    prompt = chat_prompt(answer="4")
    right, wrong = letters("#### 4"), letters("#### 5")
    cases = {"right at once": [right], "right at last": [wrong, right], "never right": [wrong, letters("?"), wrong]}
    best = {"right at once": 1.0, "right at last": 0.1 + 0.9 * 0.9, "never right": 0.1}
    for name, turns in cases.items():
        retry = MultiTurn(chat_tokenizer(), RetryWithFeedback, max_turns=3, discount=0.9)
        trajectory = played(retry, writes(*([*turn, END] for turn in turns)), prompt)
        assert sum(trajectory.rewards or []) == pytest.approx(best[name]), name
        solved = float(name != "never right")
        assert trajectory.metrics["accuracy"] == solved, name
        assert trajectory.metrics["first_turn_accuracy"] == float(name == "right at once"), name


def test_feedback_names_what_the_reward_function_says():
    environment = RetryWithFeedback(lambda trajectory: {"reward": 0.5, "digits": 2.0}, feedback="{digits}, {reward}")
    environment.reset(chat_prompt())
    assert environment.step("12") == ("2.0, 0.5", 0.5, False)
    environment.feedback = r"\boxed{answer}, {{}}, {a:.2f}, {digits:.2f}"
    assert environment.step("12")[0] == r"\boxed{answer}, {}, {a:.2f}, 2.00"
    for feedback in (r"End with \boxed{}.", 'Write {"value": 3}.', "Wrong: { is none.", "{0}"):
        with pytest.raises(ValueError, match="Double any braces"):
            RetryWithFeedback(feedback=feedback)
    for feedback in ("{answer.text}", "{digits[0]}"):
        with pytest.raises(ValueError, match=r"feedback must name metrics, .* which names part of one"):
            RetryWithFeedback(feedback=feedback)


def test_the_last_turn_is_max_turns_and_no_truncation():
    engine = writes([END], [END], [END])
    trajectory = played(workflow(AGAIN, AGAIN, AGAIN, max_turns=2), engine)
    assert (len(trajectory.turns), len(engine.requests), trajectory.is_truncated) == (2, 2, False)


def test_a_completion_that_was_cut_off_ends_the_trajectory_unseen():
    environment = Scripted()
    cut = MultiTurn(chat_tokenizer(), lambda: environment, truncated_reward=-0.5)
    trajectory = played(cut, writes(letters("3" * 200)))
    assert environment.heard == []
    assert trajectory.is_truncated
    assert trajectory.finish_reason == "length"
    assert (trajectory.rewards or [])[-1] == -0.5


def test_a_trajectory_never_has_more_than_max_tokens():
    start = len(chat_prompt().token_ids or [])
    for room in range(1, 60):
        engine = writes(*[[*letters("33"), END]] * 9)
        trajectory = played(workflow(*[AGAIN] * 9, max_turns=9, max_tokens=start + room), engine)
        assert len(trajectory.token_ids) <= start + room
        assert trajectory.is_truncated
        assert trajectory.loss_mask[-1]
        assert len(trajectory.turns) == 1 + (room - 1) // (3 + len(ids(BETWEEN)))


def test_max_tokens_is_the_models_context_if_it_is_not_given_and_never_more():
    whole, given = workflow(AGAIN), workflow(AGAIN, max_tokens=57)
    for flow in (whole, given):
        flow.fit_context(57)
        assert flow.max_tokens == 57
    given.fit_context(None)
    assert given.max_tokens == 57
    with pytest.raises(ValueError, match=r"max_tokens=57 of MultiTurn exceeds the model's context of 56 tokens.*Lower"):
        given.fit_context(56)


def test_a_prompt_without_room_is_dropped():
    with pytest.raises(RolloutError, match="max_tokens=3"):
        played(workflow(DONE, max_tokens=3), writes([END]))


def test_when_the_time_is_over_the_finished_turns_remain_and_without_one_the_trajectory_is_dropped():
    engine = writes([END], [END])
    engine.hang_requests = {1}
    trajectory = played(workflow(AGAIN, AGAIN, time_limit_s=2), engine)
    assert (len(trajectory.turns), trajectory.is_truncated) == (1, True)
    assert trajectory.loss_mask[-1]
    engine = writes([END])
    engine.hang_requests = {0}
    with pytest.raises(RolloutError, match=r"time_limit_s=0.05"):
        played(workflow(DONE, time_limit_s=0.05), engine)


@pytest.mark.parametrize(
    "settings",
    [{"max_turns": 0}, {"max_tokens": 0}, {"discount": 0.0}, {"discount": 1.5}, {"step_timeout_s": float("inf")}],
    ids=str,
)
def test_limits_out_of_range_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=next(iter(settings))):
        workflow(**settings)


def test_an_environment_that_is_not_made_anew_is_refused():
    with pytest.raises(TypeError, match="lambda: MyEnvironment"):
        MultiTurn(chat_tokenizer(), Scripted())  # type: ignore[arg-type]


class Questions(Prompts):
    """Prompt k asks for the number k."""

    def __getitem__(self, position: int) -> Prompt:
        return chat_prompt(f"{position}?", name=f"p{position}", number=position)


Make = Callable[..., RolloutController]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[RolloutController] = []

    def factory(
        flow: MultiTurn, engine: FakeEngine, *, sampling: Sampling = SAMPLING, run_seed: int = 0, **settings: Any
    ) -> RolloutController:
        rollout = RolloutSettings(**({"groups_per_iteration": 2} | settings))
        options = {"sampling": sampling, "prompts": Questions(), "run_seed": run_seed}
        made.append(RolloutController(engine, flow, LocalRewards(environment_reward), rollout, **options))
        return made[-1]

    yield factory
    for controller in made:
        controller.close()
    assert not lingering()


def lingering() -> set[str]:
    return {thread.name for thread in threading.enumerate()} & {"lightrl-rollout", "lightrl-environment"}


def repeats_the_question(prompt: list[int], sampling: Sampling, sample: int) -> list[int]:
    """The user's first line, which stands after `user` and a new line."""
    first = len(ids("<|im_start|>user\n"))
    return [*prompt[first : prompt.index(ids("?")[0])], END]


class Failing(Environment):
    """The prompt with the number 1 makes it raise or hang."""

    def __init__(self, hangs: bool) -> None:
        self.hangs = hangs

    def reset(self, prompt: Prompt) -> None:
        self.fails = prompt.fields["number"] == 1

    async def step(self, completion: str) -> Any:
        if self.fails and not self.hangs:
            raise KeyError("lost")
        with contextlib.suppress(asyncio.CancelledError):  # it ignores its cancellation
            await asyncio.sleep(30 if self.fails else 0)
        return DONE


@pytest.mark.parametrize(
    ("hangs", "says"),
    [(False, "Failing.step raised KeyError: 'lost'"), (True, "Failing.step did not finish within 2 s")],
)
def test_an_environment_that_fails_drops_its_trajectory_only(make: Make, hangs: bool, says: str):
    flow = MultiTurn(chat_tokenizer(), lambda: Failing(hangs), step_timeout_s=2)
    controller = make(flow, started(FakeEngine(script=repeats_the_question)))
    assert [group.id for group in controller.take(0)] == [0, 2]
    (drop,) = controller.drain_drops()
    assert (drop.reason, drop.prompt_id) == ("rollout", "p1")
    assert re.search(says, drop.message)


def test_a_thread_that_hangs_is_left_behind_and_nobody_waits_for_it():
    release = threading.Event()

    class Hanging(Environment):
        def step(self, completion: str) -> Step:
            release.wait()
            return DONE

    flow = MultiTurn(chat_tokenizer(), Hanging, step_timeout_s=0.05)
    with pytest.raises(RolloutError, match=r"Hanging.step did not finish within 0.05 s"):
        played(flow, writes([END]))
    release.set()
    assert comes_true(lambda: not lingering())


def test_an_environment_that_blocks_its_thread_does_not_block_the_others(make: Make):
    both = threading.Barrier(2, timeout=600)

    class Meeting(Environment):
        def step(self, completion: str) -> Step:
            both.wait()  # only two at once pass
            return DONE

    controller = make(MultiTurn(chat_tokenizer(), Meeting), started(FakeEngine(script=repeats_the_question)))
    assert [group.trajectories[0].reward for group in controller.take(0)] == [1.0, 1.0]


def test_a_hundred_conversations_at_once_never_mix(make: Make):
    class Echo(Environment):
        def reset(self, prompt: Prompt) -> None:
            self.number, self.turn = str(prompt.fields["number"]), 0

        async def step(self, completion: str) -> Step:
            assert completion == self.number
            self.turn += 1
            await asyncio.sleep(0.001 * (int(self.number) % 7))
            return f"{self.number}?", 1.0, self.turn == 3

    engine = FakeEngine(
        script=repeats_the_question, seconds_per_token=lambda prompt, sampling: 1e-4 * (len(prompt) % 5)
    )
    controller = make(MultiTurn(chat_tokenizer(), Echo), started(engine), groups_per_iteration=25, group_size=4)
    for group in controller.take(0):
        for trajectory in group.trajectories:
            assert trajectory.completion == str(group.prompt.fields["number"])
            assert (trajectory.reward, len(trajectory.turns)) == (3.0, 3)
            assert trajectory.token_ids[: len(group.prompt.token_ids or [])] == group.prompt.token_ids
    assert controller.drain_drops() == []


def test_the_same_run_seed_gives_the_same_conversations_whatever_the_pace(make: Make):
    found = []
    for pace in (0.0, 1e-3):

        def seconds(prompt: list[int], sampling: Sampling, pace: float = pace) -> float:
            return pace * (prompt[-8] % 3)

        flow = workflow(*[AGAIN] * 3, max_turns=3)
        stops = tuple(range(0, len(LETTERS), 4))
        sampling = Sampling(max_new_tokens=60, stop_token_ids=stops)
        engine = started(FakeEngine(seconds_per_token=seconds))
        controller = make(flow, engine, group_size=3, sampling=sampling, run_seed=7)
        found.append([item.token_ids for group in controller.take(0) for item in group.trajectories])
    assert found[0] == found[1]
    assert len({tuple(token_ids) for token_ids in found[0]}) == 6


class Closing(Environment):
    """Waits in the method asked for; says when it is there and when it was closed."""

    def __init__(self, where: str, log: list[str]) -> None:
        self.where, self.log = where, log

    async def _wait(self, name: str) -> None:
        self.log.append(name)
        if name == self.where:
            await asyncio.sleep(60)

    async def reset(self, prompt: Prompt) -> None:
        await self._wait("reset")

    async def step(self, completion: str) -> Step:
        await self._wait("step")
        return DONE

    async def metrics(self) -> dict[str, float]:
        await self._wait("metrics")
        return {}

    async def close(self) -> None:
        await self._wait("close")
        self.log.append("closed")


@pytest.mark.parametrize("where", ["reset", "generate", "step", "metrics", "close"])
def test_cancelled_at_any_wait_it_closes_and_leaves_no_task(where: str):
    log: list[str] = []
    engine = writes([END])
    if where == "generate":
        engine.hang_requests = {0}

    async def main() -> None:
        flow = MultiTurn(chat_tokenizer(), lambda: Closing(where, log))
        task = asyncio.create_task(play(flow, engine, chat_prompt()))
        while not (engine.requests if where == "generate" else where in log):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        for _ in range(3):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())
    assert log[-1] == ("close" if where == "close" else "closed")
    assert engine.num_running == 0
    assert not lingering()


def test_closing_the_controller_ends_conversations_amid_a_turn(make: Make):
    engine = started(FakeEngine(script=repeats_the_question, seconds_per_token=30.0))
    controller = make(workflow(DONE), engine, rollout_timeout_s=0.2)
    with pytest.raises(RolloutError, match="no trajectory finished"):
        controller.take(0)


def test_a_close_that_fails_is_a_warning_and_the_trajectory_stays(caplog: pytest.LogCaptureFixture):
    class Stuck(Scripted):
        def close(self) -> None:
            raise OSError("still busy")

    assert played(MultiTurn(chat_tokenizer(), lambda: Stuck(DONE)), writes([END])).turns
    assert "Stuck.close raised OSError: still busy" in caplog.text
