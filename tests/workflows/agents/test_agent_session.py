"""What becomes of an agent's requests: exact tokens over turns, branches, tools, limits; with the openai client."""

import asyncio
import json
import re
import threading
import tracemalloc
from typing import Any

import openai
import pytest
import torch
from agent_cases import (
    PROMPT,
    SAMPLING,
    TOKENIZER,
    ask,
    client_of,
    decode,
    encode,
    generate_with,
    play,
    scripted,
    trained,
    user,
    with_client,
    workflow_of,
    written,
)
from chat_texts import CONFIG, END, letters, started
from engine_contract import recomputed_logprobs
from moe_cases import engine_of
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from lightrl.engines.engine import Completion
from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory
from lightrl.weights import bucketed
from lightrl.workflows.agent_workflow import AgentLimits, AgentWorkflow
from lightrl.workflows.agent_workflow.protocol import AgentRequest
from lightrl.workflows.agent_workflow.session import AgentSession
from lightrl.workflows.workflow import check_trajectory

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}


def opening(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def test_a_conversation_of_two_requests_is_one_trajectory_of_two_turns() -> None:
    async def talk(client: AsyncOpenAI) -> float:
        messages: list[Any] = [user("hi")]
        messages += [await ask(client, messages), user("more")]
        assert (await ask(client, messages)).content == "two"
        return 0.5

    trajectory = play(with_client(talk), scripted("one", "two"))
    text = opening("hi") + "one<|im_end|>\n" + opening("more") + "two<|im_end|>"
    assert decode(trajectory.token_ids) == text
    assert written(trajectory) == ["one<|im_end|>", "two<|im_end|>"]
    assert decode(trained(trajectory)) == "one<|im_end|>two<|im_end|>"
    assert trajectory.rewards == [0.0] * (len(trajectory.token_ids) - 1) + [0.5]
    assert trajectory.metrics == {"turns": 2.0, "rows": 1.0}
    assert (trajectory.completion, trajectory.finish_reason, trajectory.is_truncated) == ("two", "stop", False)
    assert check_trajectory(trajectory, workflow_of(talk), trajectory.prompt) is trajectory


def test_the_trajectory_keeps_the_prompt_of_the_data_and_the_tokens_that_the_agent_made_of_it() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        await ask(client, [user("you are asked: 1+1")])

    task = Prompt(id="b", messages=[user("1+1")], fields={"answer": "2"})
    trajectory = play(with_client(talk), scripted("2"), task)
    assert trajectory.prompt.messages == [user("1+1")]
    assert trajectory.prompt.fields == {"answer": "2"}
    assert decode(trajectory.prompt.token_ids or []) == opening("you are asked: 1+1")
    assert trajectory.rewards is None


def test_an_agent_that_changes_its_prompt_changes_nobody_elses() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            prompt.messages.append(await ask(client, prompt.messages))

    task = Prompt(id="b", messages=[user("1+1")])
    assert play(agent, scripted("2"), task).prompt.messages == task.messages == [user("1+1")]


@pytest.mark.parametrize(
    "answered",
    [
        pytest.param(lambda message: message, id="the client's object"),
        pytest.param(lambda message: message.model_dump(), id="all fields, None too"),
        pytest.param(lambda message: {"role": "assistant", "content": message.content + "\n"}, id="with white space"),
        pytest.param(
            lambda message: {"role": "assistant", "content": [{"type": "text", "text": message.content}]}, id="in parts"
        ),
    ],
)
def test_what_the_policy_wrote_is_never_encoded_again(answered: Any) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        first = await ask(client, [user("hi")])
        await ask(client, [user("hi"), answered(first), user("more")])

    engine = started(FakeEngine(script=lambda prompt, sampling, sample: [*letters("ab"), END]))
    trajectory = play(with_client(talk), engine)
    assert encode("ab") != letters("ab")
    start = encode(opening("hi"))
    assert engine.requests[1].token_ids == [*start, *letters("ab"), END, *encode("\n" + opening("more"))]
    assert trajectory.token_ids == [*engine.requests[1].token_ids, *letters("ab"), END]
    assert trajectory.metrics["rows"] == 1


def model_of(version: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(version)
        return AutoModelForCausalLM.from_config(CONFIG).eval()


def test_logprobs_and_versions_equal_a_recompute_with_a_sync_between_two_turns() -> None:
    models = [model_of(version) for version in range(2)]

    def load(version: int) -> None:
        engine.load_weights(bucketed(models[version].named_parameters(), 20_000), weight_version=version)

    async def talk(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("hi")]
        for version in range(2):
            await asyncio.to_thread(load, version)
            messages += [await ask(client, messages, max_tokens=12), user(f"more {version}")]

    with engine_of(models[0]) as engine:
        trajectory = play(with_client(talk), engine)
    assert len(trajectory.turns) == 2
    for version, turn in enumerate(trajectory.turns):
        part = slice(turn.start, turn.end)
        assert 1 <= turn.end - turn.start <= 12
        assert trajectory.weight_versions[part] == [version] * (turn.end - turn.start)
        ids = trajectory.token_ids
        expected = recomputed_logprobs(models[version], ids[: turn.start], ids[part], SAMPLING)
        assert trajectory.behavior_logprobs[part] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_tools_make_the_round_from_the_policy_to_the_agent_and_back(is_streamed: bool) -> None:
    call_text = 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'

    async def call_of(client: AsyncOpenAI, messages: list[Any]) -> tuple[Any, str | None]:
        if not is_streamed:
            message = await ask(client, messages, tools=[ADD])
            return message.tool_calls[0], message.content
        stream = await client.chat.completions.create(model="policy", messages=messages, tools=[ADD], stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        return calls[0], "".join(delta.content or "" for delta in deltas)

    async def talk(client: AsyncOpenAI) -> float:
        messages: list[Any] = [user("2+3?")]
        call, content = await call_of(client, messages)
        assert (call.function.name, json.loads(call.function.arguments), content) == ("add", {"a": 2, "b": 3}, "I add.")
        function = {"name": call.function.name, "arguments": call.function.arguments}
        calls = [{"id": call.id, "type": "function", "function": function}]
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "5"})
        return float((await ask(client, messages, tools=[ADD])).content == "it is 5")

    trajectory = play(with_client(talk), scripted(call_text, "it is 5"))
    assert written(trajectory) == [call_text + "<|im_end|>", "it is 5<|im_end|>"]
    between = decode(trajectory.token_ids[trajectory.turns[0].end : trajectory.turns[1].start])
    assert between == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    assert decode(trajectory.token_ids).startswith("<|im_start|>tools\n[{")
    assert trajectory.metrics["rows"] == 1
    assert trajectory.rewards[-1] == 1.0


@pytest.mark.parametrize(
    "settings", [{}, {"tools": [ADD], "tool_choice": "none"}], ids=["no tools in the request", "none to be called"]
)
def test_what_is_no_call_of_a_tool_reaches_the_agent_as_text(settings: dict[str, Any]) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'

    async def talk(client: AsyncOpenAI) -> None:
        message = await ask(client, [user("2+3?")], **settings)
        assert (message.tool_calls, message.content) == (None, text)

    play(with_client(talk), scripted(text))


def rows_of(trajectory: Trajectory) -> list[str]:
    return [decode([id_ for span in row for id_ in trajectory.token_ids[slice(*span)]]) for row in trajectory.rows]


def test_rewritten_history_begins_a_row_and_all_rows_are_trained() -> None:
    async def talk(client: AsyncOpenAI) -> float:
        messages: list[Any] = [user("hi")]
        messages += [await ask(client, messages), user("more")]
        await ask(client, messages)
        await ask(client, [user("hi"), {"role": "assistant", "content": "another"}, user("more")])
        return 0.5

    trajectory = play(with_client(talk), scripted("first", "second", "third"))
    turns = [f"{text}<|im_end|>" for text in ("first", "second", "third")]
    assert written(trajectory) == turns
    assert trajectory.metrics == {"turns": 3.0, "rows": 2.0}
    assert rows_of(trajectory) == [
        opening("hi") + turns[0] + "\n" + opening("more") + turns[1],
        opening("hi") + "another<|im_end|>\n" + opening("more") + turns[2],
    ]
    assert decode(trajectory.token_ids).count(opening("hi")) == 1
    assert decode(trained(trajectory)) == "".join(turns)
    assert trajectory.rewards == [0.0] * (len(trajectory.token_ids) - 1) + [0.5]
    assert (trajectory.completion, trajectory.completion_ids) == ("third", [*encode("third"), END])
    assert check_trajectory(trajectory, workflow_of(talk), trajectory.prompt) is trajectory
    assert Trajectory.from_bytes(trajectory.to_bytes()) == trajectory
    assert Trajectory.from_json(trajectory.to_json()).rows == trajectory.with_lists().rows == trajectory.rows


def test_a_subagent_amid_a_conversation_is_a_row_of_its_own() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("hi")]
        messages.append(await ask(client, messages))
        found = await ask(client, [user("look")])
        await ask(client, [*messages, user(found.content)])

    trajectory = play(with_client(talk), scripted("wait", "it is 5", "five"))
    assert rows_of(trajectory) == [
        opening("look") + "it is 5<|im_end|>",
        opening("hi") + "wait<|im_end|>\n" + opening("it is 5") + "five<|im_end|>",
    ]
    assert trajectory.completion == "five"


def test_a_row_shares_the_tokens_of_the_turns_before_it() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("hi")]
        messages.append(await ask(client, messages))
        for text in ("x", "y"):
            await ask(client, [*messages, user(text)])

    trajectory = play(with_client(talk), scripted("short", "first", "second"))
    start = opening("hi") + "short<|im_end|>\n"
    assert rows_of(trajectory) == [
        start + opening(text) + said + "<|im_end|>" for text, said in (("x", "first"), ("y", "second"))
    ]
    assert decode(trajectory.token_ids).count("short") == 1


def test_a_session_keeps_each_token_of_a_long_conversation_once() -> None:
    """A token's id and logprob take 8 bytes, its text about 1 in the conversation and 1 in the messages; a copy for
    each answer took 9 bytes for half of the answers."""
    num_turns = 16

    async def generate(token_ids: list[int], **_: Any) -> Completion:  # an engine would keep what it is asked
        said = [*encode("x" * 300), END]
        return Completion(said, [-0.5] * len(said), [3] * len(said), "stop")

    async def talk() -> tuple[int, int]:
        workflow = workflow_of(lambda *_: None)
        session = AgentSession(PROMPT, generate, workflow.template, workflow.parser, 100_000)
        messages: list[Any] = [user("hi")]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for turn in range(num_turns):
                body = json.loads(json.dumps({"messages": messages, "tools": [ADD]}))  # as in each HTTP request
                answer = await session.answer(await session.prepare(AgentRequest(**body)))
                messages += [answer.message, user(f"{turn} " + "y" * 300)]
            del body, answer, messages
            num_bytes = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        return num_bytes, len(session.trajectory(None).token_ids)

    num_bytes, num_tokens = asyncio.run(talk())
    assert num_tokens > 300 * num_turns
    assert num_bytes <= 45 * num_tokens


def test_a_repeated_request_has_two_samples_even_if_they_are_equal() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        await ask(client, [user("hi")])
        await ask(client, [user("hi")])

    trajectory = play(with_client(talk), scripted("one", "one"))
    assert written(trajectory) == ["one<|im_end|>"] * 2
    assert rows_of(trajectory) == [opening("hi") + "one<|im_end|>"] * 2
    assert trajectory.metrics == {"turns": 2.0, "rows": 2.0}
    assert sum(trajectory.loss_mask) == 2 * len([*encode("one"), END])


def test_fifty_sessions_at_once_never_mix() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        number = prompt.fields["number"]
        messages: list[Any] = [user(f"[{number}]")]
        async with client_of(base_url, api_key) as client:
            for turn in range(3):
                message = await ask(client, messages)
                assert message.content == f"{number}.{turn}"
                messages += [message, user(f"[{number}]")]
        return float(number)

    def script(prompt: list[int], sampling: Any, sample: int) -> list[int]:
        text = decode(prompt)
        number = text.rpartition("[")[2].partition("]")[0]
        return [*encode(f"{number}.{text.count('assistant') - 1}"), END]

    engine = started(FakeEngine(script=script, seconds_per_token=lambda prompt, sampling: 0.001 * (len(prompt) % 3)))

    async def scenario() -> list[Trajectory]:
        workflow = workflow_of(agent, max_agents=50)
        prompts = [Prompt(id=f"p{number}", token_ids=[5], fields={"number": number}) for number in range(50)]
        return await asyncio.gather(*(workflow.run(prompt, generate_with(engine)) for prompt in prompts))

    for number, trajectory in enumerate(asyncio.run(scenario())):
        assert written(trajectory) == [f"{number}.{turn}<|im_end|>" for turn in range(3)]
        assert decode(trajectory.token_ids).count(f"[{number}]") == 3
        assert trajectory.rewards[-1] == number
        assert trajectory.metrics["rows"] == 1


def test_max_agents_run_at_a_time_and_the_others_wait() -> None:
    running = most = 0

    async def talk(client: AsyncOpenAI) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await ask(client, [user("hi")])
        running -= 1

    async def scenario() -> int:
        workflow = workflow_of(with_client(talk), max_agents=3)
        generate = generate_with(started(FakeEngine()))
        return len(await asyncio.gather(*(workflow.run(Prompt(f"{i}", token_ids=[5]), generate) for i in range(8))))

    assert asyncio.run(scenario()) == 8
    assert most == 3


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_request_may_ask_for_less_than_the_run_but_not_for_more(name: str) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        for asked in (5, 1000):
            answer = await client.chat.completions.create(model="policy", messages=[user("hi")], **{name: asked})
            assert answer.choices[0].finish_reason == "length"

    engine = started(FakeEngine(script=lambda prompt, sampling, sample: encode("x" * 500)))
    trajectory = play(with_client(talk), engine)
    assert [request.sampling.max_new_tokens for request in engine.requests] == [5, SAMPLING.max_new_tokens]
    assert trajectory.is_truncated


def test_a_turn_that_was_cut_off_goes_on_after_an_end_that_is_not_trained() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("hi")]
        messages += [await ask(client, messages, max_tokens=3), user("more")]
        await ask(client, messages)

    trajectory = play(with_client(talk), scripted("<<<<<", "two"))
    assert decode(trajectory.token_ids) == opening("hi") + "<<<<|im_end|>\n" + opening("more") + "two<|im_end|>"
    assert written(trajectory) == ["<<<", "two<|im_end|>"]
    assert (trajectory.metrics["rows"], trajectory.is_truncated) == (1, False)


async def goes_on_forever(client: AsyncOpenAI) -> float:
    messages: list[Any] = [user("hi")]
    while True:
        messages += [await ask(client, messages), user("more")]


def test_an_agent_that_fails_because_there_is_no_room_has_a_truncated_trajectory() -> None:
    engine = started(FakeEngine(script=lambda prompt, sampling, sample: [*encode("on"), END]))
    trajectory = play(with_client(goes_on_forever), engine, max_tokens=150, truncated_reward=-1.0)
    assert trajectory.is_truncated
    assert 100 < len(trajectory.token_ids) <= 150
    assert trajectory.rewards[-1] == -1.0


def test_no_room_is_an_error_that_the_agent_can_handle() -> None:
    async def talk(client: AsyncOpenAI) -> float:
        await ask(client, [user("hi")])
        with pytest.raises(
            openai.BadRequestError,
            match=r"too long: \d+ tokens > 59 maximum.* have \d+ tokens, .* fewer than the workflow's max_tokens=60",
        ) as caught:
            await ask(client, [user("x" * 60)])
        assert caught.value.code == "context_length_exceeded"
        return 0.25

    trajectory = play(with_client(talk), scripted("fine"), max_tokens=60)
    assert not trajectory.is_truncated  # the agent went on
    assert trajectory.rewards[-1] == 0.25


async def asks_anew(client: AsyncOpenAI) -> float:
    while True:
        await ask(client, [user("hi")])


@pytest.mark.parametrize(
    ("limits", "agent", "num_turns", "message"),
    [
        ({"requests": 3}, asks_anew, 3, "limits.requests=3 with 3 answers"),
        ({"requests": 3}, goes_on_forever, 3, "limits.requests=3 with 3 answers"),
        ({"turns": 2}, goes_on_forever, 2, "limits.turns=2 with 2 answers in one conversation"),
        ({"rows": 2}, asks_anew, 2, "limits.rows=2 with 2 rows"),
        ({"total_tokens": 200}, asks_anew, 8, r"limits.total_tokens=200 with 213 tokens in all its rows"),
        ({"total_tokens": 200}, goes_on_forever, 7, r"limits.total_tokens=200 with 210 tokens in all its rows"),
    ],
    ids=["requests", "requests of a conversation", "turns", "rows", "tokens of rows", "tokens of one row"],
)
def test_an_agent_beyond_a_limit_gets_an_error_and_its_trajectory_is_truncated(
    limits: dict[str, int], agent: Any, num_turns: int, message: str
) -> None:
    refusals: list[openai.BadRequestError] = []

    async def talk(client: AsyncOpenAI) -> float:
        try:
            return float(await agent(client))
        except openai.BadRequestError as error:
            refusals.append(error)
            raise

    engine = started(FakeEngine(script=lambda prompt, sampling, sample: [*encode("on"), END]))
    trajectory = play(with_client(talk), engine, limits=AgentLimits(**limits), truncated_reward=-1.0)
    assert (len(trajectory.turns), trajectory.is_truncated, trajectory.rewards[-1]) == (num_turns, True, -1.0)
    assert (len(refusals), refusals[0].code) == (1, "limit_exceeded")
    assert re.search(message, str(refusals[0]))


def test_turns_count_in_each_conversation() -> None:
    async def talk(client: AsyncOpenAI) -> float:
        for _ in range(3):
            messages: list[Any] = [user("hi")]
            messages += [await ask(client, messages), user("more")]
            await ask(client, messages)
        return 1.0

    engine = started(FakeEngine(script=lambda prompt, sampling, sample: [*encode("on"), END]))
    trajectory = play(with_client(talk), engine, limits=AgentLimits(turns=2))
    assert (len(trajectory.turns), trajectory.is_truncated) == (6, False)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0.2, r"did not finish within 0\.2 s"),
        (0, "agent_timeout_s column of prompt 'a' must be a finite number above 0, got 0"),
        ("soon", "must be a finite number above 0, got 'soon'"),
        (float("nan"), "must be a finite number above 0, got nan"),
    ],
)
def test_a_row_has_its_own_deadline(value: Any, message: str) -> None:
    async def talk(client: AsyncOpenAI) -> float:
        await asyncio.sleep(600)
        return 1.0

    with pytest.raises(RolloutError, match=message):
        play(with_client(talk), scripted("fine"), Prompt("a", token_ids=[5], fields={"agent_timeout_s": value}))


class Whereabouts(PreTrainedTokenizerFast):
    """Notes which threads encoded long texts."""

    def __call__(self, text: Any, *args: Any, **kwargs: Any) -> Any:
        if len(text) > 1000:
            self.threads.append(threading.current_thread().name)
        return super().__call__(text, *args, **kwargs)


def test_a_long_message_is_encoded_in_a_thread_so_that_the_other_agents_go_on() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        messages = [user("hi")]
        messages += [await ask(client, messages), user("x" * 100_000)]
        with pytest.raises(openai.BadRequestError, match="must have fewer than the workflow's max_tokens=400"):
            await ask(client, messages)
        with pytest.raises(openai.BadRequestError, match="must have fewer than the workflow's max_tokens=400"):
            await ask(client, [user("y" * 100_000)])

    tokenizer = Whereabouts(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="<|im_end|>")
    tokenizer.chat_template, tokenizer.threads = TOKENIZER.chat_template, []
    workflow = AgentWorkflow(tokenizer, with_client(talk), max_tokens=400)
    asyncio.run(workflow.run(PROMPT, generate_with(scripted("fine"))))
    assert set(tokenizer.threads) == {"lightrl-encode"}
    assert len(tokenizer.threads) >= 2


def test_a_template_that_rewrites_history_drops_the_trajectory_and_says_so() -> None:
    forgets = "{% for message in messages %}{{ message['content'] | replace('x', '') }}|{% endfor %}"

    async def talk(client: AsyncOpenAI) -> None:
        messages: list[Any] = [user("hi")]
        messages += [await ask(client, messages), user("more")]
        with pytest.raises(openai.InternalServerError, match="rewrites history"):
            await ask(client, messages)

    with pytest.raises(RolloutError, match="rewrites history"):
        play(with_client(talk), scripted("axe"), template=forgets)


def test_a_template_that_cannot_render_the_messages_drops_the_trajectory_and_says_so() -> None:
    strict = "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"

    async def talk(client: AsyncOpenAI) -> None:
        await ask(client, [user("hi"), {"role": "tool", "tool_call_id": "1", "content": "5"}])

    with pytest.raises(RolloutError, match="raised TemplateError: no tools"):
        play(with_client(talk), scripted("one"), template=strict + "{{ m['content'] }}{% endfor %}")
