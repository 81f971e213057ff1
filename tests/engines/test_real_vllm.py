"""The real vLLM on this machine's CPU, as lightrl starts it: the contract, runs, a head that it keeps, a wrong kind."""

from typing import Any

import pytest
from engine_contract import CONTRACT, EngineCase, after_a_sync_during_a_generation_each_token_is_that_of_its_version
from real_servers import fit, start_server, tiny_config, tiny_models
from sync_cases import EngineOn
from transformers import PreTrainedModel

from lightrl import SGLangEngine
from lightrl.engines import Timeouts
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.errors import EngineError, WeightSyncError

pytestmark = [pytest.mark.extra, pytest.mark.real_vllm]  # a start takes minutes on a busy machine
CONFIG = tiny_config("vllm")


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    return tiny_models(config=CONFIG)


@pytest.fixture
def vllm_at(engine_on: EngineOn) -> EngineOn:
    """Starts an engine at the server of this address."""
    settings = {"kind": VLLMEngine, "config": CONFIG, "timeouts": Timeouts(sync_s=60)}
    return lambda server, **changes: engine_on(urls=[server["url"]], **{**settings, **changes})


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.replace("_", " "))
def test_the_contract_of_engines_holds_on_a_real_vllm(check, real_vllm, vllm_at, models):
    check(EngineCase(vllm_at(real_vllm), models, is_exact=False))


def test_tokens_after_a_delta_are_of_its_version(monkeypatch, real_vllm, models, vllm_at):
    receivers = Receivers()
    receivers.start("127.0.0.1", real_vllm["token"])
    monkeypatch.setenv("LIGHTRL_RECEIVER_ADDRS", ",".join(receivers.urls))
    try:
        engine = vllm_at(real_vllm, transport="delta")
        after_a_sync_during_a_generation_each_token_is_that_of_its_version(EngineCase(engine, models, is_exact=False))
        engine.close()
    finally:
        receivers.stop()


def engine_at(server: dict[str, Any]) -> VLLMEngine:
    return VLLMEngine(urls=[server["url"]], timeouts=Timeouts(sync_s=60))


def test_a_run_trains_against_it_and_every_sync_is_probed(real_vllm, tmp_path):
    engine = engine_at(real_vllm)
    trainer, _ = fit(engine, CONFIG, tmp_path)
    assert float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert engine.last_sync.versions == {real_vllm["url"]: 4}
    assert list(engine.last_sync.verified_by.values()) == ["version"]  # its linear layers have no digest on a CPU


def test_the_probe_finds_the_old_head_of_tied_embeddings(tmp_path, monkeypatch):
    """vLLM's CPU build packs the head once, for oneDNN, and loads new weights beside it; the digests are right."""
    config = tiny_config("vllm", tie_word_embeddings=True)
    server = start_server(tmp_path, "vllm", config)
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", server["token"])
    with pytest.raises(WeightSyncError, match=r"the engine has different weights from the trainer.*its probe differs"):
        fit(engine_at(server), config, tmp_path)


def test_each_kind_of_engine_refuses_a_real_server_of_the_other_kind(real_vllm, request):
    with pytest.raises(EngineError, match="is a vLLM server"):
        SGLangEngine(urls=[real_vllm["url"]]).start(CONFIG)
    sglang = request.getfixturevalue("real_server")
    with pytest.raises(EngineError, match="is an SGLang server"):
        engine_at(sglang).start(CONFIG)
