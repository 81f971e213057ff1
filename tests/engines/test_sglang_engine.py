"""SGLangEngine on the fake server: the contract, lost servers, interrupted generation. Real processes and sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import CONTRACT, EngineCase, after_a_sync_amid_a_generation_each_token_is_that_of_its_version, run
from fake_sglang import COMMAND
from fake_sglang.process import FakeServerProcess
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config
from waits import NUM_TOKENS, SLOWLY, until, until_written

from lightrl.engines import Timeouts
from lightrl.engines.sglang.addresses import addresses_from_environment
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

CONFIG = Qwen3Config(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, bos_token_id=0, eos_token_id=None,
)  # fmt: skip
WEIGHTS = [Bucket({"weight": torch.zeros(3)}, is_last=True)]


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [AutoModelForCausalLM.from_config(CONFIG) for _ in range(3)]


@pytest.fixture(scope="module")
def model_servers(models: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Any]]:
    folder = tmp_path_factory.mktemp("model")
    models[0].save_pretrained(folder)
    servers = [FakeServerProcess(str(folder)), FakeServerProcess(str(folder))]
    try:
        yield [server.start() for server in servers]
    finally:
        for server in servers:
            server.stop()


def engine_on(servers: list[FakeServerProcess], *, version: int | None = 0, **arguments: Any) -> SGLangEngine:
    engine = SGLangEngine(urls=[server.url for server in servers], **{"probe_interval_s": 0.1, **arguments})
    engine.start(Qwen3Config(vocab_size=1000, max_position_embeddings=100_000))
    if version is not None:
        engine.load_weights(iter(WEIGHTS), weight_version=version)
    return engine


@pytest.fixture
def scripted() -> Iterator[Callable[..., FakeServerProcess]]:
    servers: list[FakeServerProcess] = []

    def start(**arguments: Any) -> FakeServerProcess:
        servers.append(FakeServerProcess(**arguments).start())
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def contract_case(servers: list[FakeServerProcess], models: list[PreTrainedModel], **arguments: Any) -> EngineCase:
    engine = SGLangEngine(urls=[server.url for server in servers], **arguments)
    engine.start(CONFIG)
    return EngineCase(engine, models, is_exact=False)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_engine_on_a_fake_server_keeps_the_contract(
    check: Callable[[EngineCase], None], model_servers: list[FakeServerProcess], models: list[PreTrainedModel]
) -> None:
    case = contract_case(model_servers[:1], models)
    try:
        check(case)
    finally:
        case.engine.close()


@pytest.mark.parametrize("interrupt", ["retract", "abort"])
@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor"])
def test_each_token_is_that_of_its_version_on_two_servers(
    transport: str, interrupt: str, model_servers: list[FakeServerProcess], models: list[PreTrainedModel]
) -> None:
    case = contract_case(model_servers, models, transport=transport, interrupt=interrupt)
    try:
        after_a_sync_amid_a_generation_each_token_is_that_of_its_version(case)
    finally:
        case.engine.close()


def test_a_load_after_which_no_server_has_a_prefix_forgets_all_sessions(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    engine = engine_on([scripted(), scripted()])
    try:
        for version in (1, 2, 3):
            for number in range(5):
                run(engine.generate([1, 2], Sampling(max_new_tokens=2), session=f"{version}/{number}"))
            assert set(engine.pool.sessions) == {f"{version}/{number}" for number in range(5)}
            engine.load_weights(iter(WEIGHTS), weight_version=version)
            assert not engine.pool.sessions
    finally:
        engine.close()


def test_many_requests_at_once_are_shared_by_the_servers(scripted: Callable[..., FakeServerProcess]) -> None:
    servers = [scripted(**SLOWLY), scripted(**SLOWLY)]
    engine = engine_on(servers)

    async def one(seed: int) -> list[Any]:
        return await engine.generate([1, 2], Sampling(max_new_tokens=400, seed=seed), session=str(seed))

    async def scenario() -> list[Any]:
        tasks = [asyncio.create_task(one(seed)) for seed in range(200)]
        await until(lambda: sum(server.stats()["running"] for server in servers) == 200)
        for server in servers:
            server.pace(0)
        return await asyncio.gather(*tasks)

    assert len({tuple(group[0].token_ids) for group in run(scenario())}) == 200
    assert [server.stats()["requests"]["/generate"] for server in servers] == [100, 100]
    engine.close()


def test_a_session_stays_on_the_server_that_has_its_prefix(scripted: Callable[..., FakeServerProcess]) -> None:
    servers = [scripted(), scripted()]
    engine = engine_on(servers)

    async def scenario() -> None:
        for turn in range(4):
            await engine.generate([1] * (turn + 1), Sampling(max_new_tokens=2), session="one")

    run(scenario())
    assert sorted(server.stats()["requests"].get("/generate", 0) for server in servers) == [0, 4]
    engine.close()


@pytest.mark.parametrize("kind", ["drop", "error", "garbage"])
def test_a_request_that_fails_once_is_asked_again(kind: str, scripted: Callable[..., FakeServerProcess]) -> None:
    server = scripted(fault=[f"{kind}:/generate:2"])
    engine = engine_on([server])
    assert len(run(engine.generate([1], Sampling(max_new_tokens=5), session="s"))[0].token_ids) == 5
    assert server.stats()["requests"]["/generate"] == 3
    engine.close()


def test_a_request_that_is_refused_is_not_asked_again(scripted: Callable[..., FakeServerProcess]) -> None:
    server = scripted(context_length=10)
    engine = engine_on([server])
    with pytest.raises(EngineError, match=r"HTTP 400.*context"):
        run(engine.generate([1] * 20, Sampling(max_new_tokens=5), session="s"))
    assert server.stats()["requests"]["/generate"] == 1
    engine.close()


@pytest.mark.parametrize("end", ["kill", "freeze"])
def test_requests_of_a_lost_server_go_on_elsewhere_and_are_counted_once(
    end: str, scripted: Callable[..., FakeServerProcess]
) -> None:
    lost, left = scripted(**SLOWLY), scripted(**SLOWLY)
    engine = engine_on([lost, left], timeouts=Timeouts(hang_s=0.5))

    async def scenario() -> list[Any]:
        tasks = [
            asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS, seed=i), session=str(i)))
            for i in range(20)
        ]
        await until_written(lost, 10)
        getattr(lost, end)()
        left.pace(0)
        return await asyncio.gather(*tasks)

    groups = run(scenario())
    assert [len(group[0].token_ids) for group in groups] == [NUM_TOKENS] * 20
    assert engine.pool.servers[lost.url].state == "lost"
    assert engine.queue_depths() == {"running": 0, "waiting": 0}
    engine.close()


def test_when_all_servers_are_dead_the_error_says_what_became_of_each(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    servers = [scripted(**SLOWLY), scripted(**SLOWLY)]
    engine = engine_on(servers, timeouts=Timeouts(server_wait_s=0.5))

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s", n=4))
        await until(lambda: sum(server.stats()["running"] for server in servers) == 4)
        for server in servers:
            server.kill()
        await task

    with pytest.raises(EngineError, match="No server is left") as caught:
        run(scenario())
    assert all(server.url in str(caught.value) for server in servers)
    engine.close()


@pytest.mark.parametrize(("interrupt", "minimum"), [("retract", 0), ("retract", NUM_TOKENS), ("abort", NUM_TOKENS)])
def test_an_interrupted_request_keeps_its_tokens_its_limits_and_the_order_of_versions(
    interrupt: str, minimum: int, scripted: Callable[..., FakeServerProcess]
) -> None:
    server = scripted(**SLOWLY, vocab_size=10)
    engine = engine_on([server], interrupt=interrupt, verify_sync=False)  # without canaries among the requests
    sampling = Sampling(
        max_new_tokens=NUM_TOKENS, min_new_tokens=minimum, stop_token_ids=(1, 2, 3) if minimum else (), seed=4
    )

    async def scenario() -> Any:
        task = asyncio.create_task(engine.generate([1], sampling, session="s"))
        await until_written(server)
        await asyncio.to_thread(engine.load_weights, iter(WEIGHTS), weight_version=1)
        server.pace(0)
        return (await task)[0]

    completion = run(scenario())
    assert len(completion.token_ids) == NUM_TOKENS
    assert not minimum or not set(completion.token_ids) & {1, 2, 3}
    assert completion.weight_versions == sorted(completion.weight_versions)
    assert set(completion.weight_versions) == {0, 1}
    assert server.stats()["requests"]["/generate"] == (2 if minimum else 1)
    engine.close()


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "pause"])
def test_an_interruption_does_not_bar_stop_tokens_for_longer(
    is_load: bool, scripted: Callable[..., FakeServerProcess]
) -> None:
    server = scripted(**SLOWLY, vocab_size=10)
    engine = engine_on([server], verify_sync=False)
    minimum = NUM_TOKENS // 2
    sampling = Sampling(max_new_tokens=NUM_TOKENS, min_new_tokens=minimum, stop_token_ids=tuple(range(1, 10)), seed=4)

    async def completed(is_interrupted: bool) -> list[int]:
        task = asyncio.create_task(engine.generate([1], sampling, session="s"))
        if is_interrupted:
            await until_written(server)
            if is_load:
                await asyncio.to_thread(engine.load_weights, iter(WEIGHTS), weight_version=1)
            else:
                await engine.pause()
                await engine.resume()
            server.pace(0)
        return list((await task)[0].token_ids)

    interrupted = run(completed(True))
    assert interrupted == run(completed(False))
    assert minimum < len(interrupted) < NUM_TOKENS
    engine.close()


def test_a_paused_server_goes_on_though_its_request_has_ended_meanwhile(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    server = scripted(**SLOWLY)
    engine = engine_on([server])

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        await engine.pause()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.resume()
        assert len((await engine.generate([1], Sampling(max_new_tokens=3), session="s"))[0].token_ids) == 3

    run(scenario())
    engine.close()


def test_requests_are_sent_while_weights_are_staged_and_wait_from_the_pause_on(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    server = scripted()
    engine = engine_on([server], verify_sync=False)  # it would send requests of its own
    is_staging, may_go_on = threading.Event(), threading.Event()

    def staged() -> Iterator[Bucket]:
        is_staging.set()
        may_go_on.wait(60)
        yield from WEIGHTS

    async def scenario() -> None:
        loading = asyncio.create_task(asyncio.to_thread(engine.load_weights, staged(), weight_version=1))
        await until(is_staging.is_set)
        during = await engine.generate([1], Sampling(max_new_tokens=3), session="s")
        assert during[0].weight_versions == [0, 0, 0]
        server.fault("slow", "/pause_generation", seconds=2)
        may_go_on.set()
        await until(lambda: server.stats()["requests"]["/pause_generation"] == 2)
        late = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="s"))
        await until(lambda: engine.queue_depths()["waiting"] == 1)
        assert server.stats()["requests"]["/generate"] == 1
        await loading
        assert (await late)[0].weight_versions == [1, 1, 1]

    run(scenario())
    engine.close()


def test_a_resume_amid_a_load_does_not_let_the_server_go_on(scripted: Callable[..., FakeServerProcess]) -> None:
    server = scripted(**SLOWLY)
    engine = engine_on([server])

    async def scenario() -> Any:
        task = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        await engine.pause()
        server.fault("slow", "/update_weights_from_disk", seconds=2)
        loading = asyncio.create_task(asyncio.to_thread(engine.load_weights, iter(WEIGHTS), weight_version=1))
        await until(lambda: server.stats()["requests"].get("/update_weights_from_disk", 0) > 1)
        before = server.stats()["requests"]["/continue_generation"]
        await engine.resume()
        assert server.stats()["requests"]["/continue_generation"] == before
        await loading
        server.pace(0)
        return (await task)[0]

    assert set(run(scenario()).weight_versions) == {0, 1}
    engine.close()


def test_a_colocated_server_gives_its_memory_until_the_next_load(scripted: Callable[..., FakeServerProcess]) -> None:
    """The fake dies, as SGLang does, at a release while it runs and at a resume of what it has not released."""
    server = scripted(**SLOWLY)
    engine = engine_on([server], placement="colocated")

    async def scenario() -> Any:
        running = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        await asyncio.to_thread(engine.make_room)
        server.pace(0)
        waiting = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="t"))
        await asyncio.sleep(0.1)
        assert not running.done()
        assert not waiting.done()
        await asyncio.to_thread(engine.load_weights, iter(WEIGHTS), weight_version=1)
        return (await running)[0], (await waiting)[0]

    interrupted, late = run(scenario())
    assert set(interrupted.weight_versions) == {0, 1}
    assert late.weight_versions == [1, 1, 1]
    engine.make_room()
    engine.close()  # a server that goes on without us gets its memory back
    requests = server.stats()["requests"]
    assert requests["/release_memory_occupation"] == 2
    assert requests["/resume_memory_occupation"] == 6  # weights, graphs, cache; twice
    assert requests["/continue_generation"] == 3


def test_a_colocated_server_whose_load_fails_has_its_memory_and_old_weights_again(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    server = scripted()
    engine = engine_on([server], placement="colocated")
    engine.make_room()
    server.fault("error", "/update_weights_from_disk", count=1)
    with pytest.raises(WeightSyncError, match="500"):
        engine.load_weights(iter(WEIGHTS), weight_version=1)
    assert run(engine.generate([1], Sampling(max_new_tokens=3), session="s"))[0].weight_versions == [0, 0, 0]
    assert server.stats()["requests"]["/resume_memory_occupation"] == 3
    engine.close()


def test_a_cancelled_request_is_aborted_on_the_server(scripted: Callable[..., FakeServerProcess]) -> None:
    server = scripted(**SLOWLY)
    engine = engine_on([server])

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: not server.stats()["running"])

    run(scenario())
    assert server.stats()["requests"]["/abort_request"] == 1
    engine.close()


@pytest.mark.parametrize("kind", ["lose_update", "wrong_version"])
def test_a_server_that_acknowledges_another_version_gets_no_requests(
    kind: str, scripted: Callable[..., FakeServerProcess]
) -> None:
    liar, honest = scripted(), scripted()
    engine = engine_on([liar, honest], probe_interval_s=60)
    liar.fault(kind, "/update_weights_from_disk")
    engine.load_weights(iter(WEIGHTS), weight_version=1)
    assert engine.pool.servers[liar.url].state == "lost"
    assert "version" in engine.pool.servers[liar.url].reason
    before = liar.stats()["requests"].get("/generate", 0)  # a canary
    versions = [run(engine.generate([1], Sampling(max_new_tokens=2), session=str(i)))[0] for i in range(4)]
    assert all(completion.weight_versions == [1, 1] for completion in versions)
    assert liar.stats()["requests"].get("/generate", 0) == before
    engine.close()


def test_a_server_that_comes_back_gets_the_weights_before_requests(scripted: Callable[..., FakeServerProcess]) -> None:
    lost, left = scripted(), scripted()
    engine = engine_on([lost, left])
    lost.kill()

    async def until(state: str) -> None:
        while engine.pool.servers[lost.url].state != state:
            await asyncio.sleep(0.02)

    run(until("lost"))
    lost.start(lost.port)
    run(until("routable"))
    for number in range(4):
        assert run(engine.generate([1], Sampling(max_new_tokens=2), session=str(number)))[0].weight_versions == [0, 0]
    assert lost.stats()["requests"]["/generate"] > 0
    engine.close()


def test_servers_that_the_engine_starts_are_restarted_and_ended(tmp_path: Path) -> None:

    command = [*COMMAND, "--port", "{port}"]
    engine = SGLangEngine(servers=2, command=command, probe_interval_s=0.2, timeouts=Timeouts(hang_s=5))
    engine.start(Qwen3Config(vocab_size=1000))
    engine.load_weights(iter(WEIGHTS), weight_version=0)
    first = set(engine.pool.urls("routable"))
    assert engine.fleet is not None
    fleet = engine.fleet
    fleet.servers[0].stop(grace_s=0)

    async def until_back() -> None:
        while set(engine.pool.urls("routable")) == first or len(engine.pool.urls("routable")) < 2:
            await asyncio.sleep(0.05)

    run(until_back())
    assert run(engine.generate([1], Sampling(max_new_tokens=2), session="s"))[0].weight_versions == [0, 0]
    engine.close()
    assert not any(server.is_alive() for server in fleet.servers)


def test_a_server_with_a_token_is_asked_with_it(scripted: Callable[..., FakeServerProcess]) -> None:
    server = scripted(api_key="secret")
    engine = engine_on([server], token="secret")
    assert len(run(engine.generate([1], Sampling(max_new_tokens=3), session="s"))[0].token_ids) == 3
    engine.close()
    with pytest.raises(EngineError, match="401"):
        engine_on([server], token="wrong")


def test_addresses_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LIGHTRL_SERVER_ADDRS", raising=False)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "one:1, http://two:2")
    assert addresses_from_environment() == ["http://one:1", "http://two:2"]
    monkeypatch.setenv("LIGHTRL_SERVER_ADDRS", "three:3")
    assert addresses_from_environment() == ["http://three:3"]
    monkeypatch.delenv("LIGHTRL_SERVER_ADDRS")
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS")
    with pytest.raises(ValueError, match="servers: 1"):
        SGLangEngine().start(CONFIG)


@pytest.mark.parametrize(
    "arguments",
    [{"urls": ["a"], "servers": 1}, {"servers": 0}, {"transport": "pigeon"}, {"weights_dtype": "float9"}, {"tp": 0}],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"servers|transport|weights_dtype|tp"):
        SGLangEngine(**arguments)


def test_what_servers_have_written_is_known_while_requests_are_paused_and_they_go_on(
    scripted: Callable[..., FakeServerProcess],
) -> None:
    server = scripted(**SLOWLY)
    engine = engine_on([server])
    sampling = Sampling(max_new_tokens=NUM_TOKENS, seed=7)

    async def paused_amid() -> tuple[Any, Any]:
        writing = asyncio.ensure_future(engine.generate([1, 2], sampling, session="a"))
        await until_written(server)
        await engine.pause()
        unfinished = await engine.unfinished()
        await engine.resume()
        server.pace(0)
        return unfinished, (await writing)[0]

    try:
        unfinished, whole = run(paused_amid())
    finally:
        engine.close()
    (part,) = unfinished.values()
    assert list(unfinished) == [7]
    assert part.finish_reason == "abort"
    assert 1 <= len(part.token_ids) < len(whole.token_ids) == NUM_TOKENS
    assert whole.token_ids[: len(part.token_ids)] == part.token_ids
