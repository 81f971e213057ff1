"""SGLangEngine on the fake server: the contract, lost servers, interrupted generation. Real processes and sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import CONTRACT, EngineCase, after_a_sync_amid_a_generation_each_token_is_that_of_its_version, run
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from lightrl.errors import EngineError
from lightrl.rollout.fake_server_process import FakeServerProcess
from lightrl.rollout.sglang_engine import SGLangEngine, addresses_from_environment
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
