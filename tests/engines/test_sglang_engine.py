"""SGLangEngine on the fake server: the contract, lost servers, interrupted generation. Real processes and sockets."""

import asyncio
import inspect
import re
import resource
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engine_contract import CONTRACT, after_a_sync_during_a_generation_each_token_is_that_of_its_version, run
from sync_cases import config_of, one_weight
from transformers import AutoConfig
from waits import NUM_TOKENS, SLOWLY, Deadlines, no_more_files, until, until_written

from lightrl.engines.servers import connection
from lightrl.engines.servers.addresses import addresses_from_environment
from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket


def test_an_engine_of_servers_has_at_most_thirteen_settings():
    constructors = (ServerEngine.__init__, SGLangEngine.__init__)
    names = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    assert len(names - {"self", "settings"}) <= 13


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"server_args": {"quantization": "w8a8_int8"}},
            "server_args.quantization must be fp8 or None, got 'w8a8_int8'",
        ),
        ({"server_args": {"quantization": "fp8"}}, "needs hidden_size to be a multiple of 128"),
        ({"server_args": {"quantization": "fp8"}, "adapters": "served"}, "needs adapters='merged'"),
        ({"server_args": {"quantization": "fp8"}, "transport": "distributed"}, "cannot send float8 over gloo"),
    ],
)
def test_a_quantization_that_cannot_be_sent_is_refused_before_a_server_is_asked(settings, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=told):
        SGLangEngine(urls=["http://127.0.0.1:1"], **settings).start(config_of())


@pytest.mark.parametrize(
    ("dtype", "auto"),
    [
        pytest.param("bfloat16", "bfloat16", id="the config's"),
        pytest.param("float32", "float16", id="but float16 for float32"),
        pytest.param(None, "float16", id="or none"),
    ],
)
def test_auto_is_the_dtype_that_sglang_makes_of_it(dtype, auto):
    config = AutoConfig.for_model("qwen3", dtype=dtype)
    assert SGLangEngine(servers=1).dtype_of_auto(config) == getattr(torch, auto)


@pytest.mark.parametrize(("dtype", "name"), [("auto", "bfloat16"), ("float32", "float32"), ("float16", "float16")])
def test_sglang_names_the_dtypes_of_its_servers(dtype, name, start, engine_on):
    engine = engine_on(start(dtype=dtype), config=AutoConfig.for_model("qwen3", dtype="bfloat16"))
    assert engine.dtypes() == {name}


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_engine_on_a_fake_server_keeps_the_contract(check, contract_case):
    check(contract_case(1))


@pytest.mark.parametrize("transport", ["disk", "distributed", "tensor"])
def test_each_token_is_that_of_its_version_on_two_servers(transport, contract_case):
    after_a_sync_during_a_generation_each_token_is_that_of_its_version(contract_case(2, transport=transport))


def test_a_session_stays_on_the_server_that_has_its_prefix_until_a_load_after_which_none_has_it(start, engine_on):
    servers = [start(), start()]
    engine = engine_on(*servers, should_verify=False)  # without canaries among the requests
    for num_turns in range(1, 5):
        run(engine.generate([1] * num_turns, Sampling(max_new_tokens=2), session="one"))
    assert sorted(server.stats()["requests"].get("/generate", 0) for server in servers) == [0, 4]
    assert set(engine.fleet.sessions) == {"one"}
    engine.load_weights(one_weight(1), weight_version=1)
    assert not engine.fleet.sessions


def test_a_low_limit_of_open_files_caps_the_requests_in_flight_and_says_so(
    start, engine_on, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    engine_on(start(), start())
    (text,) = [record.getMessage() for record in caplog.records if "may open only 1024 files" in record.getMessage()]
    num = int(re.search(r"sends each server at most (\d+) requests", text)[1])
    assert 200 < num < 440  # (1024 - 128 - what pytest has open) / 2 - 16


def test_requests_wait_for_free_files_and_no_server_is_lost_for_them(start, engine_on) -> None:
    server = start()
    engine = engine_on(server, timeouts=Deadlines(probe_interval_s=0.02))

    async def scenario() -> Any:
        with no_more_files():
            task = asyncio.create_task(engine.generate([1, 2], Sampling(max_new_tokens=3), session="s"))
            await asyncio.sleep(0.3)
            assert not task.done()
        return await task

    assert len(run(scenario())[0].token_ids) == 3
    assert engine.fleet.servers[server.url].losses == ()


def test_a_server_behind_a_busy_balancer_is_asked_again_with_one_warning(start, engine_on, monkeypatch, caplog):
    monkeypatch.setattr(connection, "BUSY_S", 0.0)
    server = start()
    for path in ("/generate", "/update_weights_from_disk", "/server_info", "/pause_generation"):
        server.fault("error", path, count=2, status=429, retry_after="0.01")
    (completion,) = run(engine_on(server).generate([1], Sampling(max_new_tokens=3), session="s"))
    assert len(completion.token_ids) == 3
    assert [fault["num_fired"] for fault in server.stats()["faults"]] == [2] * 4
    (warning,) = [text for text in caplog.messages if "refuses requests as busy" in text]
    assert f"{server.url} answered" in warning


def test_a_request_that_is_refused_is_not_asked_again(start, engine_on):
    server = start(context_length=10)
    engine = engine_on(server)
    with pytest.raises(EngineError, match=r"HTTP 400.*context"):
        run(engine.generate([1] * 20, Sampling(max_new_tokens=5), session="s"))
    assert server.stats()["requests"]["/generate"] == 1


@pytest.mark.parametrize("minimum", [0, NUM_TOKENS])
def test_an_interrupted_request_keeps_its_tokens_its_limits_and_the_order_of_versions(minimum, start, engine_on):
    server = start(**SLOWLY, vocab_size=10)
    engine = engine_on(server, should_verify=False)  # without canaries among the requests
    sampling = Sampling(
        max_new_tokens=NUM_TOKENS, min_new_tokens=minimum, stop_token_ids=(1, 2, 3) if minimum else (), seed=4
    )

    async def scenario() -> Any:
        await engine.generate([1], Sampling(max_new_tokens=1, min_new_tokens=1, stop_token_ids=(1,)), session="earlier")
        task = asyncio.create_task(engine.generate([1], sampling, session="s"))
        await until_written(server)
        await asyncio.to_thread(engine.load_weights, one_weight(1), weight_version=1)
        server.pace(0)
        return (await task)[0]

    completion = run(scenario())
    assert len(completion.token_ids) == NUM_TOKENS
    assert not minimum or not set(completion.token_ids) & {1, 2, 3}
    assert completion.weight_versions == sorted(completion.weight_versions)
    assert set(completion.weight_versions) == {0, 1}
    assert server.stats()["requests"]["/generate"] == (3 if minimum else 2)  # only its own minimum aborts it


def test_requests_are_sent_while_weights_are_staged_and_wait_from_the_pause_on(start, engine_on):
    server = start()
    engine = engine_on(server, should_verify=False)  # it would send requests of its own
    is_staging, may_go_on = threading.Event(), threading.Event()

    def staged() -> Iterator[Bucket]:
        is_staging.set()
        may_go_on.wait(600)
        yield from one_weight(1)

    async def scenario() -> None:
        loading = asyncio.create_task(asyncio.to_thread(engine.load_weights, staged(), weight_version=1))
        await until(is_staging.is_set)
        during = await engine.generate([1], Sampling(max_new_tokens=3), session="s")
        assert during[0].weight_versions == [0, 0, 0]
        server.fault("slow", "/pause_generation", seconds=5)
        may_go_on.set()
        await until(lambda: server.stats()["requests"]["/pause_generation"] == 2)
        late = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="s"))
        await until(lambda: engine.queue_depths()["waiting"] == 1)
        assert server.stats()["requests"]["/generate"] == 1
        await loading
        assert (await late)[0].weight_versions == [1, 1, 1]

    run(scenario())


def test_a_colocated_server_gives_its_memory_until_the_next_load(start, engine_on):
    """The fake dies, as SGLang does, at a release while it runs and at a resume of what it has not released."""
    server = start(**SLOWLY)
    engine = engine_on(server, placement="colocated")

    async def scenario() -> Any:
        running = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        await asyncio.to_thread(engine.release_memory)
        server.pace(0)
        waiting = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=3), session="t"))
        await asyncio.sleep(0.1)
        assert not running.done()
        assert not waiting.done()
        await asyncio.to_thread(engine.load_weights, one_weight(1), weight_version=1)
        return (await running)[0], (await waiting)[0]

    interrupted, late = run(scenario())
    assert set(interrupted.weight_versions) == {0, 1}
    assert late.weight_versions == [1, 1, 1]
    engine.release_memory()
    engine.close()  # a server that goes on without us gets its memory back
    requests = server.stats()["requests"]
    assert requests["/release_memory_occupation"] == 2
    assert requests["/resume_memory_occupation"] == 6  # weights, graphs, cache; twice
    assert requests["/continue_generation"] == 3


def test_a_colocated_server_whose_load_fails_has_its_memory_and_old_weights_again(start, engine_on):
    server = start()
    engine = engine_on(server, placement="colocated")
    engine.release_memory()
    server.fault("error", "/update_weights_from_disk", count=1)
    with pytest.raises(WeightSyncError, match="500"):
        engine.load_weights(one_weight(1), weight_version=1)
    assert run(engine.generate([1], Sampling(max_new_tokens=3), session="s"))[0].weight_versions == [0, 0, 0]
    assert server.stats()["requests"]["/resume_memory_occupation"] == 3


def test_a_cancelled_request_is_aborted_on_the_server(start, engine_on):
    server = start(**SLOWLY)
    engine = engine_on(server)

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate([1], Sampling(max_new_tokens=NUM_TOKENS), session="s"))
        await until_written(server)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: server.stats()["requests"].get("/abort_request") == 1)
        await until(lambda: not server.stats()["running"])

    run(scenario())


def test_addresses_come_from_the_environment(monkeypatch):
    monkeypatch.delenv("LIGHTRL_SERVER_ADDRS", raising=False)
    monkeypatch.setenv("AREAL_LLM_SERVER_ADDRS", "one:1, http://two:2")
    assert addresses_from_environment() == ["http://one:1", "http://two:2"]
    monkeypatch.setenv("LIGHTRL_SERVER_ADDRS", "three:3")
    assert addresses_from_environment() == ["http://three:3"]
    monkeypatch.delenv("LIGHTRL_SERVER_ADDRS")
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS")
    with pytest.raises(ValueError, match="servers: 1"):
        SGLangEngine().start(config_of())


@pytest.mark.parametrize(
    "arguments",
    [
        {"urls": ["a"], "servers": 1},
        {"servers": 0},
        {"transport": "pigeon"},
        {"tp": 0},
        {"weight_folder": "s3://bucket/weights"},
    ],
    ids=str,
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments):
    with pytest.raises(ValueError, match=r"servers|transport|tp|weight_folder=.* not a URL"):
        SGLangEngine(**arguments)


def test_unfinished_completions_are_returned_while_requests_are_paused_and_continue(start, engine_on):
    server = start(**SLOWLY)
    engine = engine_on(server)
    sampling = Sampling(max_new_tokens=NUM_TOKENS, seed=7)

    async def paused_during() -> tuple[Any, Any]:
        writing = asyncio.ensure_future(engine.generate([1, 2], sampling, session="a"))
        await until_written(server)
        await engine.pause()
        unfinished = await engine.unfinished()
        await engine.resume()
        server.pace(0)
        return unfinished, (await writing)[0]

    unfinished, whole = run(paused_during())
    (part,) = unfinished.values()
    assert list(unfinished) == [7]
    assert part.finish_reason == "abort"
    assert 1 <= len(part.token_ids) < len(whole.token_ids) == NUM_TOKENS
    assert whole.token_ids[: len(part.token_ids)] == part.token_ids
