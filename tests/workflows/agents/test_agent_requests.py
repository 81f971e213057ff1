"""What agents ask for beyond messages: stop texts, constraints, choices, references, images, other models, limits."""

import asyncio
import contextlib
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
import torch
from agent_cases import (
    PROMPT,
    SAMPLING,
    TOKENIZER,
    anthropic_client_of,
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
from aiohttp import web
from aiohttp.test_utils import TestServer
from chat_texts import CONFIG, END, LETTERS, WRITES_IMAGES, letters, started
from images_cases import BLUE, HALF, IMAGE_TOKEN, RED, TOKENS_EACH, image_reader, image_spec, with_images
from moe_cases import engine_of
from openai import AsyncOpenAI
from tiny import char_tokenizer
from transformers import AutoModelForCausalLM

from lightrl.columns import SUPPORTS
from lightrl.engines.fake_engine import FakeEngine
from lightrl.engines.local.local_engine import LocalEngine
from lightrl.engines.servers.connection import ServerRefused
from lightrl.errors import RolloutError
from lightrl.experience import Experience
from lightrl.models.images import data_url
from lightrl.rewards import RewardHook
from lightrl.rewards.replay import FailureLog
from lightrl.rollout import RolloutSettings
from lightrl.rollout.controller import RolloutController
from lightrl.rollout.runner import TrajectoryRunner
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Prompt, Sampling, Trajectory, read_records
from lightrl.workflows.agent_workflow import AgentLimits, AgentResult, AgentWorkflow, FrozenModel, RequestPattern
from lightrl.workflows.agent_workflow.chat_protocol import ChatExchange
from lightrl.workflows.agent_workflow.protocol import RequestRules
from lightrl.workflows.workflow import check_trajectory

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL: Any = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": SCHEMA}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
)


def says(*ids: Sequence[int]) -> FakeEngine:
    """A policy that samples exactly these tokens, request by request."""
    sampled = iter(ids)
    return started(FakeEngine(script=lambda prompt, sampling, sample: list(next(sampled))))


# ---- stop texts


@pytest.mark.parametrize("protocol", ["chat", "messages"])
def test_the_tokens_up_to_the_one_that_completes_a_stop_text_train_and_later_ones_do_not(protocol: str) -> None:
    """The stop text `xa` ends inside the token `ab`, which the policy sampled as a whole."""
    ab = LETTERS.index("ab")

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        if protocol == "chat":
            async with client_of(base_url, api_key) as client:
                answer = await client.chat.completions.create(model="policy", messages=[user("hi")], stop=["no", "xa"])
                assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("on", "stop")
                assert answer.usage.completion_tokens == 4
                await ask(client, [user("hi"), answer.choices[0].message, user("more")])
            return
        async with anthropic_client_of(base_url, api_key) as other:
            message = {"model": "policy", "max_tokens": 100}
            first = await other.messages.create(messages=[user("hi")], stop_sequences=["xa"], **message)
            assert (first.content[0].text, first.stop_reason, first.stop_sequence) == ("on", "stop_sequence", "xa")
            again = [user("hi"), {"role": "assistant", "content": first.content}, user("more")]
            assert (await other.messages.create(messages=again, **message)).stop_reason == "end_turn"

    engine = says([*letters("onx"), ab, *letters("never"), END], [*encode("two"), END])
    trajectory = play(agent, engine)
    assert trained(trajectory) == [*letters("onx"), ab, *encode("two"), END]
    read = encode("<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    start = encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert engine.requests[1].token_ids == [*start, *letters("onx"), ab, *read]
    assert (trajectory.metrics["rows"], trajectory.is_truncated) == (1, False)


@pytest.mark.parametrize("sampling", [SAMPLING, replace(SAMPLING, top_k=9)], ids=["all tokens", "top-k"])
def test_a_cut_answer_has_the_tokens_logprobs_and_supports_of_the_answer_that_was_not_cut(sampling: Sampling) -> None:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(CONFIG)

    def played(engine: LocalEngine, **settings: Any) -> Trajectory:
        async def talk(client: AsyncOpenAI) -> None:
            await ask(client, [user("hi")], **settings)

        return play(with_client(talk), engine, sampling=sampling)

    with engine_of(model) as engine:
        whole = played(engine)
        start, end = whole.turns[0].start, whole.turns[0].end
        stop = decode(whole.token_ids[start + 4 : start + 6])
        cut = played(engine, stop=stop)
    num = next(n for n in range(start + 1, end) if stop in decode(whole.token_ids[start:n]))
    assert num <= start + 6 < end
    assert cut.token_ids == whole.token_ids[:num]
    assert cut.behavior_logprobs == whole.behavior_logprobs[:num]
    assert cut.weight_versions == whole.weight_versions[:num]
    assert cut.loss_mask == whole.loss_mask[:num]
    if sampling.is_truncated:
        codes = bytes(cut.columns[SUPPORTS.name])
        assert bytes(whole.columns[SUPPORTS.name]).startswith(codes)
    assert check_trajectory(cut, workflow_of(lambda *_: None), PROMPT) is cut


def test_an_agent_that_writes_the_stop_text_back_continues_the_row_and_any_other_text_begins_one() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        for end in ("</code>", "</eof>"):
            answer = await ask(client, [user("hi")], stop=["Observation:", "</code>"])
            assert answer.content == "<code>go()"
            again = {"role": "assistant", "content": answer.content + end}
            await ask(client, [user("hi"), again, user("more")])

    async def write_either_way(client: AsyncOpenAI) -> None:
        for stop in ([], ["</code>"]):
            await ask(client, [user("hi")], stop=stop)
        await ask(client, [user("hi"), {"role": "assistant", "content": "go()</code>"}, user("more")])

    engine = scripted("<think>A.</think>go()</code>", "<think>B.</think>go()</code>no", "two")
    play(with_client(write_either_way), engine, template=THINKS)
    assert "A.</think>go()</code><|im_end|>" in decode(engine.requests[2].token_ids)

    text = "<code>go()</code>\nObservation: invented"
    trajectory = play(with_client(talk), scripted(text, "two", text, "four"))
    assert written(trajectory) == ["<code>go()</code>", "two<|im_end|>", "<code>go()</code>", "four<|im_end|>"]
    assert trajectory.metrics["rows"] == 3


@pytest.mark.parametrize(
    ("text", "content", "num_calls", "sampled"),
    [
        ("<think>a. Hm.</think>b.c.", "b", 0, "<think>a. Hm.</think>b."),
        ("<think>a. Hm.", "", 0, "<think>a. Hm.<|im_end|>"),
        (f"{CALL}. next.", "", 1, f"{CALL}."),
        ('<tool_call>{"name": "add. x"}', '<tool_call>{"name": "add', 0, '<tool_call>{"name": "add.'),
        ("no stop", "no stop", 0, "no stop<|im_end|>"),
        ("ends.", "ends", 0, "ends."),
    ],
    ids=["after thinking", "in open thinking", "after a call", "in a call", "without a stop text", "at the end"],
)
def test_a_stop_text_counts_in_what_the_agent_sees(text: str, content: str, num_calls: int, sampled: str) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        answer = await ask(client, [user("hi")], stop=".", tools=[TOOL])
        assert (answer.content or "", len(answer.tool_calls or [])) == (content, num_calls)

    assert written(play(with_client(talk), scripted(text))) == [sampled]


# ---- constraints


def digits_only(grammar: str, token_ids: list[int]) -> list[int]:
    """The tokens that may follow in `{"a": <digit>}`."""
    allowed = ["{", '"', "a", '"', ":", " ", "0123456789", "}"]
    return [END] if len(token_ids) >= len(allowed) else letters(allowed[len(token_ids)])


def json_schema(**settings: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, **settings}}


def test_the_distribution_that_the_grammar_masks_is_the_support_of_each_token_in_each_protocol() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            first = await ask(client, [user("hi")], response_format=json_schema())
            assert json.loads(first.content)["a"] in range(10)
            text = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA}}
            second = await client.responses.create(model="policy", input="hi", text=text)
            assert json.loads(second.output_text)["a"] in range(10)
            third = await other.messages.create(
                model="policy",
                max_tokens=100,
                messages=[user("hi")],
                extra_body={"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            )
            assert json.loads(third.content[0].text)["a"] in range(10)

    engine = started(FakeEngine(allowed=digits_only))
    trajectory = play(agent, engine)
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}}
    assert [json.loads(request.sampling.grammar) for request in engine.requests] == [tag] * 3
    trajectory.reward = 0.0
    experience = Experience.from_trajectories([trajectory])
    assert experience.supports is not None
    for turn in trajectory.turns:
        logprobs = trajectory.behavior_logprobs[turn.start : turn.end]
        assert logprobs == pytest.approx([0.0] * 6 + [-math.log(10)] + [0.0] * 2)
    uniform = AutoModelForCausalLM.from_config(CONFIG)
    for parameter in uniform.parameters():
        torch.nn.init.zeros_(parameter)
    (outputs,) = SingleModel(uniform, LogprobSettings()).forward([experience])
    mask = experience.loss_mask
    assert torch.allclose(outputs.logprobs[mask], experience.behavior_logprobs[mask], atol=1e-6)


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["add", "sub"]), ({"type": "function", "function": {"name": "sub"}}, ["sub"])],
    ids=["any tool", "a named tool"],
)
def test_a_forced_call_constrains_the_policy_to_calls_of_these_tools(choice: Any, names: list[str]) -> None:
    sub = {**TOOL, "function": {**TOOL["function"], "name": "sub"}}

    async def talk(client: AsyncOpenAI) -> None:
        settings = {"tools": [TOOL, sub], "tool_choice": choice, "parallel_tool_calls": False}
        await ask(client, [user("hi")], **settings)

    every = list(range(CONFIG.vocab_size))
    engine = started(FakeEngine(script=lambda *_: [*encode(CALL), END], allowed=lambda *_: every))
    play(with_client(talk), engine, template=THINKS + "{{ '<think>\n' if add_generation_prompt }}")
    tag = json.loads(engine.requests[0].sampling.grammar)["format"]
    thought, _, calls = tag["elements"]  # the prompt opens the thinking, which the policy closes first
    assert (tag["type"], thought["begin"], thought["end"]) == ("sequence", "", "</think>")
    assert [each["begin"] for each in calls["tags"]] == [
        f'<tool_call>\n{{"name": "{name}", "arguments": ' for name in names
    ]
    assert (calls["at_least_one"], calls["stop_after_first"]) == (True, True)


REQUIRED = {"tools": [TOOL], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("settings", "name"),
    [(REQUIRED, "tool_choice"), ({"response_format": {"type": "json_object"}}, "response_format")],
    ids=["tool_choice", "response_format"],
)
def test_without_a_grammar_the_refusal_names_the_way_out_which_warns_once(
    settings: dict[str, Any], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=rf"does not support grammars.*ignore: \[{name}\]"):
            await ask(client, [user("hi")], **settings)
        await ask(client, [user("hi")])

    async def talk_freely(client: AsyncOpenAI) -> None:
        for _ in range(2):
            assert (await ask(client, [user("hi")], **settings)).content == "one"

    assert len(play(with_client(talk), scripted("one")).turns) == 1
    with caplog.at_level(logging.WARNING):
        assert len(play(with_client(talk_freely), scripted("one", "one"), ignore=[name]).turns) == 2
    assert len([record for record in caplog.records if "Ignoring" in record.message]) == 1
    with pytest.raises(ValueError, match="ignore must be tool_choice or response_format, got 'stop'"):
        workflow_of(talk, ignore=["stop"])


def nested(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"anyOf": [schema]}}}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (nested(maxItems=10_001), "maxItems=10001, more than 10,000"),
        (nested(pattern="(a{200}){100}"), r"the pattern '\(a.200.*many repetitions"),
        (nested(patternProperties={"a" * 1001: {}}), "the pattern 'aaa"),
        (nested(enum=["a" * 100_000]), "must have a valid JSON schema: it has 100,0.. characters"),
        (nested(maxItems=10_000, pattern="^[0-9a-f]{8}-([0-9a-f]{4}-){3}[0-9a-f]{12}$"), "400: no grammar.*ignore"),
    ],
    ids=["a count", "nested repetitions", "a long pattern", "a long schema", "refused by the server"],
)
def test_a_constraint_that_no_grammar_can_read_is_an_error_for_the_agent_alone(
    schema: dict[str, Any], message: str
) -> None:
    def refuse(grammar: str, token_ids: list[int]) -> list[int]:
        raise ServerRefused("400: no grammar.", status=400)

    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=message):
            await ask(client, [user("hi")], response_format=json_schema(schema=schema))
        await ask(client, [user("hi")])

    engine = started(FakeEngine(script=lambda *_: [*encode("one"), END], allowed=refuse))
    assert written(play(with_client(talk), engine)) == ["one<|im_end|>"]


def test_stop_texts_have_a_limit() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        for stop in (["a"] * 65, ["a" * 1001]):
            with pytest.raises(openai.BadRequestError, match="stop must have at most 64 texts of at most 1,000"):
                await ask(client, [user("hi")], stop=stop)
        await ask(client, [user("hi")], stop=["a" * 1000] * 64)

    play(with_client(talk), scripted("one"))


def test_constraints_that_calls_in_another_format_than_hermes_could_not_meet_are_refused() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match=r"Hermes tool-call format\. To let the policy answer freely"):
            await ask(client, [user("hi")], **REQUIRED)
        with pytest.raises(openai.BadRequestError, match="A tool's function must have a name"):
            await ask(client, [user("hi")], tools=[{"type": "function", "function": 5}])
        with pytest.raises(openai.BadRequestError, match=r"forbids calls in other formats\. To let the policy answer"):
            await ask(client, [user("hi")], tools=[TOOL], response_format=json_schema())
        await ask(client, [user("hi")])

    play(with_client(talk), scripted("one"), tool_parser=lambda text: [])


# ---- choices, references, and questions about the endpoint


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_the_choices_of_a_request_are_siblings_of_which_each_can_be_continued(is_streamed: bool) -> None:
    async def talk(client: AsyncOpenAI) -> AgentResult:
        sent: list[Any] = [user("hi")]
        if is_streamed:
            stream = await client.chat.completions.create(model="policy", messages=sent, n=2, stream=True)
            parts = [choice async for chunk in stream for choice in chunk.choices]
            texts = ["".join(p.delta.content or "" for p in parts if p.index == index) for index in range(2)]
            assert [p.index for p in parts if p.finish_reason] == [0, 1]
        else:
            answer = await client.chat.completions.create(model="policy", messages=sent, n=2)
            texts = [choice.message.content or "" for choice in answer.choices]
            assert answer.usage.completion_tokens == 8
            reward = {answer.id: 0.25, f"{answer.id}/1": 0.5}
        assert sorted(texts) == ["one", "two"]
        await ask(client, [*sent, {"role": "assistant", "content": texts[1]}, user("more")])
        return AgentResult(1.0, rewards={} if is_streamed else reward)

    trajectory = play(with_client(talk), scripted("one", "two", "three"))
    assert len(trajectory.turns) == 3
    assert trajectory.metrics["rows"] == 2
    assert len(trained(trajectory)) == 4 + 4 + 6
    rewards = [trajectory.rewards[turn.end - 1] for turn in trajectory.turns]
    assert rewards == ([0.0, 0.0, 1.0] if is_streamed else [0.25, 0.5, 1.0])


def test_an_item_of_the_sessions_own_responses_can_be_sent_by_its_id() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        tool = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": False}
        first = await client.responses.create(model="policy", input=[user("hi")], tools=[tool])
        assert [item.type for item in first.output] == ["reasoning", "function_call"]
        result = {"type": "function_call_output", "call_id": first.output[1].call_id, "output": "4"}
        references = [{"type": "item_reference", "id": item.id} for item in first.output]
        sent = [user("hi"), *references, result]
        assert (await client.responses.create(model="policy", input=sent, tools=[tool])).output_text == "two"

    trajectory = play(with_client(talk), scripted(f"<think>Hm.</think>{CALL}", "two"))
    assert (len(trajectory.turns), trajectory.metrics["rows"]) == (2, 1)


def test_models_are_retrieved_by_their_names_and_a_head_request_finds_the_session() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            assert [model.id async for model in client.models.list()] == ["policy", "claude-haiku-4-5"]
            assert (await client.models.retrieve("claude-haiku-4-5")).id == "claude-haiku-4-5"
            assert (await other.models.retrieve("policy")).id == "policy"
            with pytest.raises(openai.NotFoundError, match="add the name to the workflow's models"):
                await client.models.retrieve("gpt-4")
            answer = await client.chat.completions.create(model="claude-haiku-4-5", messages=[user("hi")])
            assert answer.model == "claude-haiku-4-5"
        async with aiohttp.ClientSession() as http:
            for path in ("", "/v1", "/v1/models", "/v1/messages"):
                for key, status in ((api_key, 200), ("wrong", 401)):
                    headers = {"x-api-key": key}
                    async with http.head(base_url.removesuffix("/v1") + path, headers=headers) as response:
                        assert response.status == status

    assert written(play(agent, scripted("one"), models={"claude-haiku-4-5": "policy"})) == ["one<|im_end|>"]


# ---- images


DIGITS = Sampling(max_new_tokens=6, stop_token_ids=tuple(range(8, 17)))


def source_of(image: str) -> dict[str, str]:
    return {"type": "base64", "media_type": "image/png", "data": data_url(image).partition(",")[2]}


async def chat_about_images(base_url: str, api_key: str) -> None:
    async with client_of(base_url, api_key) as client:
        parts = [{"type": "text", "text": "12"}, {"type": "image_url", "image_url": {"url": data_url(RED)}}]
        sent: list[Any] = [{"role": "user", "content": parts}]
        sent.append(await ask(client, sent))
        again = [{"type": "image_url", "image_url": {"url": data_url(BLUE)}}]
        await ask(client, [*sent, {"role": "user", "content": again}])


SHOWN: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}]}


async def branch_with_images(client: AsyncOpenAI) -> None:
    await ask(client, [user("12")])
    with pytest.raises(openai.BadRequestError, match="only if all answers are in one row"):
        await ask(client, [SHOWN])
    with pytest.raises(openai.BadRequestError, match="65 images, but at most 64"):
        await ask(client, [{"role": "user", "content": SHOWN["content"] * 65}])


async def choose_with_images(client: AsyncOpenAI) -> None:
    sent = [SHOWN, await ask(client, [SHOWN]), user("12")]
    with pytest.raises(openai.BadRequestError, match="only if all answers are in one row"):
        await ask(client, sent, n=2)


async def ask_with_images_at_once(client: AsyncOpenAI) -> None:
    asked = (ask(client, [SHOWN]), ask(client, [user("12")]))
    errors = [
        answer for answer in await asyncio.gather(*asked, return_exceptions=True) if isinstance(answer, Exception)
    ]
    assert ["only if all answers are in one row" in str(error) for error in errors] == [True]


async def send_messages_about_images(base_url: str, api_key: str) -> None:
    async with anthropic_client_of(base_url, api_key) as client:
        document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "12"}}
        sent: list[Any] = [{"role": "user", "content": [document, {"type": "image", "source": source_of(RED)}]}]
        first = await client.messages.create(model="policy", max_tokens=9, messages=sent)
        again = [{"type": "image", "source": source_of(BLUE)}]
        sent += [{"role": "assistant", "content": first.content}, {"role": "user", "content": again}]
        await client.messages.create(model="policy", max_tokens=9, messages=sent)


async def respond_to_images(base_url: str, api_key: str) -> None:
    async with client_of(base_url, api_key) as client:
        parts = [{"type": "input_text", "text": "12"}, {"type": "input_image", "image_url": data_url(RED)}]
        sent: list[Any] = [{"role": "user", "content": parts}]
        first = await client.responses.create(model="policy", input=sent)
        again = [{"type": "input_image", "image_url": data_url(BLUE)}]
        await client.responses.create(model="policy", input=[*sent, *first.output, {"role": "user", "content": again}])


@pytest.mark.parametrize("agent", [chat_about_images, send_messages_about_images, respond_to_images])
@torch.no_grad()
def test_the_policy_reads_an_agents_images_and_the_trainer_reads_the_same(agent: Any) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = WRITES_IMAGES
    workflow = AgentWorkflow(tokenizer, lambda prompt, base_url, key: agent(base_url, key), agent_timeout_s=30.0)
    workflow.max_tokens, workflow.template.image_reader = 64, image_reader()
    model = image_spec().load_model()
    trajectory: Trajectory | None = None
    seeds = iter(range(50))
    with engine_of(model) as engine:
        while trajectory is None:
            sampling = replace(DIGITS, seed=next(seeds))
            with contextlib.suppress(RolloutError):  # the policy sampled an image token itself
                trajectory = asyncio.run(workflow.run(PROMPT, generate_with(engine, sampling)))
    trajectory.reward = 0.0
    first, second = trajectory.turns
    assert (len(trajectory.prompt.images), len(trajectory.images)) == (1, 1)
    image = [IMAGE_TOKEN] * TOKENS_EACH
    assert trajectory.token_ids[: first.start] == [4, 5, *image, 13]  # 1 2, the image, =
    assert trajectory.token_ids[second.start - TOKENS_EACH - 1 : second.start] == [*image, 13]
    table = image_reader().read([*trajectory.prompt.images, *trajectory.images]).pixel_values
    assert torch.equal(table, image_reader().read([RED, BLUE]).pixel_values)
    experience = with_images(Experience.from_trajectories([trajectory]), [trajectory], image_reader())
    (outputs,) = SingleModel(model, LogprobSettings()).forward([experience])
    assert torch.allclose(outputs.logprobs, experience.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("agent", [branch_with_images, choose_with_images, ask_with_images_at_once])
def test_images_in_a_second_row_are_refused_because_the_trainer_could_not_read_them(agent: Any) -> None:
    tokenizer = char_tokenizer()
    tokenizer.chat_template = WRITES_IMAGES
    workflow = AgentWorkflow(tokenizer, with_client(agent), agent_timeout_s=30.0)
    workflow.max_tokens, workflow.template.image_reader = 64, image_reader()
    engine = started(FakeEngine(script=lambda *_: [4, 8], seconds_per_token=0.01))
    trajectory = asyncio.run(workflow.run(PROMPT, generate_with(engine, DIGITS)))
    assert (trajectory.metrics["rows"], trajectory.images) == (1, [])


def test_files_and_images_that_the_policy_cannot_read_are_refused_and_the_agent_goes_on() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        pdf = {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}
        text = {"filename": "a.txt", "file_data": "data:text/plain;base64,aGk="}
        url = {"url": "https://example.com/a.png"}
        for part, message in (
            ({"type": "file", "file": pdf}, "cannot read 'a.pdf' of type 'application/pdf'"),
            ({"type": "image_url", "image_url": url}, "must be part of the request, in base64"),
            ({"type": "image_url", "image_url": {"url": "/etc/hostname"}}, "must be part of the request, in base64"),
            ({"type": "image_url", "image_url": {"url": data_url(RED)}}, "the policy accepts only token ids"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await ask(client, [{"role": "user", "content": [part]}])
        await ask(client, [{"role": "user", "content": [{"type": "file", "file": text}]}])

    assert "user\nhi<|im_end|>" in decode(play(with_client(talk), scripted("one")).token_ids)
    with pytest.raises(RolloutError, match=r"has images, but an agent sends its own\. Rename the image column"):
        play(with_client(talk), scripted("one"), replace(PROMPT, images=(HALF,)))


# ---- other models and addresses


def test_a_frozen_model_answers_beside_the_policy_and_leaves_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret of the judge")
    seen: list[tuple[str | None, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        seen.append((request.headers.get("Authorization"), body["model"]))
        assert (await request.text()).count("model") == 1
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "9 of 10"}}
        whole = {"id": "c", "object": "chat.completion", "created": 0, "model": "big", "choices": [choice]}
        if not body.get("stream"):
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        part = {"index": 0, "finish_reason": None, "delta": {"content": "9 of 10"}}
        chunk = {**whole, "object": "chat.completion.chunk", "choices": [part]}
        await response.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())
        return response

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            assert (await ask(client, [user("hi")])).content == "one"
            settings: dict[str, Any] = {"model": "judge", "messages": [user("judge it")]}
            twice = b'{"model": "big", "model": "judge", "messages": []}'
            headers = {"Authorization": f"Bearer {api_key}"}
            async with aiohttp.ClientSession(headers=headers) as http:
                await http.post(f"{base_url}/chat/completions", data=twice)
            whole = await client.chat.completions.create(**settings)
            assert whole.choices[0].message.content == "9 of 10"
            stream = await client.chat.completions.create(**settings, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "9 of 10"
            assert "judge" in [model.id async for model in client.models.list()]
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="wrong").chat.completions.create(**settings)
            return 0.9

    async def scenario() -> Trajectory:
        upstream = web.Application()
        upstream.router.add_post("/v1/chat/completions", answer)
        async with TestServer(upstream) as server:
            judge = FrozenModel(str(server.make_url("/v1")), model="big", api_key_variable="JUDGE_KEY")
            return await workflow_of(agent, models={"judge": judge}).run(PROMPT, generate_with(scripted("one")))

    trajectory = asyncio.run(scenario())
    assert seen == [("Bearer secret of the judge", "big")] * 3
    assert written(trajectory) == ["one<|im_end|>"]


def test_a_frozen_model_that_cannot_be_reached_is_an_error_for_the_agent_alone() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.APIStatusError, match=r"The frozen model 'judge' does not answer\. The"):
            await client.chat.completions.create(model="judge", messages=[user("hi")])
        await ask(client, [user("hi")])
        for model in ("judge", "policy"):
            with pytest.raises(openai.BadRequestError, match=r"limits\.requests=2"):
                await client.chat.completions.create(model=model, messages=[user("hi")])

    settings = {"models": {"judge": FrozenModel("http://127.0.0.1:9/v1")}, "limits": AgentLimits(requests=2)}
    assert len(play(with_client(talk), scripted("one"), **settings).turns) == 1


def test_the_endpoint_binds_the_address_that_agents_reach_and_needs_its_key_there() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        assert urlsplit(base_url).hostname == "127.0.0.2"  # of this machine, but not where others bind
        for key, status in (("", 401), ("wrong", 401), (api_key, 200)):
            headers = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession() as http, http.get(f"{base_url}/models", headers=headers) as response:
                assert response.status == status
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", urlsplit(base_url).port)
        async with client_of(base_url, api_key) as client:
            await ask(client, [user("hi")])

    assert len(play(agent, scripted("one"), endpoint_host="127.0.0.2").turns) == 1
    with pytest.raises(RolloutError, match=r"on 203\.0\.113\.7: .* must be an address of this machine"):
        play(agent, scripted("one"), endpoint_host="203.0.113.7")


# ---- what trains


@pytest.mark.parametrize(
    "pattern",
    [RequestPattern(system="^Write a title"), RequestPattern(tools="^$"), RequestPattern(model="haiku")],
    ids=["system prompt", "tools", "model"],
)
def test_an_untrained_request_is_answered_but_leaves_no_row(pattern: RequestPattern) -> None:
    async def talk(client: AsyncOpenAI) -> float:
        title = [{"role": "system", "content": "Write a title."}, user("hi")]
        answer = await client.chat.completions.create(model="haiku", messages=title)
        assert answer.choices[0].message.content == "Title"
        sent: list[Any] = [user("hi")]
        sent += [await ask(client, sent, tools=[TOOL]), user("more")]
        await ask(client, sent, tools=[TOOL])
        return 1.0

    engine = scripted("Title", "one", "two")
    trajectory = play(with_client(talk), engine, models={"haiku": "policy"}, untrained=[pattern])
    assert written(trajectory) == ["one<|im_end|>", "two<|im_end|>"]
    assert (trajectory.metrics["rows"], trajectory.rewards[-1]) == (1, 1.0)
    assert "Title" not in decode(trajectory.token_ids)


def test_an_untrained_turn_of_a_trained_conversation_is_read_and_does_not_train() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        sent: list[Any] = [user("hi")]
        first = await client.chat.completions.create(model="other", messages=sent)
        await ask(client, [*sent, first.choices[0].message, user("more")])

    untrained = [RequestPattern(model="other")]
    trajectory = play(with_client(talk), scripted("one", "two"), models={"other": "policy"}, untrained=untrained)
    assert "one<|im_end|>" in decode(trajectory.token_ids)

    async def alternate(client: AsyncOpenAI) -> None:
        sent: list[Any] = [user("hi")]
        for model in ("policy", "other", "policy"):
            answer = await client.chat.completions.create(model=model, messages=sent)
            sent += [answer.choices[0].message, user("more")]
        with pytest.raises(openai.BadRequestError, match=r"limits\.rows=1"):
            await ask(client, [user("ho")])

    alternated = play(
        with_client(alternate),
        scripted("a", "b", "c"),
        models={"other": "policy"},
        untrained=untrained,
        limits=AgentLimits(rows=1),
    )
    assert (alternated.metrics["rows"], decode(trained(alternated))) == (1, "a<|im_end|>c<|im_end|>")
    assert decode(trained(trajectory)) == "two<|im_end|>"
    hides = ChatExchange({"messages": [user("hi")], "tools": [TOOL], "tool_choice": "none"}, RequestRules(), {}).request
    assert hides.tools == []
    assert not RequestPattern(tools="^$").matches(hides)

    async def ask_other(client: AsyncOpenAI) -> None:
        await client.chat.completions.create(model="other", messages=[user("hi")])

    with pytest.raises(RolloutError, match="without an answer from the policy to train on"):
        play(with_client(ask_other), scripted("one"), models={"other": "policy"}, untrained=untrained)


def test_rewards_of_answers_are_placed_on_their_last_tokens_in_each_protocol() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        async with client_of(base_url, api_key) as client, anthropic_client_of(base_url, api_key) as other:
            first = await client.chat.completions.create(model="policy", messages=[user("hi")])
            second = await other.messages.create(model="policy", max_tokens=9, messages=[user("ho")])
            third = await client.responses.create(model="policy", input="hu")
            return AgentResult(rewards={first.id: 0.25, second.id: 0.5, third.id: -1.0})

    trajectory = play(agent, scripted("one", "two", "three"))
    assert [trajectory.rewards[turn.end - 1] for turn in trajectory.turns] == [0.25, 0.5, -1.0]
    assert sum(trajectory.rewards) == -0.25

    async def talk(client: AsyncOpenAI) -> AgentResult:
        await ask(client, [user("hi")])
        return AgentResult(1.0, rewards={"chatcmpl-x": 1.0})

    with pytest.raises(RolloutError, match="no answer that is trained on has this id"):
        play(with_client(talk), scripted("one"))


def test_of_two_answers_with_equal_text_the_one_whose_thinking_comes_back_is_continued() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        answers = [await ask(client, [user("hi")]) for _ in range(2)]
        assert [answer.content for answer in answers] == ["one", "one"]
        back = {"role": "assistant", "content": "one", "reasoning_content": answers[0].reasoning_content}
        await ask(client, [user("hi"), back, user("more")])

    texts = ["<think>First.</think>one", "<think>Second.</think>one", "two"]
    engine = scripted(*texts)
    trajectory = play(with_client(talk), engine, template=THINKS)
    assert "First." in decode(engine.requests[2].token_ids)
    assert "Second." not in decode(engine.requests[2].token_ids)
    assert trajectory.metrics["rows"] == 2


@pytest.mark.parametrize(("setting", "num_rows"), [("keep", 1), ("drop", 2)])
def test_thinking_that_does_not_come_back_stays_or_goes_as_the_setting_says(setting: str, num_rows: int) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        answer = await ask(client, [user("hi")])
        await ask(client, [user("hi"), {"role": "assistant", "content": answer.content}, user("more")])
        await ask(client, [user("ho"), await ask(client, [user("ho")]), user("with its thinking")])

    text = "<think>Hm.</think>one"
    engine = scripted(text, "two", text, "four")
    trajectory = play(with_client(talk), engine, template=THINKS, unsent_thinking=setting)
    assert ("Hm." in decode(engine.requests[1].token_ids)) == (setting == "keep")
    assert "Hm." in decode(engine.requests[3].token_ids)
    assert trajectory.metrics["rows"] == num_rows + 1


# ---- limits and failures


def test_an_answer_never_passes_the_limit_of_all_tokens() -> None:
    async def talk(client: AsyncOpenAI) -> float:
        answers = await asyncio.gather(*(ask(client, [user(name)]) for name in ("a", "b", "c")))
        assert len({answer.content for answer in answers}) > 1  # of the last ones, some were cut
        return 1.0

    engine = started(FakeEngine(script=lambda prompt, sampling, sample: letters("z" * sampling.max_new_tokens)))
    trajectory = play(with_client(talk), engine, limits=AgentLimits(total_tokens=90), truncated_reward=0.0)
    assert sum(end - start for row in trajectory.rows for start, end in row) <= 90
    assert max(request.sampling.max_new_tokens for request in engine.requests) < 90


def test_what_a_failed_agent_did_is_logged_with_its_prompt_sample_and_reason(tmp_path: Path) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        sent: list[Any] = [user("hi")]
        await ask(client, [*sent, await ask(client, sent), user("more")])
        raise KeyError("no such tool")

    engine, worker = scripted("one", "two"), RewardHook(lambda trajectory: 1.0)
    worker.start()
    failures = FailureLog(tmp_path / "failed_rewards.jsonl", decode)
    workflow, settings = workflow_of(with_client(talk)), RolloutSettings(max_failed_fraction=1.0)
    controller = RolloutController(engine, workflow, worker, settings, sampling=SAMPLING, failures=failures)
    try:
        controller.evaluate([PROMPT], sampling=SAMPLING)
    finally:
        controller.close()
        worker.close()
    ((_, record, trajectory),) = read_records(tmp_path / "failed_rollouts.jsonl")
    assert written(trajectory) == ["one<|im_end|>", "two<|im_end|>"]
    assert (record["finish"], record["prompt"], record["sample"]) == ("dropped: rollout", "a", 0)
    assert "raised KeyError" in record["message"]
    assert record["texts"][str(END)] == "<|im_end|>"
    assert trajectory.prompt.fields == {"number": 7}


class AsksOnce(AgentWorkflow):
    """Asks for one completion with a grammar, and keeps it."""

    async def run(self, prompt: Prompt, generate: Any) -> Trajectory:
        self.completion = await generate([5], grammar="{}")
        raise RolloutError("asked")


@pytest.mark.parametrize(("allowed", "error"), [(digits_only, "asked"), (None, "does not support grammars")])
def test_a_grammar_reaches_the_engine_through_the_runner_or_is_refused_there(allowed: Any, error: str) -> None:
    async def results(runner: TrajectoryRunner) -> list[Any]:
        runner.in_flight.open("a")
        return [result async for _, result in runner.run_group(PROMPT, [0], SAMPLING, 1, "a")]

    workflow = AsksOnce(TOKENIZER, lambda *_: None)
    (result,) = asyncio.run(results(TrajectoryRunner(started(FakeEngine(allowed=allowed)), workflow)))
    assert error in str(result)
    if allowed is not None:
        assert decode(list(workflow.completion.token_ids)).startswith('{"a": ')
