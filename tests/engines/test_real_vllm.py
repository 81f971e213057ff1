"""The real vLLM on this machine's CPU, as lightrl starts it: the contract, runs, a head that it keeps, a wrong kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import (
    CONTRACT,
    EngineCase,
    after_a_sync_during_a_generation_each_token_is_that_of_its_version,
)
from real_servers import start_server, tiny_config, tiny_models
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Qwen3Config

import lightrl
from lightrl import GRPO, ModelSpec, Prompt, SGLangEngine, StalenessControl, Trajectory
from lightrl.engines import Timeouts
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling

pytestmark = [
    pytest.mark.extra,
    pytest.mark.real_vllm,
    pytest.mark.timeout(900),
]  # a start takes minutes on a busy machine
CONFIG = tiny_config("vllm")


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    return tiny_models(config=CONFIG)


def engine_at(server: dict[str, Any], **settings: Any) -> VLLMEngine:
    return VLLMEngine(urls=[server["url"]], timeouts=Timeouts(sync_s=60), **settings)


@pytest.fixture
def vllm_case(real_vllm: dict[str, Any], models: list[PreTrainedModel]) -> Iterator[EngineCase]:
    engine = engine_at(real_vllm)
    engine.start(CONFIG)
    yield EngineCase(engine, models, is_exact=False)
    engine.close()


def test_each_token_is_that_of_its_version_on_a_real_vllm(vllm_case):
    after_a_sync_during_a_generation_each_token_is_that_of_its_version(vllm_case)


@pytest.mark.extra
@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.replace("_", " "))
def test_the_contract_of_engines_holds_on_a_real_vllm(check, vllm_case):
    check(vllm_case)


@pytest.mark.extra
def test_tokens_after_a_delta_are_of_its_version(real_vllm, models, monkeypatch):
    receivers = Receivers()
    receivers.start("127.0.0.1", real_vllm["token"])
    monkeypatch.setenv("LIGHTRL_RECEIVER_ADDRS", ",".join(receivers.urls))
    engine = engine_at(real_vllm, transport="delta")
    try:
        engine.start(CONFIG)
        after_a_sync_during_a_generation_each_token_is_that_of_its_version(EngineCase(engine, models, is_exact=False))
    finally:
        engine.close()
        receivers.stop()


class LikesLowTokens(GRPO):
    """Learns to write tokens below 20 of 61."""

    def reward(self, trajectory: Trajectory) -> float:
        return sum(token < 20 for token in trajectory.completion_ids) / len(trajectory.completion_ids)


def fit(engine: VLLMEngine, config: Qwen3Config, folder: Path) -> dict[str, torch.Tensor]:
    policy = ModelSpec(config=config.to_dict(), tokenizer="tiny.char_tokenizer", seed=1)
    module = LikesLowTokens(policy, lr=2e-2, group_size=8, sampling=Sampling(max_new_tokens=8))
    trainer = lightrl.Trainer(
        engine=engine, callbacks=[StalenessControl(2)], max_steps=4, accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    prompts = [Prompt(f"p{number}", token_ids=[number + 3, 5, 8]) for number in range(8)]
    trainer.fit(module, DataLoader(prompts, batch_size=4, collate_fn=list))
    return dict(trainer.callback_metrics)


@pytest.mark.extra
def test_a_run_trains_against_it_and_every_sync_is_probed(real_vllm, tmp_path):
    engine = engine_at(real_vllm)
    metrics = fit(engine, CONFIG, tmp_path)
    assert float(metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert engine.last_sync.versions == {real_vllm["url"]: 4}
    assert list(engine.last_sync.verified_by.values()) == ["version"]  # its linear layers have no digest on a CPU


@pytest.mark.extra
def test_the_probe_finds_the_old_head_of_tied_embeddings(tmp_path, monkeypatch):
    """vLLM's CPU build packs the head once, for oneDNN, and loads new weights beside it; the digests are right."""
    config = tiny_config("vllm", tie_word_embeddings=True)
    server = start_server(tmp_path, "vllm", config)
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", server["token"])
    with pytest.raises(WeightSyncError, match=r"the engine has other weights than the trainer.*its probe differs"):
        fit(engine_at(server), config, tmp_path)


@pytest.mark.extra
def test_each_kind_of_engine_refuses_a_real_server_of_the_other_kind(real_vllm, request):
    with pytest.raises(EngineError, match="is a vLLM server"):
        SGLangEngine(urls=[real_vllm["url"]]).start(CONFIG)
    sglang = request.getfixturevalue("real_server")
    with pytest.raises(EngineError, match="is an SGLang server"):
        engine_at(sglang).start(CONFIG)
