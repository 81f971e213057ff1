"""The fake server: what it does as SGLang was measured to do, and what its wrong loads leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_sglang.faults import Fault
from fake_sglang.process import FakeServerProcess
from fake_sglang.wrong_loads import LoadHistory
from safetensors.torch import save_file
from waits import NUM_TOKENS, SLOWLY, until, until_written

from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.connection import ServerRefused
from lightrl.errors import EngineUnreachable

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


def history() -> tuple[LoadHistory, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """After versions 0 and 1, whose value is the version's number; also what is sent as version 2, and is held."""
    versions = [{"a": torch.full((2, 2), float(number)), "b": torch.arange(4.0) + number} for number in range(3)]
    made = LoadHistory(versions[0])
    made.load([versions[0]], versions[0], None, is_last=True)
    made.load([versions[1]], versions[0], None, is_last=True)
    return made, versions[2], versions[1]


@pytest.mark.parametrize(
    ("fault", "a", "b"),
    [
        (Fault("keep", names="a"), [1, 1, 1, 1], [2, 3, 4, 5]),
        (Fault("zero", names="b"), [2, 2, 2, 2], [0, 0, 0, 0]),
        (Fault("old_version", versions_back=1), [1, 1, 1, 1], [1, 2, 3, 4]),
        (Fault("old_version", versions_back=2), [0, 0, 0, 0], [0, 1, 2, 3]),
        (Fault("delta_twice"), [3, 3, 3, 3], [3, 4, 5, 6]),
        (Fault("delta_on_wrong_base"), [1, 1, 1, 1], [1, 2, 3, 4]),
        (Fault("torn_file"), [2, 2, 2, 2], [2, 3, 0, 0]),
        (Fault("old_rank"), [2, 2, 1, 1], [2, 3, 4, 5]),
        (Fault("swap_halves", names="b"), [2, 2, 2, 2], [4, 5, 2, 3]),
    ],
    ids=lambda value: f"{value.kind}{value.versions_back}" if isinstance(value, Fault) else "",
)
def test_a_wrong_load_is_what_its_name_says(fault: Fault, a: list[float], b: list[float]) -> None:
    made, sent, held = history()
    loaded = held | made.load([sent], held, fault, is_last=True)
    assert loaded["a"].flatten().tolist() == a
    assert loaded["b"].tolist() == b
    assert made.num_wrong(loaded) == sum(
        int((loaded[name].flatten() != sent[name].flatten()).sum()) for name in ("a", "b")
    )
