"""The endpoint's door: keys, sessions, what is refused or ignored, streams, and that nothing of it is left behind."""

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import psutil
import pytest
from agent_cases import PROMPT, SAMPLING, ask, client_of, generate_with, play, scripted, user, with_client, workflow_of
from chat_texts import started
from openai import AsyncOpenAI, DefaultHttpxClient, OpenAI
from waits import until

from lightrl.concurrency import listener
from lightrl.engines.fake_engine import FakeEngine
from lightrl.errors import EngineError, RolloutError
from lightrl.rewards import RewardHook
from lightrl.rollout import RolloutSettings
from lightrl.rollout.controller import RolloutController
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import FrozenModel, RequestPattern

say_hi = with_client(lambda client: ask(client, [user("hi")]))


def says_hi() -> tuple[Callable[..., Coroutine[Any, Any, None]], list[str]]:
    """An agent with one request; and the addresses that it was given."""
    seen: list[str] = []

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        seen.append(base_url)
        await say_hi(prompt, base_url, api_key)

    return agent, seen


def talk_once(prompt: Prompt, base_url: str, api_key: str) -> float:
    """A sync agent."""
    with OpenAI(base_url=base_url, api_key=api_key, http_client=DefaultHttpxClient(verify=False)) as client:
        answer = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    return float(answer.choices[0].message.content == "hello")


def talk_past_proxies(prompt: Prompt, base_url: str, api_key: str) -> float:
    http_client = DefaultHttpxClient(verify=False, trust_env=False)
    with OpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        client.chat.completions.create(model="policy", messages=[user("hi")])
    return 1.0


def is_open(base_url: str) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", urlsplit(base_url).port or 0)) == 0


@pytest.fixture
def own_threads() -> Callable[[], list[str]]:
    """The names of the threads of lightrl that the test has started and that run."""
    others = set(threading.enumerate())
    return lambda: [one.name for one in set(threading.enumerate()) - others if one.name.startswith("lightrl")]


@pytest.mark.parametrize("agent", [talk_once, "test_openai_endpoint.talk_once"], ids=["function", "dotted path"])
def test_a_sync_agent_runs_in_a_thread_and_returns_its_reward(agent: Any) -> None:
    trajectory = play(agent, scripted("hello"))
    assert trajectory.completion == "hello"
    assert trajectory.rewards[-1] == 1.0


@pytest.mark.parametrize(("excepted", "num_warnings"), [("", 1), ("localhost,127.0.0.1", 0)])
def test_a_proxy_that_would_take_the_agents_requests_is_warned_of(
    excepted: str, num_warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("http_proxy", "http://proxy.example:3128"), ("no_proxy", excepted), ("NO_PROXY", excepted)):
        monkeypatch.setenv(name, value)
    play("test_openai_endpoint.talk_past_proxies", scripted("hello"))
    said = [record.message for record in caplog.records if "http://proxy.example:3128" in record.message]
    assert len(said) == num_warnings
    assert all("export NO_PROXY=127.0.0.1,localhost" in text for text in said)


def test_a_stream_gives_the_same_text_finish_and_usage_as_a_whole_answer() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        whole = await client.chat.completions.create(model="policy", messages=[user("hi")], logprobs=True)
        stream = await client.chat.completions.create(
            model="policy", messages=[user("hi")], logprobs=True, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert "".join(choice.delta.content or "" for choice in choices) == whole.choices[0].message.content == "one"
        assert choices[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
        assert choices[-1].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage
        drawn = [token for choice in choices if choice.logprobs for token in choice.logprobs.content or []]
        assert drawn == whole.choices[0].logprobs.content  # type: ignore[union-attr]
        assert [token.token for token in drawn] == ["o", "n", "e", "<|im_end|>"]

    play(with_client(talk), scripted("one", "one"))


def test_usage_and_fingerprint_say_tokens_and_weight_version() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        answer = await client.chat.completions.create(model="policy", messages=[user("hi")])
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 4)
        assert answer.system_fingerprint == "weight-version-0"
        assert [model.id async for model in client.models.list()] == ["policy"]

    play(with_client(talk), scripted("one"))


def test_a_wrong_key_is_refused_on_every_route() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError, match="API key is wrong"):
                await ask(client, [user("hi")])
        root = base_url.partition("/sessions")[0]
        for path in ("/v1/models", "/", "/sessions/1/v1/models", "/sessions/1/v1/chat/completions"):
            for headers in ({}, {"Authorization": "Bearer "}, {"x-api-key": "wrong"}, {"Authorization": api_key}):
                async with aiohttp.ClientSession() as http, http.get(root + path, headers=headers) as response:
                    assert response.status == 401
        await say_hi(prompt, base_url, api_key)

    engine = scripted("one")
    play(agent, engine)
    assert len(engine.requests) == 1


def test_an_ended_session_and_an_unknown_route_are_not_found_and_an_unknown_session_has_no_key() -> None:
    async def talk(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with client_of(base_url, api_key) as client:
            await ask(client, [user("hi")])
            with pytest.raises(openai.NotFoundError, match=r"/v1/embeddings is not served .Not Found.. Use chat"):
                await client.embeddings.create(model="policy", input="hi")
        seen.append((base_url, api_key))

    async def scenario() -> None:
        await workflow_of(talk).run(PROMPT, generate_with(scripted("one")))
        ((base_url, api_key),) = seen
        async with client_of(base_url, api_key) as client:
            with pytest.raises(openai.NotFoundError, match="no such session"):
                await ask(client, [user("hi")])
        async with client_of(base_url.replace("/sessions/", "/sessions/0"), api_key) as client:
            with pytest.raises(openai.AuthenticationError, match="or belongs to another session"):
                await ask(client, [user("hi")])

    seen: list[tuple[str, str]] = []
    asyncio.run(scenario())


def test_what_cannot_be_served_is_refused_before_the_policy_is_asked() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError, match="n must be an integer from 1 to 128, got 0"):
            await ask(client, [user("hi")], n=0)
        await ask(client, [user("hi")], n=1, stop=[], response_format={"type": "text"}, tool_choice="auto")

    engine = scripted("one")
    play(with_client(talk), engine)
    assert len(engine.requests) == 1


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b"null"], ids=["cut", "a list", "no text", "null"])
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
            async with http.post(f"{base_url}/chat/completions", data=body) as response:
                assert response.status == 400
                assert "must be a JSON object" in (await response.json())["error"]["message"]
        await say_hi(prompt, base_url, api_key)

    play(agent, scripted("one"))


def test_the_sampling_of_a_request_is_ignored_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(client: AsyncOpenAI) -> None:
        for temperature in (0.2, 0.3):
            await ask(client, [user("hi")], temperature=temperature, top_p=0.5, user="me")

    engine = scripted("one", "two")
    play(with_client(talk), engine)
    assert {request.sampling.temperature for request in engine.requests} == {1.0}
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split(" in ")[0] for text in warned] == ["Ignoring temperature", "Ignoring top_p"]


def test_an_engine_error_reaches_the_run_at_once_and_is_not_asked_again() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        try:
            await ask(client, [user("hi")])
        except openai.InternalServerError:
            await asyncio.sleep(3600)

    engine = started(FakeEngine(fail_requests={0}))
    with pytest.raises(EngineError, match="fails request 0"):
        play(with_client(talk), engine)
    assert len(engine.requests) == 1


async def raises(prompt: Prompt, base_url: str, api_key: str) -> None:
    raise KeyError("oh")


async def hangs(prompt: Prompt, base_url: str, api_key: str) -> None:
    await asyncio.sleep(3600)


released = threading.Event()


def hangs_in_a_thread(prompt: Prompt, base_url: str, api_key: str) -> None:
    released.wait(600)


async def asks_nothing(prompt: Prompt, base_url: str, api_key: str) -> float:
    return 1.0


async def returns_text(prompt: Prompt, base_url: str, api_key: str) -> str:
    await say_hi(prompt, base_url, api_key)
    return "good"


async def returns_nan(prompt: Prompt, base_url: str, api_key: str) -> float:
    await say_hi(prompt, base_url, api_key)
    return float("nan")


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (raises, "The agent raises raised KeyError: 'oh'"),
        (hangs, "The agent hangs did not finish within 0.2 s"),
        (hangs_in_a_thread, "The agent hangs_in_a_thread did not finish within 0.2 s"),
        (asks_nothing, "without an answer from the policy"),
        (returns_text, "must return a finite number or None, got 'good' for prompt 'a'"),
        (returns_nan, "must return a finite number or None, got nan"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_agent_that_fails_is_a_rollout_error(agent: Any, message: str, own_threads: Callable[[], list[str]]) -> None:
    timeout_s = 0.2 if "hangs" in agent.__name__ else 30.0
    with pytest.raises(RolloutError, match=message):
        play(agent, scripted("one"), agent_timeout_s=timeout_s)
    released.set()
    while own_threads():
        time.sleep(0.01)
    released.clear()


def test_a_request_that_the_agent_gives_up_leaves_the_engine() -> None:
    async def talk(client: AsyncOpenAI) -> None:
        given_up = asyncio.ensure_future(ask(client, [user("hi")]))
        await until(lambda: engine.num_running)
        given_up.cancel()
        await until(lambda: not engine.num_running)
        await ask(client, [user("hi")])

    engine = started(FakeEngine(seconds_per_token=lambda prompt, sampling: 3600.0 if not engine.requests[1:] else 0.0))
    assert len(play(with_client(talk), engine).turns) == 1


def test_what_is_still_asked_when_the_agent_returns_is_cancelled() -> None:
    async def agent(prompt: Prompt, base_url: str, api_key: str) -> None:
        clients.append(client_of(base_url, api_key))
        await ask(clients[0], [user("hi")])
        late.append(asyncio.ensure_future(ask(clients[0], [user("more")])))
        while not engine.num_running:
            await asyncio.sleep(0.01)

    async def scenario() -> None:
        assert len((await workflow_of(agent).run(PROMPT, generate_with(engine))).turns) == 1
        with pytest.raises(openai.NotFoundError, match="The session is over"):
            await late[0]
        assert engine.num_running == 0
        await clients[0].close()

    clients: list[AsyncOpenAI] = []
    late: list[asyncio.Future[Any]] = []
    engine = started(FakeEngine(seconds_per_token=lambda prompt, sampling: 3600.0 if engine.requests[1:] else 0.0))
    asyncio.run(scenario())


@pytest.mark.parametrize("ticks", [1, 3, 10, 30, 100, None])
def test_a_trajectory_cancelled_anywhere_leaves_no_request_port_or_thread(
    ticks: int | None, own_threads: Callable[[], list[str]]
) -> None:
    agent, seen = says_hi()

    async def scenario() -> None:
        task = asyncio.ensure_future(workflow_of(agent).run(PROMPT, generate_with(engine)))
        if ticks is None:
            while not engine.num_running:
                await asyncio.sleep(0.01)
        for _ in range(ticks or 0):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while engine.num_running:
            await asyncio.sleep(0)

    engine = started(FakeEngine(seconds_per_token=3600.0))
    asyncio.run(scenario())
    assert engine.num_running == 0
    assert not any(is_open(base_url) for base_url in seen)
    assert own_threads() == []


def ask_in_a_thread(prompt: Prompt, base_url: str, api_key: str) -> None:
    seen_by_threads.append(base_url)
    http_client = DefaultHttpxClient(verify=False)
    with OpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0) as client:
        client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])


seen_by_threads: list[str] = []


def test_closing_the_controller_ends_agents_requests_threads_and_port(own_threads: Callable[[], list[str]]) -> None:
    engine, worker = started(FakeEngine(seconds_per_token=3600.0)), RewardHook(lambda trajectory: 1.0)
    worker.start()
    controller = RolloutController(engine, workflow_of(ask_in_a_thread), worker, RolloutSettings(), sampling=SAMPLING)

    def stop_when_all_ask(done: int, total: int) -> None:
        if engine.num_running == 6:
            raise KeyboardInterrupt

    prompts = [Prompt(f"p{number}", token_ids=[5]) for number in range(6)]
    with pytest.raises(KeyboardInterrupt):
        controller.evaluate(prompts, sampling=SAMPLING, on_wait=stop_when_all_ask)
    controller.close()
    worker.close()
    assert engine.num_running == 0
    assert len(set(seen_by_threads)) == 6
    assert not any(is_open(base_url) for base_url in seen_by_threads)
    while own_threads():
        time.sleep(0.01)


def test_closing_the_endpoint_closes_its_port_and_it_opens_again_for_the_next_trajectory() -> None:
    agent, seen = says_hi()

    async def scenario() -> None:
        await workflow.run(PROMPT, generate_with(engine))
        assert is_open(seen[0])
        await workflow.endpoint.close()
        await workflow.endpoint.close()
        assert not is_open(seen[0])
        await workflow.run(PROMPT, generate_with(engine))

    workflow, engine = workflow_of(agent), scripted("one", "two", "three", "four")
    asyncio.run(scenario())
    asyncio.run(workflow.run(PROMPT, generate_with(engine)))  # on another event loop
    assert len(seen) == 3
    assert not any(is_open(base_url) for base_url in seen)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        pytest.param({"agent": "nowhere.run"}, "agent='nowhere.run': there is no module 'nowhere'", id="no agent"),
        pytest.param({"agent_timeout_s": 0}, "agent_timeout_s must be a finite number above 0, got 0", id="no time"),
        pytest.param({"max_tokens": 1}, "max_tokens must be >= 2, got 1", id="no tokens"),
        pytest.param({"max_agents": 0}, "max_agents must be >= 1, got 0", id="no agents"),
        *(
            pytest.param({"endpoint_host": host}, "at which agents reach this machine", id=f"every address {host}")
            for host in ("", "0", "0.0", "0.0.0.0", "::0", "::ffff:0.0.0.0")
        ),
        pytest.param({"models": {"judge": "gpt-4"}}, "models.judge must be policy .*, got 'gpt-4'", id="a model"),
        pytest.param({"unsent_thinking": "no"}, "unsent_thinking must be keep or drop, got 'no'", id="thinking"),
        pytest.param(
            {"agent": None, "command": ["true"], "endpoint_host": "127.0.0.2"}, "endpoint_host", id="in a sandbox"
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        workflow_of(**{"agent": raises, **settings})
    with pytest.raises(ValueError, match="must start with http"):
        FrozenModel("localhost:8000")
    with pytest.raises(ValueError, match="is not a valid regex"):
        RequestPattern(system="(")


def test_connections_without_a_key_leave_most_files_to_the_trainer_and_others_still_get_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener.resource, "getrlimit", lambda _: (80, 80))  # so 10 without a key
    monkeypatch.setattr(listener, "UNDER_PRESSURE_S", 0.1)

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        address = ("127.0.0.1", urlsplit(base_url).port)
        with contextlib.ExitStack() as opened:
            for number in range(30):
                idle = opened.enter_context(socket.create_connection(address))
                idle.sendall(b"POST /sessions HTTP/1.1\r\nHost: a\r\n" if number % 2 else b"")
            await say_hi(prompt, base_url, api_key)
            own = [each for each in psutil.Process().net_connections() if each.laddr.port == address[1]]
            assert len(own) <= 13  # with the agent's own, one that waits, and the listener
        return 1.0

    assert list(play(agent, scripted("hello")).rewards)[-1] == 1.0


@pytest.mark.parametrize("part", ["tools", "messages"])
def test_a_request_that_is_nested_too_deeply_is_refused_and_the_trajectory_goes_on(part: str) -> None:
    deep: Any = {"type": "object"}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
    body = {"tools": [tool]} if part == "tools" else {"messages": [user("hi") | {"more": deep}]}

    async def agent(prompt: Prompt, base_url: str, api_key: str) -> float:
        async with client_of(base_url, api_key) as client:
            with pytest.raises(openai.BadRequestError, match="nested too deeply"):
                await client.chat.completions.create(model="policy", **{"messages": [user("hi")], **body})
        await say_hi(prompt, base_url, api_key)
        return 1.0

    assert list(play(agent, scripted("hello")).rewards)[-1] == 1.0
