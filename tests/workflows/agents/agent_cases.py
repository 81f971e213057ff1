"""Scripted policies, and how to play one agent with the openai client: what tests of agents share."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from anthropic import AsyncAnthropic
from anthropic import DefaultAsyncHttpxClient as AnthropicHttpxClient
from chat_texts import CHATML, END, chat_tokenizer, started
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.engines.fake_engine import FakeEngine
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.workflows.agent_workflow import AgentWorkflow
from lightrl.workflows.workflow import Generate

TEMPLATE = "{% if tools %}{{ '<|im_start|>tools\n' }}{{ tools | tojson }}{{ '<|im_end|>\n' }}{% endif %}" + CHATML
SAMPLING = Sampling(max_new_tokens=200, stop_token_ids=(END,), seed=3)
PROMPT = Prompt(id="a", token_ids=[5], fields={"number": 7})


TOKENIZER = chat_tokenizer(TEMPLATE)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False).input_ids)


def decode(token_ids: list[int]) -> str:
    return str(TOKENIZER.decode(token_ids))


def written(trajectory: Trajectory) -> list[str]:
    """What the policy wrote, turn by turn."""
    return [decode(trajectory.token_ids[turn.start : turn.end]) for turn in trajectory.turns]


def client_of(base_url: str, api_key: str, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=base_url, api_key=api_key, http_client=DefaultAsyncHttpxClient(verify=False), **settings
    )


def anthropic_client_of(base_url: str, api_key: str, **settings: Any) -> AsyncAnthropic:
    root_url = base_url.removesuffix("/v1")
    return AsyncAnthropic(
        base_url=root_url, api_key=api_key, http_client=AnthropicHttpxClient(verify=False), **settings
    )


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def scripted(*texts: str, context: int = 4096) -> FakeEngine:
    """A policy that says these, request by request, each with its end token."""
    said = iter(texts)
    return started(FakeEngine(script=lambda prompt, sampling, sample: [*encode(next(said)), END]), context=context)


def generate_with(engine: RolloutEngine, sampling: Sampling = SAMPLING) -> Generate:
    async def generate(
        token_ids: list[int], *, max_new_tokens: int | None = None, grammar: str = "", **attached: Any
    ) -> Completion:
        longest = min(sampling.max_new_tokens, max_new_tokens or sampling.max_new_tokens)
        asked = replace(sampling, max_new_tokens=longest, grammar=grammar)
        engine.check_sampling(asked)
        return (await engine.generate(token_ids, asked, session="s", **attached))[0]

    return generate


def workflow_of(agent: Any, template: str = TEMPLATE, **settings: Any) -> AgentWorkflow:
    return AgentWorkflow(chat_tokenizer(template), agent, **{"agent_timeout_s": 30.0, "max_tokens": 400, **settings})


def play(
    agent: Any, engine: RolloutEngine, prompt: Prompt = PROMPT, sampling: Sampling = SAMPLING, **settings: Any
) -> Trajectory:
    """One trajectory of an agent `run(prompt, base_url, api_key)`."""
    return asyncio.run(workflow_of(agent, **settings).run(prompt, generate_with(engine, sampling)))


def trained(trajectory: Trajectory) -> list[int]:
    pairs = zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
    return [token for token, is_trained in pairs if is_trained]


def with_client(talk: Callable[..., Coroutine[Any, Any, Any]], make: Callable[..., Any] = client_of) -> Any:
    """An agent that only needs its client."""

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> Any:
        async with make(base_url, api_key) as client:
            return await talk(client)

    return agent


async def ask(client: AsyncOpenAI, messages: list[Any], **settings: Any) -> Any:
    """The message of the answer."""
    answer = await client.chat.completions.create(model="policy", messages=messages, **settings)
    return answer.choices[0].message
