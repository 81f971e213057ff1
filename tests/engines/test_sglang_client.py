"""SGLangClient against a fake server in a process of its own: deadlines, retries, messages."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from fake_sglang.process import FakeServerProcess
from waits import no_more_files

from lightrl.engines import Timeouts
from lightrl.engines.servers.connection import OutOfFiles, ServerRefused
from lightrl.engines.servers.processes.process import HeldPort
from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineTimeout, EngineUnreachable


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServerProcess]:
    with FakeServerProcess() as started:
        yield started


def ask(url: str, question: Callable[[SGLangClient], Awaitable[Any]], **arguments: Any) -> Any:
    async def scenario() -> Any:
        client = SGLangClient(url, **{"backoff_s": 0.01, "timeouts": Timeouts(request_s=600.0), **arguments})
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(scenario())


def body(**params: Any) -> dict[str, Any]:
    return {"rid": "r" * 32, "input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3, **params}}


@pytest.mark.parametrize("kind", ["drop", "error", "garbage"])
def test_a_failed_question_is_asked_again(kind: str, server: FakeServerProcess) -> None:
    server.fault(kind, "/model_info", count=2)
    assert ask(server.url, lambda client: client.model_info())["weight_version"] == "default"


@pytest.mark.parametrize("status", [408, 425, 429, 502, 503, 504])
def test_a_busy_server_is_asked_until_it_answers_or_beyond_the_deadline(status: int, server: FakeServerProcess) -> None:
    paths = {"/model_info": lambda client: client.model_info(), "/generate": lambda client: client.generate(body())}
    for path, question in paths.items():
        server.fault("error", path, count=3, status=status, retry_after="0.01")
        assert ask(server.url, question, num_retries=1)
    server.fault("error", "/model_info", status=status, retry_after="3600")
    with pytest.raises(ServerRefused, match=rf"answered /model_info with HTTP {status}: .*Check the server's log"):
        ask(server.url, lambda client: client.model_info())


def test_a_load_that_a_balancer_may_have_passed_on_is_not_sent_again(server: FakeServerProcess) -> None:
    def pause(client: SGLangClient) -> Awaitable[Any]:
        return client.request("POST", "/pause_generation", {"mode": "retract"}, num_retries=0, read=None)

    server.fault("error", "/pause_generation", status=502)
    with pytest.raises(ServerRefused, match="HTTP 502"):
        ask(server.url, pause)
    server.fault("error", "/pause_generation", status=503)
    ask(server.url, pause)
    server.reset()


def test_a_generation_that_is_asked_again_has_a_new_rid(server: FakeServerProcess) -> None:
    server.fault("drop")
    request = body()
    answer = ask(server.url, lambda client: client.generate(request))
    assert answer["meta_info"]["id"] == request["rid"] != "r" * 32


def test_a_server_that_hangs_is_named_at_the_deadline_with_what_it_last_answered(server: FakeServerProcess) -> None:
    async def hang(client: SGLangClient) -> None:
        await client.model_info()
        server.fault("hang")
        await client.generate(body(), timeout_s=0.1)

    with pytest.raises(EngineTimeout, match=r"/generate within 0.1 s.*last answered /model_info"):
        ask(server.url, hang)


def test_an_address_where_nothing_listens_is_said_in_words() -> None:
    reason = r"127\.0\.0\.1 port \d+ refused the connection; nothing is listening there"
    with contextlib.closing(HeldPort("127.0.0.1")) as held, pytest.raises(EngineUnreachable, match=reason) as caught:
        ask(f"http://127.0.0.1:{held.number}", lambda client: client.model_info(), num_retries=1)
    assert "has never answered" in str(caught.value)
    assert "Connector" not in str(caught.value)


def test_a_process_that_may_open_no_more_files_does_not_blame_the_server(server: FakeServerProcess) -> None:
    async def scenario(client: SGLangClient) -> None:
        with no_more_files():
            await client.model_info()

    with pytest.raises(OutOfFiles, match=r"This machine could not open a connection to .*ulimit -n") as caught:
        ask(server.url, scenario, num_retries=1)
    assert "Check that it is running" not in str(caught.value)


def test_control_continues_while_all_connections_generate(server: FakeServerProcess) -> None:
    async def scenario(client: SGLangClient) -> None:
        before = server.stats()["requests"].get("/generate", 0)
        server.fault("slow", seconds=600)
        tasks = [asyncio.create_task(client.generate({**body(), "rid": str(i) * 32})) for i in range(2)]
        while server.stats()["requests"].get("/generate", 0) == before:
            await asyncio.sleep(0.01)
        await client.model_info(timeout_s=60)  # behind a generation it would wait for longer
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    ask(server.url, scenario, max_connections=1)


@pytest.mark.bad_input
def test_an_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must look like http://host:port, got 'localhost:1'"):
        SGLangClient("localhost:1")


@pytest.mark.bad_input
@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Timeouts)])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_timeout_that_is_not_positive_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"engine.timeouts.{name} must be a finite number above 0"):
        Timeouts(**{name: value})
