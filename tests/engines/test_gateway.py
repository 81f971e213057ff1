"""Requests through SGLang's gateway: a fake one with real sockets, and smg itself where it is installed."""

import asyncio
import dataclasses
import functools
import importlib.util
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from engine_contract import CONTRACT, EngineCase, after_a_sync_during_a_generation_each_token_is_that_of_its_version
from fake_gateway import FakeGateway
from fake_sglang.process import FakeServerProcess
from sync_cases import LARGE, EngineOn, Start, one_weight
from test_registry import NUM_TOKENS, announced, is_whole, often
from waits import SLOWLY, Deadlines, until

from lightrl.engines.servers import request_loop
from lightrl.engines.servers.registry import ServerEntry
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError
from lightrl.trajectory import Sampling

__all__ = ["announced", "often"]  # fixtures

NEEDS_SMG = pytest.mark.skipif(importlib.util.find_spec("smg") is None, reason="smg is not installed")
REAL = pytest.param("smg", marks=[NEEDS_SMG, pytest.mark.extra])
BOTH = pytest.mark.parametrize("router", ["fake", REAL], indirect=True)
SMG = pytest.mark.parametrize("router", [pytest.param("smg", marks=NEEDS_SMG)], indirect=True)
PATIENT = Deadlines(hang_s=20.0, request_s=20.0, sync_s=20.0, server_wait_s=60.0)  # a busy machine loses no server


@pytest.fixture
def fake() -> Iterator[FakeGateway]:
    with FakeGateway().serving() as gateway:
        yield gateway


@pytest.fixture
def router(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """`smg`, the address of a fake gateway, or none: the engine sends requests to the servers itself."""
    if request.param != "fake":
        yield request.param
        processes = psutil.Process().children(recursive=True)
        assert not [process for process in processes if "smg.launch_router" in str(command_of(process)[1:3])]
    else:
        with FakeGateway().serving() as gateway:
            yield gateway.url


@pytest.fixture
def engine_through(router: str | None, engine_on: EngineOn) -> EngineOn:
    """Starts an engine whose requests go through `router`, which ends after it."""
    return functools.partial(engine_on, router=router, timeouts=PATIENT)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


async def request(engine: SGLangEngine, number: int = 0, num_tokens: int = NUM_TOKENS) -> Any:
    (completion,) = await engine.generate([1], Sampling(max_new_tokens=num_tokens, seed=1), session=str(number))
    return completion


def requests(engine: SGLangEngine, num: int, num_tokens: int = NUM_TOKENS) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(request(engine, number, num_tokens)) for number in range(num)]


def serving(engine: SGLangEngine) -> set[str]:
    """The servers that get requests, by the engine or by its gateway."""
    router = engine.loader.members.router
    return set(engine.fleet.urls("routable") if router.state is None else router.state.serving)


def num_running(*servers: FakeServerProcess) -> list[int]:
    return [int(server.stats()["running"]) for server in servers]


def num_generated(server: FakeServerProcess) -> int:
    return int(server.stats()["requests"].get("/generate", 0))


@BOTH
def test_a_server_that_does_not_prove_the_new_weights_gets_no_request(start: Start, engine_through: EngineOn) -> None:
    liar, honest = start(), start()
    engine = engine_through(liar, honest, timeouts=dataclasses.replace(PATIENT, probe_interval_s=60.0))

    async def answers(version: int) -> None:
        for completion in await asyncio.gather(*requests(engine, 32, 2)):
            assert completion.weight_versions == [version, version]

    asyncio.run(answers(0))
    assert serving(engine) == {liar.url, honest.url}
    assert num_generated(liar) > 0
    liar.fault("wrong_version", "/update_weights_from_disk")
    engine.load_weights(one_weight(1), weight_version=1)
    assert engine.fleet.servers[liar.url].state == "lost"
    before = num_generated(liar)
    asyncio.run(answers(1))
    assert num_generated(liar) == before
    assert serving(engine) == {honest.url}


@BOTH
@pytest.mark.parametrize(
    "end",
    [pytest.param(FakeServerProcess.kill, marks=pytest.mark.extra), FakeServerProcess.freeze],
    ids=["killed", "hung"],
)
def test_requests_of_a_server_that_ends_continue_and_it_serves_again_when_it_is_back(
    end: Callable[[FakeServerProcess], None], start: Start, engine_through: EngineOn
) -> None:
    doomed, left = start(**SLOWLY), start(**SLOWLY)
    is_killed = end is FakeServerProcess.kill
    timeouts = PATIENT if is_killed else dataclasses.replace(PATIENT, hang_s=1.0)
    engine = engine_through(doomed, left, timeouts=timeouts)

    async def scenario() -> list[Any]:
        writing = requests(engine, 8)
        await until(lambda: sum(num_running(doomed, left)) == 8)
        running = num_running(doomed, left)
        assert running[0] > 0
        await until(lambda: [one.num_requests for one in engine.fleet.servers.values()] == running)
        await until(lambda: min(left.stats()["written"]) > 5)
        end(doomed)
        await until(lambda: left.stats()["running"] == 8)
        await asyncio.to_thread(doomed.start, doomed.port) if is_killed else doomed.thaw()
        await until(lambda: serving(engine) == {doomed.url, left.url})
        left.pace(0)
        doomed.pace(0)
        await asyncio.gather(*requests(engine, 8, 2))
        assert num_generated(doomed) > 0
        return await asyncio.gather(*writing)

    assert all(is_whole(completion.token_ids) for completion in asyncio.run(scenario()))


@pytest.mark.parametrize("router", [None, "fake", REAL], indirect=True)
def test_servers_join_and_leave_during_a_run_and_no_token_is_lost(
    tmp_path: Path, announced: Any, often: None, start: Start, engine_through: EngineOn
) -> None:
    first, second = start(**SLOWLY), start(**SLOWLY)
    leaving = announced(ServerEntry(first.url))
    engine = engine_through(urls=[f"file://{tmp_path}"])

    async def scenario() -> list[Any]:
        writing = requests(engine, 4)
        await until(lambda: first.stats()["running"] == 4)
        announced(ServerEntry(second.url))
        await until(lambda: serving(engine) == {first.url, second.url})
        assert await asyncio.to_thread(leaving.leave)
        assert not first.stats()["running"]
        assert engine.fleet.urls() == [second.url]
        assert serving(engine) == {second.url}
        second.pace(0)
        return await asyncio.gather(*writing)

    assert all(is_whole(completion.token_ids) for completion in asyncio.run(scenario()))
    engine.load_weights(one_weight(1), weight_version=1)
    assert engine.last_sync.versions == {second.url: 1}


@BOTH
def test_a_cancelled_request_is_aborted_whichever_server_has_it(start: Start, engine_through: EngineOn) -> None:
    servers = [start(**SLOWLY), start(**SLOWLY)]
    engine = engine_through(*servers)

    async def scenario() -> None:
        (writing,) = requests(engine, 1)
        await until(lambda: sum(num_running(*servers)) == 1)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await until(lambda: all(server.stats()["requests"].get("/abort_request") for server in servers))
        await until(lambda: not any(server.stats()["running"] for server in servers))

    asyncio.run(scenario())


def test_an_answer_of_a_server_without_the_weights_is_not_used(
    monkeypatch: pytest.MonkeyPatch, fake: FakeGateway, start: Start, engine_on: EngineOn
) -> None:
    monkeypatch.setattr(request_loop, "MAX_RETRIES", 2)
    engine, foreign = engine_on(start(), router=fake.url, timeouts=PATIENT), start()
    fake.misroutes_to = foreign.url
    with pytest.raises(EngineError, match=rf"{fake.url} sent a request to {foreign.url}, which does not have"):
        asyncio.run(request(engine, num_tokens=2))
    assert num_generated(foreign) == 3


@pytest.mark.parametrize(
    "end", [pytest.param(FakeGateway.stop, marks=pytest.mark.extra), FakeGateway.freeze], ids=["ends", "hangs"]
)
def test_when_the_gateway_is_gone_the_error_names_it(
    end: Callable[[FakeGateway], None], fake: FakeGateway, start: Start, engine_on: EngineOn
) -> None:
    server = start(**SLOWLY)
    timeouts = Deadlines(hang_s=2.0, request_s=5.0, sync_s=5.0, server_wait_s=5.0)
    engine = engine_on(server, timeouts=timeouts, router=fake.url)

    async def scenario() -> list[Any]:
        writing = requests(engine, 2)
        await until(lambda: server.stats()["running"] == 2)
        await asyncio.to_thread(end, fake)
        return await asyncio.gather(*writing, return_exceptions=True)

    for error in asyncio.run(scenario()):
        assert isinstance(error, EngineError)
        assert "engine.timeouts.startup_s=5" in str(error)
        assert f"Gateway {fake.url}" in str(error)
    assert engine.fleet.servers[server.url].state == "routable"


def test_a_gateway_that_was_restarted_gets_the_servers_and_the_requests_again(
    fake: FakeGateway, start: Start, engine_on: EngineOn
) -> None:
    server = start(**SLOWLY)
    engine = engine_on(server, router=fake.url, timeouts=PATIENT)

    async def scenario() -> list[Any]:
        writing = requests(engine, 4)
        await until(lambda: server.stats()["running"] == 4)
        await asyncio.to_thread(fake.stop)
        with FakeGateway(port=fake.port).serving():
            await until(lambda: server.stats()["running"] == 4)
            server.pace(0)
            return await asyncio.gather(*writing)

    assert all(is_whole(completion.token_ids) for completion in asyncio.run(scenario()))


@pytest.mark.extra
@SMG
def test_smg_is_restarted_when_it_is_killed_and_ends_with_the_engine(start: Start, engine_through: EngineOn) -> None:
    server = start(**SLOWLY)
    engine = engine_through(server)

    async def scenario() -> list[Any]:
        writing = requests(engine, 4)
        await until(lambda: server.stats()["running"] == 4)
        killed = smg()
        killed.kill()
        await until(lambda: smg() is not None and smg() != killed)
        await until(lambda: server.stats()["running"] == 4)
        server.pace(0)
        return await asyncio.gather(*writing)

    assert all(is_whole(completion.token_ids) for completion in asyncio.run(scenario()))


def smg() -> psutil.Process | None:
    """The gateway itself, which renames its process."""
    processes = psutil.Process().children(recursive=True)
    return next((process for process in processes if "smg" in str(command_of(process)[:1])), None)


@SMG
def test_smg_takes_requests_with_the_token_alone_and_learns_no_other_secret(
    monkeypatch: pytest.MonkeyPatch, start: Start, engine_through: EngineOn
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "another-secret")
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "a-secret")
    server = start(api_key="a-secret")
    engine = engine_through(server)
    url = engine.loader.members.router.url

    async def statuses() -> list[int]:
        async with aiohttp.ClientSession() as client:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
            asked = [client.post(f"{url}/generate", json=body), client.get(f"{url}/workers")]
            return [answer.status for answer in await asyncio.gather(*asked)]

    assert asyncio.run(statuses()) == [401, 401]
    assert len(asyncio.run(request(engine, num_tokens=2)).token_ids) == 2
    assert {port.laddr.ip for port in smg().net_connections() if port.status == "LISTEN"} == {"127.0.0.1"}
    assert not [one for one in psutil.process_iter() if "a-secret" in str(command_of(one)) and one.pid != server.pid]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"router": "pigeon"}, "'pigeon'"), ({"router": "smg", "adapters": "served"}, "adapters='merged'")],
    ids=["no address", "served adapters"],
)
def test_a_router_that_cannot_work_is_refused_at_once(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SGLangEngine(**arguments)


def test_a_gateway_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    monkeypatch.setitem(sys.modules, "smg", None)
    with pytest.raises(ValueError, match="pip install smg"):
        SGLangEngine(urls=[start().url], router="smg").start(LARGE)


def test_a_gateway_with_workers_of_others_is_refused(fake: FakeGateway, start: Start) -> None:
    other = {"id": "7", "url": "http://127.0.0.1:9", "status": "ready", "load": 0}
    fake.workers[other["url"]] = other
    with pytest.raises(EngineError, match=f"has a worker {other['url']}.*curl -X DELETE {fake.url}/workers/7"):
        SGLangEngine(urls=[start().url], router=fake.url).start(LARGE)


def test_a_server_is_no_gateway_and_a_gateway_no_server(fake: FakeGateway, start: Start) -> None:
    server = start()
    with pytest.raises(EngineError, match="Check that router is the address of a gateway"):
        SGLangEngine(urls=[server.url], router=server.url).start(LARGE)
    with pytest.raises(EngineError, match="If it is a gateway, set router to it, and urls to the servers"):
        SGLangEngine(urls=[fake.url]).start(LARGE)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nothing = f"http://127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(EngineError, match=f"Gateway {nothing} did not answer /workers"):
        SGLangEngine(urls=[server.url], router=nothing).start(LARGE)


@pytest.mark.extra
@SMG
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_engine_through_smg_keeps_the_contract(
    check: Callable[[EngineCase], None], router: str, contract_case: Any
) -> None:
    check(contract_case(1, router=router))


@BOTH
def test_each_token_is_that_of_its_version_on_two_servers(router: str, contract_case: Any) -> None:
    after_a_sync_during_a_generation_each_token_is_that_of_its_version(contract_case(2, router=router))
