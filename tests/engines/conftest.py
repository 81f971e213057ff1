"""Fake servers and engines on them, tiny models, and the one real server of each kind (real_servers.py)."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import EngineCase
from fake_sglang.process import FakeServerProcess
from real_servers import shared_server, stop_servers
from sync_cases import LARGE, EngineOn, Start, config_of, one_weight
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from waits import Deadlines

from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.sglang.engine import SGLangEngine


@pytest.fixture(scope="session")
def _ends_real_servers() -> Iterator[None]:
    yield
    stop_servers()


@pytest.fixture
def _shared_folder(tmp_path_factory: pytest.TempPathFactory, _ends_real_servers: None) -> Path:
    folder = tmp_path_factory.getbasetemp()
    # One of pytest's workers has a folder of its own; the one above is of the run.
    return folder.parent if folder.name.startswith("popen-") else folder


@pytest.fixture
def real_server(_shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """`url` and `token` of a real SGLang server with a tiny Qwen3, this test's alone while it runs."""
    with shared_server(_shared_folder, "sglang") as found:
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
        yield found


@pytest.fixture
def real_vllm(_shared_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The same of a real vLLM server."""
    with shared_server(_shared_folder, "vllm") as found:
        monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", found["token"])
        yield found


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a fake server, which ends with the test."""
    servers: list[FakeServerProcess] = []

    def start_one(*arguments: Any, **named: Any) -> FakeServerProcess:
        servers.append(FakeServerProcess(*arguments, **named).start())
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture
def engine_on(start: Start) -> Iterator[EngineOn]:
    """Starts an engine, which is closed with the test, before the servers of `start` end.

    On servers without a model it has loaded version 0 of `one_weight`, unless it only starts.
    """
    engines: list[ServerEngine] = []

    def start_engine(
        *servers: FakeServerProcess,
        kind: type[ServerEngine] = SGLangEngine,
        config: PretrainedConfig = LARGE,
        size: int = 64,
        should_verify: bool = True,
        only_starts: bool = False,
        **arguments: Any,
    ) -> Any:
        settings: dict[str, Any] = {"urls": [server.url for server in servers], "timeouts": Deadlines()}
        engines.append(kind(**(settings | arguments)))
        engines[-1].should_verify = should_verify
        engines[-1].start(config)
        if config is LARGE and not only_starts:
            engines[-1].load_weights(one_weight(0, size), weight_version=0)
        return engines[-1]

    yield start_engine
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def models() -> list[PreTrainedModel]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [AutoModelForCausalLM.from_config(config_of()) for _ in range(3)]


@pytest.fixture(scope="session")
def model_folder(models: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of `models`."""
    folder = tmp_path_factory.mktemp("model")
    models[0].save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_servers(model_folder: Path) -> Iterator[list[FakeServerProcess]]:
    """Two servers with the first of `models`, for all tests of a file that leave them alive."""
    with FakeServerProcess(model_folder) as one, FakeServerProcess(model_folder) as other:
        yield [one, other]


@pytest.fixture
def contract_case(
    model_servers: list[FakeServerProcess], models: list[PreTrainedModel], engine_on: EngineOn
) -> Callable[..., EngineCase]:
    """Makes the case of an engine on so many of `model_servers`."""

    def make(num_servers: int, **arguments: Any) -> EngineCase:
        engine = engine_on(*model_servers[:num_servers], config=config_of(), **arguments)
        return EngineCase(engine, models, is_exact=False)

    return make
