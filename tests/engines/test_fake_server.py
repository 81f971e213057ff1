"""The fake server: what it does as SGLang was measured to do, its faults, its end. Each in a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fake_sglang.faults import KINDS, Fault
from fake_sglang.process import FakeServerProcess
from safetensors.torch import save_file
from waits import NUM_TOKENS, SLOWLY, until, until_written

from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.connection import ServerRefused
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

TESTS = str(Path(__file__).parents[1])

UPDATE = "/update_weights_from_disk"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServerProcess]:
    with FakeServerProcess() as started:
        yield started


@pytest.fixture
def slow_server(server: FakeServerProcess) -> Iterator[FakeServerProcess]:
    """A token now and then, until a test says `pace(0)`."""
    server.pace(**SLOWLY)
    yield server
    server.pace(0)


def ask(server: FakeServerProcess, question: Callable[[SGLangClient], Awaitable[Any]], **arguments: Any) -> Any:
    async def scenario() -> Any:
        client = SGLangClient(server.url, num_retries=0, **arguments)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(scenario())


def body(rid: str = "r", prompt: tuple[int, ...] = (1, 2), **params: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 100, **params}
    return {"rid": rid, "input_ids": list(prompt), "sampling_params": params, "return_logprob": True}


def test_a_script_starts_without_torch() -> None:
    code = f"import sys; sys.path.append({TESTS!r}); import fake_sglang.server; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_the_fake_server_is_asked_past_any_proxy(server: FakeServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("http_proxy", "http://127.0.0.1:9"), ("no_proxy", ""), ("NO_PROXY", "")):
        monkeypatch.setenv(name, value)
    assert "requests" in server.stats()
    assert "model_path" in ask(server, lambda client: client.model_info())


def test_an_abort_returns_what_was_written_and_hits_every_rid_that_begins_so(slow_server: FakeServerProcess) -> None:
    async def scenario(client: SGLangClient) -> list[Any]:
        questions = [body(rid, max_new_tokens=NUM_TOKENS) for rid in ("req1", "req10")]
        tasks = [asyncio.create_task(client.generate(question)) for question in questions]
        await until_written(slow_server, 2)
        await client.abort("req1")
        return await asyncio.gather(*tasks)

    for answer in ask(slow_server, scenario):
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < NUM_TOKENS


def test_a_live_rid_is_refused(slow_server: FakeServerProcess) -> None:
    async def scenario(client: SGLangClient) -> None:
        task = asyncio.create_task(client.generate(body("same", max_new_tokens=NUM_TOKENS)))
        await until_written(slow_server)
        with pytest.raises(ServerRefused, match="Duplicate"):
            await client.generate(body("same"))
        slow_server.pace(0)
        assert len((await task)["output_ids"]) == NUM_TOKENS

    ask(slow_server, scenario)


def test_an_update_that_is_not_paused_waits_for_running_requests(
    slow_server: FakeServerProcess, tmp_path: Path
) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")

    async def scenario(client: SGLangClient) -> None:
        task = asyncio.create_task(client.generate(body(max_new_tokens=NUM_TOKENS)))
        await until_written(slow_server)
        num_updates = slow_server.stats()["requests"].get(UPDATE, 0)
        updating = asyncio.create_task(client.update_weights_from_disk(str(tmp_path), weight_version="1"))
        await until(lambda: slow_server.stats()["requests"].get(UPDATE, 0) > num_updates)
        before = sum(slow_server.stats()["written"])
        await until(lambda: sum(slow_server.stats()["written"]) > before)
        assert not updating.done()
        slow_server.pace(0)
        await updating
        assert (await task)["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": NUM_TOKENS}]
        assert (await client.model_info())["weight_version"] == "1"
        await client.set_weight_version("default")

    ask(slow_server, scenario)


def test_spans_tell_versions_apart_after_a_paused_update(slow_server: FakeServerProcess, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")

    async def scenario(client: SGLangClient) -> Any:
        task = asyncio.create_task(client.generate(body(max_new_tokens=NUM_TOKENS)))
        await until_written(slow_server)
        await client.pause()
        await client.update_weights_from_disk(str(tmp_path), weight_version="2")
        await client.resume()
        await client.set_weight_version("2")
        slow_server.pace(0)
        return await task

    meta = ask(slow_server, scenario)["meta_info"]
    first, second = meta["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "2", NUM_TOKENS)
    assert first["end"] == second["start"] > 0
    assert meta["num_retractions"] == 1


def test_a_weight_file_that_is_cut_short_is_refused_and_the_version_stays(
    server: FakeServerProcess, tmp_path: Path
) -> None:
    save_file({"weight": torch.ones(100)}, tmp_path / "model.safetensors")
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-50])
    before = ask(server, lambda client: client.model_info())["weight_version"]
    with pytest.raises(ServerRefused, match="ends within"):
        ask(server, lambda client: client.update_weights_from_disk(str(tmp_path), weight_version="9"))
    assert ask(server, lambda client: client.model_info())["weight_version"] == before


@pytest.mark.parametrize(
    "question",
    [
        lambda client: client.generate(body(prompt=(1, 10**6))),
        lambda client: client.resume_memory(["weights"]),
    ],
    ids=["an id outside the vocabulary", "memory that was not released"],
)
def test_what_kills_the_real_server_kills_the_fake_one(question: Callable[[SGLangClient], Awaitable[Any]]) -> None:
    with FakeServerProcess() as server:
        with pytest.raises(EngineUnreachable):
            ask(server, question)
        server._process.wait(60)  # type: ignore[union-attr]


def test_released_memory_can_be_resumed_once(server: FakeServerProcess) -> None:
    async def scenario(client: SGLangClient) -> None:
        await client.release_memory(["kv_cache", "weights"])
        assert set(server.stats()["released"]) == {"kv_cache", "weights"}
        await client.resume_memory(["weights"])
        await client.resume_memory(["kv_cache"])

    ask(server, scenario)


def test_the_key_is_asked_for_except_for_health(server: FakeServerProcess) -> None:
    with FakeServerProcess(api_key="secret") as locked:
        with pytest.raises(ServerRefused, match="401"):
            ask(locked, lambda client: client.model_info())
        assert ask(locked, lambda client: client.is_ready())
        assert ask(locked, lambda client: client.model_info(), token="secret")


def test_a_server_that_dies_mid_request_ends_while_it_writes() -> None:
    with FakeServerProcess(seconds_per_token=0.01, fault=["die:/generate:1:0.1"]) as server:
        with pytest.raises(EngineUnreachable):
            ask(server, lambda client: client.generate(body()))
        server._process.wait(60)  # type: ignore[union-attr]


def test_a_server_that_is_late_misses_its_deadline() -> None:
    with pytest.raises(EngineTimeout, match="did not listen"):
        FakeServerProcess(fault=["late::1:30"], start_timeout_s=0.3).start()


def test_a_slow_server_answers_in_the_end(server: FakeServerProcess) -> None:
    server.fault("slow", "/model_info", seconds=0.2)
    with pytest.raises(EngineError, match="within"):
        ask(server, lambda client: client.model_info(timeout_s=0.05))
    assert ask(server, lambda client: client.model_info())


def test_the_server_ends_with_its_parent() -> None:
    code = (
        f"import sys\nsys.path.append({TESTS!r})\nfrom fake_sglang.process import FakeServerProcess\n"
        "import time\nprint(FakeServerProcess().start().pid, flush=True)\ntime.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)


def test_faults_are_read_from_their_short_form() -> None:
    assert Fault.parse("drop:/model_info:3:0.5") == Fault("drop", "/model_info", 3, 0.5)
    assert Fault.parse("lose_update") == Fault("lose_update", "/update_weights")
    assert {Fault.parse(kind).kind for kind in KINDS} == set(KINDS)
    with pytest.raises(ValueError, match="must be one of"):
        Fault.parse("sulk")
