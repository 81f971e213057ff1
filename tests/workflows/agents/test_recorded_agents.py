"""Recorded requests of Claude Code and Codex are answered with event streams that the public clients take as valid."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from agent_cases import SAMPLING, anthropic_client_of, client_of, decode, play, scripted, written
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from lightrl.trajectory import Prompt

REQUESTS = Path(__file__).parent / "agent_requests"
LONG = {"sampling": replace(SAMPLING, max_new_tokens=1000), "max_tokens": 200_000}


def bodies(name: str) -> list[Any]:
    return list(json.loads((REQUESTS / f"{name}.json").read_text()))


def turn_text(name: str, arguments: Any) -> str:
    return f"<think>Two.</think>On.<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def ask_messages(client: anthropic.AsyncAnthropic, body: Any) -> list[dict[str, Any]]:
    """The content of the streamed answer, each event of which has a valid form."""
    check: Callable[[Any], Any] = TypeAdapter(RawMessageStreamEvent).validate_python
    stream = await client.messages.create(model="policy", max_tokens=1, messages=[], stream=True, extra_body=body)
    kinds = [check(event.to_dict()).type async for event in stream]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    arguments = {"model": "policy", "max_tokens": 1, "messages": [], "extra_body": body}
    async with client.messages.stream(**arguments) as helper:
        message = await helper.get_final_message()
    assert message.stop_reason in ("tool_use", "end_turn")
    return [block.to_dict() for block in message.content]


def test_claude_codes_requests_are_one_trajectory_of_exact_tokens() -> None:
    first, last = bodies("claude")
    texts = []
    for message in last["messages"]:
        for block in message["content"]:
            if isinstance(block, dict) and block["type"] == "tool_use":
                texts.append(turn_text(block["name"], block["input"]))
    # The stream helper of the client repeats each request: one of the two equal answers is continued.
    engine = scripted(*(text for text in [*texts, "Done."] for _ in range(2)), context=200_000)

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with anthropic_client_of(base_url, api_key) as client:
            history: list[Any] = []
            used = ""
            for message in last["messages"]:
                if message["role"] == "assistant":
                    content = await ask_messages(client, {**first, "messages": history})
                    assert [block["type"] for block in content] == ["thinking", "text", "tool_use"]
                    assert content[2]["input"] == message["content"][1]["input"]
                    used = content[2]["id"]
                    message = {"role": "assistant", "content": content}
                elif history and message["role"] == "user":
                    message = {**message, "content": [{**message["content"][0], "tool_use_id": used}]}
                history.append(message)
            count = await client.messages.count_tokens(
                model="policy", messages=history, system=last["system"], tools=last["tools"]
            )
            assert count.input_tokens > 1000
            (block,) = await ask_messages(client, {**last, "messages": history})
            return float(block["text"] == "Done.")

    trajectory = play(agent, engine, **LONG)
    assert written(trajectory) == [f"{text}<|im_end|>" for text in [*texts, "Done."] for _ in range(2)]
    assert trajectory.metrics["rows"] == len(trajectory.rows) == len(texts) + 2
    assert trajectory.rewards[-1] == 1.0
    assert "<|im_start|>tool\npassed<|im_end|>" in decode(trajectory.token_ids)


async def ask_responses(client: openai.AsyncOpenAI, body: Any) -> list[dict[str, Any]]:
    """The output of the streamed response, each event of which has a valid form."""
    check: Callable[[Any], Any] = TypeAdapter(ResponseStreamEvent).validate_python
    events = [check(event.to_dict()) async for event in await client.responses.create(extra_body=body, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    async with client.responses.stream(**{key: body[key] for key in ("model", "input", "tools", "include")}) as helper:
        response = await helper.get_final_response()
    return [item.to_dict() for item in response.output]


def test_codexs_requests_are_one_trajectory_of_exact_tokens() -> None:
    first, last = bodies("codex")
    calls = [item for item in last["input"] if item["type"] == "function_call"]
    texts = [turn_text(call["name"], json.loads(call["arguments"])) for call in calls]
    engine = scripted(*(text for text in [*texts, "Done."] for _ in range(2)), context=200_000)

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            history: list[Any] = []
            called = ""
            for item in last["input"]:
                if item["type"] == "reasoning":
                    output = await ask_responses(client, {**first, "input": history})
                    assert [each["type"] for each in output] == ["reasoning", "message", "function_call"]
                    del output[0]["content"]  # Codex returns only what is encrypted
                    called = output[2]["call_id"]
                    history += output
                elif item["type"] == "function_call_output":
                    history.append({**item, "call_id": called})
                elif item["type"] == "message":
                    history.append(item)
            (message,) = await ask_responses(client, {**last, "input": history})
            return float(message["content"][0]["text"] == "Done.")

    trajectory = play(agent, engine, **LONG)
    assert written(trajectory) == [f"{text}<|im_end|>" for text in [*texts, "Done."] for _ in range(2)]
    assert trajectory.metrics["rows"] == len(trajectory.rows) == len(texts) + 2
    assert trajectory.rewards[-1] == 1.0
    tools = decode(trajectory.token_ids).partition("<|im_end|>")[0]
    assert '"name": "multi_agent_v1.spawn_agent"' in tools
    assert "web_search" not in tools


@pytest.mark.parametrize("name", ["claude", "codex"])
def test_the_records_name_no_machine_and_no_person(name: str) -> None:
    text = (REQUESTS / f"{name}.json").read_text()
    assert str(Path.home()) + "/" not in text
    assert "/sandbox/work" in text
