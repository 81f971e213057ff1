"""Three protocols in front of one session: tools and thinking of each, streams, and what each of them refuses."""

import asyncio
import functools
import json
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from agent_cases import (
    PROMPT,
    anthropic_client_of,
    ask,
    client_of,
    decode,
    encode,
    generate_with,
    play,
    scripted,
    user,
    with_client,
    workflow_of,
    written,
)
from chat_texts import END, started
from openai import AsyncOpenAI
from waits import until

from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt, Trajectory
from lightrl.workflows.agent_workflow import endpoint

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT_TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
MESSAGES_TOOL: Any = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
RESPONSES_TOOL: Any = {"type": "function", "name": "add", "description": "Adds.", "parameters": SCHEMA, "strict": False}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'


with_anthropic = functools.partial(with_client, make=anthropic_client_of)


def messages(client: anthropic.AsyncAnthropic, sent: list[Any], **settings: Any) -> Any:
    return client.messages.create(**{"model": "policy", "max_tokens": 100, "messages": sent, **settings})


def responses(client: AsyncOpenAI, sent: Any, **settings: Any) -> Any:
    return client.responses.create(**{"model": "policy", "input": sent, **settings})


def test_the_three_protocols_continue_one_conversation() -> None:
    """The same messages have the same tokens, whoever sends them."""

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            first = await ask(client, [user("hi")], tools=[CHAT_TOOL])
            use = {"type": "tool_use", "id": first.tool_calls[0].id, "name": "add", "input": {"a": 2}}
            result = {"type": "tool_result", "tool_use_id": use["id"], "content": "3"}
            sent = [user("hi"), {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
            second = await messages(other, sent, tools=[MESSAGES_TOOL])
            call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a":2}'}
            items = [user("hi"), call, {"type": "function_call_output", "call_id": "c", "output": "3"}]
            items += [{"role": "assistant", "content": second.content[0].text}, user("more")]
            third = await responses(client, items, tools=[RESPONSES_TOOL])
            assert third.output_text == "three"

    trajectory = play(agent, scripted(CALL, "two", "three"))
    assert written(trajectory) == [f"{CALL}<|im_end|>", "two<|im_end|>", "three<|im_end|>"]
    assert trajectory.metrics["rows"] == 1


def test_thinking_comes_apart_from_the_text_and_goes_back_in_each_protocol() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            message = await ask(client, [user("hi")])
            assert (message.reasoning_content, message.content) == ("Hm.", "one")
            sent = [user("hi"), {"role": "assistant", "content": "one"}, user("more")]
            thinking = {"type": "enabled", "budget_tokens": 1024}
            answer = await messages(other, sent, thinking=thinking)
            assert [block.type for block in answer.content] == ["thinking", "text"]
            assert answer.content[0].thinking == "Hm."
            items = [user("hi"), {"role": "assistant", "content": "one"}, user("more"), user("again")]
            response = await responses(client, items, include=["reasoning.encrypted_content"])
            assert response.output[0].content[0].text == "Hm."
            assert response.output[0].encrypted_content
            omitted = await messages(other, [user("x")], thinking={"type": "adaptive", "display": "omitted"})
            assert (omitted.content[0].thinking, bool(omitted.content[0].signature)) == ("", True)
            (only,) = (await messages(other, [user("y")])).content
            assert only.text == "one"
            back = [{"role": "assistant", "content": [block.to_dict() for block in omitted.content]}, user("z")]
            await messages(other, [user("another"), *back])

    engine = scripted(*["<think>Hm.</think>one"] * 6)
    play(agent, engine, template=REASONING)
    assert decode(engine.requests[-1].token_ids).count("[Hm.]one") == 1


@pytest.mark.parametrize(
    "thinking",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {
            "reasoning_details": [
                {"type": "reasoning.text", "text": "Hm."},
                {"type": "reasoning.encrypted", "data": "x"},
            ]
        },
    ],
    ids=lambda thinking: next(iter(thinking)),
)
def test_thinking_goes_back_under_any_name_that_clients_use(thinking: dict[str, Any]) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        await ask(client, [user("hi"), {"role": "assistant", "content": "one", **thinking}, user("more")])

    engine = scripted("two")
    play(with_client(talk), engine, template=REASONING)
    assert "[Hm.]one" in decode(engine.requests[-1].token_ids)


REASONING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['reasoning_content'] %}{{ '[' + message['reasoning_content'] + ']' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def test_arguments_that_the_agent_completes_with_defaults_are_still_our_call() -> None:
    async def talk(client: anthropic.AsyncAnthropic) -> None:
        (use,) = (await messages(client, [user("hi")], tools=[MESSAGES_TOOL])).content
        completed = {**use.to_dict(), "input": {"b": False, **use.input}}
        result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "3"}]}
        sent = [user("hi"), {"role": "assistant", "content": [completed]}, {"role": "user", "content": [result]}]
        await messages(client, sent, tools=[MESSAGES_TOOL])

    trajectory = play(with_anthropic(talk), scripted(CALL, "two"))
    assert written(trajectory) == [f"{CALL}<|im_end|>", "two<|im_end|>"]


def test_of_two_equal_answers_the_one_whose_call_was_made_is_continued() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        first = await ask(client, [user("hi")], tools=[CHAT_TOOL])
        await ask(client, [user("hi")], tools=[CHAT_TOOL])
        sent = [user("hi"), first, {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "3"}]
        await ask(client, sent, tools=[CHAT_TOOL])

    first, second = f"<think>First.</think>{CALL}", f"<think>Second.</think>{CALL}"
    trajectory = play(with_client(talk), scripted(first, second, "three"), max_tokens=1000)
    assert written(trajectory) == [f"{text}<|im_end|>" for text in (first, second, "three")]
    *_, continued = trajectory.rows
    read = decode([id_ for span in continued for id_ in trajectory.token_ids[slice(*span)]])
    assert ("First." in read, "Second." in read, read.endswith("three<|im_end|>")) == (True, False, True)


def test_the_policy_reads_what_is_wrong_with_a_malformed_call_and_the_agent_gets_the_corrected_one() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        message = await ask(client, [user("hi")], tools=[CHAT_TOOL])
        assert json.loads(message.tool_calls[0].function.arguments) == {"a": 2}
        sent = [user("hi"), message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}]
        assert (await ask(client, sent, tools=[CHAT_TOOL])).content == "three"

    trajectory = play(with_client(talk), scripted("<tool_call>{oh</tool_call>", CALL, "three"), max_tokens=1000)
    assert written(trajectory) == ["<tool_call>{oh</tool_call><|im_end|>", f"{CALL}<|im_end|>", "three<|im_end|>"]
    between = decode(trajectory.token_ids[trajectory.turns[0].end : trajectory.turns[1].start])
    assert between.startswith("\n<|im_start|>tool\nError: the call is not valid JSON: Expecting property name")


@pytest.mark.parametrize(("max_tokens", "num_turns"), [(2000, 4), (290, 1)], ids=["always", "without space"])
def test_a_call_that_stays_malformed_reaches_the_agent_as_text(max_tokens: int, num_turns: int) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        message = await ask(client, [user("hi")], tools=[CHAT_TOOL])
        assert (message.tool_calls, message.content) == (None, "<tool_call>{oh</tool_call>")

    engine = scripted(*["<tool_call>{oh</tool_call>"] * num_turns)
    assert len(play(with_client(talk), engine, max_tokens=max_tokens).turns) == num_turns


def test_a_custom_tool_and_one_of_a_namespace_come_back_as_codex_expects_them() -> None:
    tools = [
        {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "text"}},
        {"type": "namespace", "name": "agents", "description": "", "tools": [RESPONSES_TOOL]},
        {"type": "web_search"},
    ]
    patch = '<tool_call>{"name": "apply_patch", "arguments": {"input": "***"}}</tool_call>'
    add = CALL.replace('"add"', '"agents.add"')

    async def talk(client: AsyncOpenAI) -> None:
        first = (await responses(client, "hi", tools=tools)).output
        assert [(item.type, item.name, item.input) for item in first] == [("custom_tool_call", "apply_patch", "***")]
        output = {"type": "custom_tool_call_output", "call_id": first[0].call_id, "output": "ok"}
        items = [user("hi"), first[0].to_dict(), output]
        (second,) = (await responses(client, items, tools=tools)).output
        assert (second.name, second.namespace, json.loads(second.arguments)) == ("add", "agents", {"a": 2})
        items += [second.to_dict(), {"type": "function_call_output", "call_id": second.call_id, "output": "3"}]
        assert (await responses(client, items, tools=tools)).output_text == "Done."

    assert len(play(with_client(talk), scripted(patch, add, "Done."), max_tokens=2000).turns) == 3


def test_a_deferred_tool_is_shown_where_a_result_refers_to_it() -> None:
    async def talk(client: anthropic.AsyncAnthropic) -> None:
        tools = [{"name": "find", "input_schema": {"type": "object"}}, {**MESSAGES_TOOL, "defer_loading": True}]
        (use,) = (await messages(client, [user("hi")], tools=tools)).content
        reference = [{"type": "tool_reference", "tool_name": "add"}]
        result = {"type": "tool_result", "tool_use_id": use.id, "content": reference}
        sent = [user("hi"), {"role": "assistant", "content": [use.to_dict()]}, {"role": "user", "content": [result]}]
        await messages(client, sent, tools=tools)

    find = '<tool_call>{"name": "find", "arguments": {}}</tool_call>'
    trajectory = play(with_anthropic(talk), scripted(find, "two"), max_tokens=1000)
    shown, _, later = decode(trajectory.token_ids).partition("<|im_end|>")
    assert ("Adds." in shown, "Adds." in later) == (False, True)


def test_what_the_system_says_later_is_a_users_message_for_strict_templates() -> None:
    strict = (
        "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ raise_exception('no') }}{% endif %}"
    )

    async def talk(client: anthropic.AsyncAnthropic) -> None:
        await messages(
            client, [user("hi"), {"role": "system", "content": "Be brief."}], system=[{"type": "text", "text": "A"}]
        )

    async def chat(client: AsyncOpenAI) -> None:
        first = [{"role": "system", "content": "A"}, user("hi"), {"role": "developer", "content": "Be brief."}]
        assert (await ask(client, first)).content == "one"

    trajectory = play(with_client(chat), scripted("one"), template=strict + REASONING)
    assert trajectory.token_ids == play(with_anthropic(talk), scripted("one"), template=strict + REASONING).token_ids
    assert "system\nA<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>user\nBe brief." in decode(
        trajectory.token_ids
    )


def test_each_protocol_gives_one_call_alone_if_the_agent_asks_for_it_and_counts_the_thinking() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            for is_one in (True, False):
                single: dict[str, Any] = {"parallel_tool_calls": False} if is_one else {}
                ask_for: dict[str, Any] = {"tool_choice": {"type": "auto", "disable_parallel_tool_use": is_one}}
                answer = await messages(other, [user("a")], tools=[MESSAGES_TOOL], max_tokens=200, **ask_for)
                assert sum(block.type == "tool_use" for block in answer.content) == 2 - is_one
                answer = await responses(client, "a", tools=[RESPONSES_TOOL], **single)
                assert sum(item.type == "function_call" for item in answer.output) == 2 - is_one
                assert answer.parallel_tool_calls is not is_one
                assert answer.usage.output_tokens_details.reasoning_tokens == len("Hm.")
                chat = {"model": "policy", "messages": [user("a")], "tools": [CHAT_TOOL]}
                answer = await client.chat.completions.create(**chat, **single)
                assert len(answer.choices[0].message.tool_calls) == 2 - is_one
                assert answer.usage.completion_tokens_details.reasoning_tokens == len("Hm.")

    play(agent, scripted(*[f"<think>Hm.</think>{CALL}{CALL}"] * 6), max_tokens=1000)


def test_what_a_template_refuses_is_refused_in_each_protocol_and_the_agent_goes_on() -> None:
    no_double = (
        "{% for m in messages %}{% if m.content == 'bad' %}{{ raise_exception('no bad') }}{% endif %}{% endfor %}"
    )

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            sent: list[Any] = [user("hi")]
            sent += [{"role": "assistant", "content": (await ask(client, sent)).content}, user("bad")]
            for send in (ask(client, sent), responses(client, sent), messages(other, sent)):
                with pytest.raises((openai.BadRequestError, anthropic.BadRequestError), match="no bad"):
                    await send
            assert (await ask(client, [*sent[:2], user("good")])).content == "two"

    assert play(agent, scripted("one", "two"), template=no_double + REASONING).metrics["rows"] == 1


def test_a_malformed_call_reaches_the_agent_as_text_if_the_template_has_no_messages_of_tools() -> None:
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{% endfor %}"

    async def talk(client: AsyncOpenAI) -> None:
        assert (await ask(client, [user("hi")], tools=[CHAT_TOOL])).content == "<tool_call>{oh</tool_call>"

    play(with_client(talk), scripted("<tool_call>{oh</tool_call>"), template=strict + REASONING)


def test_a_completion_that_is_cut_off_says_so_in_each_protocol() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            assert (await messages(other, [user("hi")], max_tokens=3)).stop_reason == "max_tokens"
            response = await responses(client, "hi", max_output_tokens=3)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    play(agent, scripted("longer", "longer"))


def test_a_stream_that_waits_shows_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "WAITING_S", 0.02)

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        headers = {"x-api-key": api_key}
        bodies = {
            "messages": {"messages": [user("hi")]},
            "chat/completions": {"messages": [user("hi")]},
            "responses": {"input": "hi"},
        }
        async with aiohttp.ClientSession(headers=headers) as http:
            for path, body in bodies.items():
                async with http.post(f"{base_url}/{path}", json={**body, "stream": True}) as response:
                    texts[path] = await response.text()
        async with client_of(base_url, api_key) as client:
            kinds = [event.type async for event in await responses(client, "hi", stream=True)]
            assert kinds[-1] == "response.completed"

    texts: dict[str, str] = {}
    engine = started(FakeEngine(seconds_per_token=0.01, script=lambda *_: [*encode("a long answer"), END]))
    play(agent, engine)
    assert "event: ping\n" in texts["messages"]
    assert ": waiting\n" in texts["chat/completions"]
    assert texts["chat/completions"].endswith("data: [DONE]\n\n")
    assert texts["responses"].count("event: response.in_progress\n") > 1


def test_a_stream_that_has_begun_ends_with_the_error_in_the_form_of_its_protocol(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "WAITING_S", 0.01)
    answered = generate_with(scripted("one"))

    async def generate(token_ids: list[int], *, max_new_tokens: int | None = None) -> Any:
        if "late" in decode(token_ids):
            await asyncio.sleep(0.05)
            raise ValueError("no such context")
        return await answered(token_ids, max_new_tokens=max_new_tokens)

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        sent = [user("late")]
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            with pytest.raises(anthropic.APIStatusError, match="no such context"):
                _ = [event async for event in await messages(other, sent, stream=True)]
            chunks = await client.chat.completions.create(model="policy", messages=sent, stream=True)
            with pytest.raises(openai.APIError, match="no such context"):
                _ = [chunk async for chunk in chunks]
            *_, last = [event async for event in await responses(client, sent, stream=True)]
            assert (last.type, last.response.error.message) == ("response.failed", "no such context")
            await ask(client, [user("hi")])

    assert len(asyncio.run(workflow_of(agent).run(PROMPT, generate)).turns) == 1


@pytest.mark.parametrize("path", ["messages", "responses"])
def test_a_client_that_closes_its_stream_amid_a_token_takes_its_request_from_the_engine(path: str) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        body = {"messages": [user("hi")], "input": "hi", "stream": True}
        async with aiohttp.ClientSession(headers={"x-api-key": api_key}) as http:
            given_up = asyncio.ensure_future(http.post(f"{base_url}/{path}", json=body))
            await until(lambda: engine.num_running)
            given_up.cancel()
        await until(lambda: not engine.num_running)
        async with client_of(base_url, api_key) as client:
            await ask(client, [user("hi")])

    engine = started(FakeEngine(seconds_per_token=lambda prompt, sampling: 0.0 if engine.requests[1:] else 3600.0))
    assert len(play(agent, engine).turns) == 1


def test_a_key_opens_its_own_session_and_no_other() -> None:
    given: list[tuple[str, str]] = []

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        given.append((base_url, api_key))
        while len(given) < 2:
            await asyncio.sleep(0.01)
        (one, key), (other, other_key) = given
        for url, wrong in ((one, other_key), (other, key)):
            async with anthropic_client_of(url, wrong) as client:
                with pytest.raises(anthropic.AuthenticationError, match="wrong or belongs to another session"):
                    await messages(client, [user("hi")])
        async with anthropic_client_of(base_url, api_key) as client:
            await messages(client, [user(f"[{prompt.id}]")])

    async def scenario() -> list[Trajectory]:
        workflow, generate = workflow_of(agent), generate_with(scripted("one", "two"))
        prompts = [Prompt(name, token_ids=[5]) for name in ("a", "b")]
        return await asyncio.gather(*(workflow.run(prompt, generate) for prompt in prompts))

    for name, trajectory in zip("ab", asyncio.run(scenario()), strict=True):
        assert f"[{name}]" in decode(trajectory.token_ids)
        assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"model": "gpt-4"}, "There is no model 'gpt-4'. The policy's name is 'policy'", id="a model"),
        pytest.param(
            {"tools": [{**MESSAGES_TOOL, "input_schema": {"type": "objekt"}}]},
            "The arguments of the tool 'add' must have a valid JSON schema: 'objekt' is not valid",
            id="a schema",
        ),
        pytest.param({"tools": [{"input_schema": SCHEMA}]}, "A tool must have a name, got None", id="a nameless tool"),
        pytest.param({"tool_choice": {"type": "any"}}, "requires a call, but the tools are", id="no tool to call"),
        pytest.param({"tool_choice": {"type": "most"}}, "tool_choice must be auto, none, required", id="a choice"),
        pytest.param({"stop_sequences": [1]}, "stop_sequences must be a string or a list", id="stop texts"),
        pytest.param({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0", id="no tokens"),
        pytest.param({"messages": []}, "at least one message", id="no messages"),
        pytest.param(
            {"messages": [{"role": "tool", "content": "x"}]}, "must be user, assistant or system", id="a role"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "reads images|accepts only token ids",
            id="an image",
        ),
        pytest.param(
            {"extra_body": {"output_config": {"format": {"type": "json_schema"}}}},
            "A response format must be text",
            id="a format",
        ),
    ],
)
def test_what_messages_cannot_serve_drops_the_trajectory_with_its_reason(settings: dict[str, Any], says: str) -> None:
    engine = scripted("one")
    with pytest.raises(RolloutError, match=says):
        play(with_anthropic(lambda client: messages(client, **{"sent": [user("hi")], **settings})), engine)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        pytest.param({"model": "gpt-4"}, "There is no model 'gpt-4'", id="a model"),
        pytest.param({"previous_response_id": "resp_1"}, "nothing is stored", id="a stored response"),
        pytest.param({"text": {"format": {"type": "json_object"}}}, "does not support grammars", id="a format"),
        pytest.param({"sent": []}, "input must be text, or a list with at least one item", id="no input"),
        pytest.param(
            {"sent": [{"type": "item_reference", "id": "x"}]},
            "No response in this session has the item 'x'",
            id="a reference",
        ),
        pytest.param(
            {"sent": [{"type": "function_call", "call_id": "x"}]},
            "with the name None is not supported",
            id="a nameless call",
        ),
        pytest.param(
            {"tools": [{**RESPONSES_TOOL, "parameters": [1]}]}, r"\[1\] is not of type 'object'", id="a schema"
        ),
        pytest.param({"max_output_tokens": True}, "max_output_tokens must be an integer >= 1", id="true for tokens"),
    ],
)
def test_what_responses_cannot_serve_drops_the_trajectory_with_its_reason(settings: dict[str, Any], says: str) -> None:
    engine = scripted("one")
    with pytest.raises(RolloutError, match=says):
        play(with_client(lambda client: responses(client, **{"sent": "hi", **settings})), engine)
    assert engine.requests == []


def test_a_body_over_the_limit_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BODY_BYTES", 2_000_000)

    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match=r"more than 2 MB\. Send shorter") as caught:
            await ask(client, [user("x" * 2_000_000)])
        assert caught.value.status_code == 413
        await ask(client, [user("hi")])

    assert len(play(with_client(talk), scripted("one"), prompt=PROMPT).turns) == 1
