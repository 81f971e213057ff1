"""OpenEnv and OpenEnvTools: against recorded messages always, against openenv 0.10 itself where it is built."""

import asyncio
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chat_texts import END, WITH_TOOLS, chat_prompt, chat_tokenizer, letters, played, writes
from fake_openenv import Dying, Echo, Full, GuessDigit, Shop, Slow, openenv

from lightrl.errors import RolloutError
from lightrl.trajectory import Prompt
from lightrl.workflows import MultiTurn, OpenEnv, OpenEnvTools
from lightrl.workflows.multi_turn import CheckedStep, call_environment

ROOT = Path(__file__).parents[2]
FAKES: dict[str, type[Any]] = {"openenv_server": GuessDigit, "openenv_shop": Shop}
processes: dict[str, subprocess.Popen[bytes]] = {}  # real servers, by address
CALL = '<tool_call>{"name": "price", "arguments": %s}</tool_call>'


@functools.cache
def openenv_python() -> str | None:
    build = [sys.executable, str(ROOT / "scripts" / "environments" / "build.py"), "--check", "openenv"]
    return subprocess.run(build, capture_output=True, text=True).stdout.strip() or None


@contextmanager
def real(name: str) -> Iterator[str]:
    python = openenv_python()
    if python is None:
        pytest.skip("scripts/environments/build.py openenv has not been run")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, str(ROOT / "examples" / "environments" / f"{name}.py"), "--port", str(port)]
    server = subprocess.Popen(command, env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"})
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert server.poll() is None
            time.sleep(0.2)
        processes[f"http://127.0.0.1:{port}"] = server
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture(params=["recorded", pytest.param("real", marks=pytest.mark.extra)])
def serve(request: pytest.FixtureRequest) -> Callable[[str], Any]:
    return real if request.param == "real" else lambda name: openenv(FAKES[name])


def guessing(url: str, **settings: Any) -> OpenEnv:
    return OpenEnv(url, observation="text", reset_fields=["secret"], **settings)


def said(*texts: str) -> Any:
    return writes(*([*letters(text), END] for text in texts))


def test_each_completion_is_an_action_and_earns_the_servers_reward(serve: Callable[[str], Any]) -> None:
    with serve("openenv_server") as url:
        flow = MultiTurn(chat_tokenizer(), lambda: guessing(url), discount=0.5)
        trajectory = played(flow, said("7", "3", "5"), chat_prompt(secret=5))
    text = chat_tokenizer().decode(list(trajectory.token_ids))
    assert [part.split("<|im_end|>")[0] for part in text.split("user\n")[1:]] == ["1+1?", "=", "-", "+"]
    assert [reward for reward in trajectory.rewards or [] if reward] == [0.25]
    assert not trajectory.is_truncated


def test_32_sessions_at_once_have_an_environment_each(serve: Callable[[str], Any]) -> None:
    async def guesses(url: str, secret: int) -> int:
        environment = guessing(url)
        prompt = Prompt(str(secret), messages=[], fields={"secret": secret % 10})
        assert await call_environment(environment, "reset", prompt, timeout_s=20) == "="
        for guess in range(10):
            step = CheckedStep.of(await call_environment(environment, "step", str(guess), timeout_s=20), "OpenEnv")
            if step.is_done:
                break
        await call_environment(environment, "close", timeout_s=20)
        return guess

    async def all_guesses(url: str) -> list[int]:
        return await asyncio.gather(*(guesses(url, secret) for secret in range(32)))

    with serve("openenv_server") as url:
        assert asyncio.run(all_guesses(url)) == [secret % 10 for secret in range(32)]


def test_a_group_starts_from_the_same_seed_and_reads_all_fields_by_default(serve: Callable[[str], Any]) -> None:
    async def first_guesses(url: str) -> list[bool]:
        found = []
        for _ in range(2):
            environment = OpenEnv(url)
            assert await environment.reset(Prompt("a", messages=[], fields={"secret": 4})) == '{"text": "="}'
            found.append((await environment.step("7"))[2])  # crc32 of "a" ends in 7
            await environment.close()
        return found

    with serve("openenv_server") as url:
        assert asyncio.run(first_guesses(url)) == [True, True]


def test_the_policy_calls_the_servers_tools_and_earns_their_reward(serve: Callable[[str], Any]) -> None:
    with serve("openenv_shop") as url:
        flow = MultiTurn(chat_tokenizer(WITH_TOOLS), lambda: OpenEnvTools(url))
        trajectory = played(flow, said(CALL % "{}", CALL % '{"item": "tea"}', "3"))
    text = chat_tokenizer().decode(list(trajectory.token_ids))
    assert '"description": "its name"' in text.splitlines()[0]
    assert 'user\n{"task": "What does tea cost?"}' in text
    assert "tool\nError: ValueError: 1 validation error for call[price]\nitem\n  Missing required argument" in text
    assert "tool\n3<|im_end|>" in text
    assert [reward for reward in trajectory.rewards or [] if reward] == [1.0]
    assert trajectory.metrics == {"turns": 3.0, "tool_calls": 2.0, "tool_errors": 1.0}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("session", "says"),
    [
        pytest.param(Dying, ["closed the connection during a step", "Its log says why"], id="closes midway"),
        pytest.param(Full, ["refused a reset", "8/8 sessions", "Increase its max_concurrent_envs"], id="is full"),
        pytest.param(Echo, ["is not an OpenEnv server: it answered a reset with", '{"echo"'], id="another protocol"),
    ],
)
def test_a_server_that_fails_drops_the_trajectory_with_one_message(session: type[Any], says: list[str]) -> None:
    with openenv(session) as url, pytest.raises(RolloutError) as caught:
        played(MultiTurn(chat_tokenizer(), lambda: guessing(url)), said("7"), chat_prompt(secret=5))
    assert all(words in str(caught.value) for words in [url, *says]), caught.value


@pytest.mark.extra
def test_the_real_server_killed_during_a_run_drops_the_trajectory() -> None:
    async def step_after_the_kill(url: str) -> None:
        environment = guessing(url)
        await environment.reset(chat_prompt(secret=5))
        processes[url].kill()
        try:
            await asyncio.wait_for(environment.step("3"), 20)
        finally:
            await environment.close()

    with real("openenv_server") as url:
        with pytest.raises(RolloutError, match="closed the connection during a step"):
            asyncio.run(step_after_the_kill(url))
        with pytest.raises(RolloutError, match="No OpenEnv server answers at"):
            played(MultiTurn(chat_tokenizer(), lambda: guessing(url)), said("5"), chat_prompt(secret=5))


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("session", "make", "says"),
    [
        pytest.param(None, OpenEnv, ["No OpenEnv server answers at url=", "404"], id="a server of another kind"),
        pytest.param(None, OpenEnvTools, ["must be an OpenEnv server with", "HTTP status 404"], id="no tools there"),
        pytest.param(GuessDigit, OpenEnvTools, ["with tools", "type: Extra inputs"], id="tools of a text server"),
        pytest.param(Shop, OpenEnv, ["action='message'", "tool_name", "Use OpenEnvTools"], id="texts to a tool server"),
    ],
)
def test_a_server_of_the_wrong_kind_is_refused_at_the_start(session: Any, make: Any, says: list[str]) -> None:
    with openenv(session) as url, pytest.raises(ValueError, match="url") as caught:
        make(url)
    assert all(words in str(caught.value) for words in [url, *says]), caught.value


@pytest.mark.bad_input
def test_fields_that_are_not_there_are_named() -> None:
    with openenv(GuessDigit) as url:
        with pytest.raises(RolloutError, match="no column secret, which reset_fields names"):
            played(MultiTurn(chat_tokenizer(), lambda: guessing(url)), said("7"))
        flow = MultiTurn(chat_tokenizer(), lambda: OpenEnv(url, observation="board"))
        with pytest.raises(
            RolloutError,
            match=r"observation='board' is not a field of the server's observation\. Set it to one of metadata, text\.",
        ):
            played(flow, said("7"))


def test_a_late_answer_is_not_taken_for_that_of_the_next_call() -> None:
    async def calls(url: str) -> str:
        environment = OpenEnvTools(url, tool_timeout_s=0.2)
        await environment.reset(Prompt("a", messages=[]))
        try:
            observation, *_ = await environment.step(CALL % '{"item": "milk"}')
            await environment.step(CALL % '{"item": "tea"}')
        finally:
            await environment.close()
        return str(observation)

    with openenv(Slow) as url, pytest.raises(RolloutError, match=r"missed a call's deadline.*tool_timeout_s"):
        asyncio.run(calls(url))
