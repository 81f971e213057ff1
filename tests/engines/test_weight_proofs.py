"""A server's weights are verified against the trainer's: what SGLangEngine notices, with one server and several."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_sglang.process import FakeServerProcess
from sync_cases import asked, config_of, running
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config
from waits import Deadlines
from waits import until as until_true

from lightrl.engines.servers.server import Server
from lightrl.engines.servers.server_info import ServerInfo, other_model
from lightrl.engines.servers.sync.verification import WeightVerifier
from lightrl.engines.sglang.client import SGLangClient, read_server_info
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import ServerForm, block_fp8, bucketed
from lightrl.weights.digests import RankDigests

URL = "http://server"
PATIENT = Deadlines(request_s=20, sync_s=20)
UPDATE = "/update_weights_from_disk"


def until(is_true: Callable[[], object]) -> None:
    asyncio.run(until_true(is_true))


def parameters_of(config: PretrainedConfig, version: int = 0) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(version)
        return {name: tensor.detach() for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    AutoModelForCausalLM.from_config(config_of()).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def pair(folder) -> Iterator[list[FakeServerProcess]]:
    """Two servers for all tests that leave them alive."""
    with running(2, folder) as servers:
        yield servers


@pytest.fixture
def serving() -> Iterator[Callable[..., list[FakeServerProcess]]]:
    """Starts servers of a test's own; they end after its engines."""
    with ExitStack() as stack:
        yield lambda *args, **settings: stack.enter_context(running(*args, **settings))


@pytest.fixture
def engines(serving) -> Iterator[Any]:
    started: list[SGLangEngine] = []

    def start(servers: Sequence[FakeServerProcess], config: PretrainedConfig, **settings: Any) -> SGLangEngine:
        settings = {"timeouts": PATIENT, **settings}
        engine = SGLangEngine(urls=[server.url for server in servers], **settings)
        started.append(engine)
        engine.start(config)
        return engine

    yield start
    for engine in started:
        engine.close()


def requests_of(server: FakeServerProcess) -> Counter[str]:
    return Counter(server.stats()["requests"])


def load(engine: SGLangEngine, parameters: dict[str, Tensor], version: int) -> None:
    engine.load_weights(bucketed(parameters.items(), 3000), weight_version=version)


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        ("disk", {}),
        ("tensor", {}),
        ("disk", {"dtype": "bfloat16"}),
        ("disk", {"tp_size": 2}),
        ("disk", {"tp_size": 2, "dtype": "bfloat16"}),
    ],
    ids=["one rank", "through shared memory", "bfloat16", "two ranks", "two ranks in bfloat16"],
)
def test_one_healthy_server_is_verified_at_each_sync(serving, folder, engines, transport, settings, caplog):
    servers = serving(1, folder, **settings)
    engine = engines(servers, config_of(), transport=transport)
    for version in range(3):
        load(engine, parameters_of(config_of(), version), version)
        assert engine.verified_by() == {servers[0].url: "digests"}
    assert not caplog.messages


def test_a_tied_head_is_verified_too(serving, tmp_path, engines):
    config = config_of(tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    servers = serving(1, tmp_path)
    engine = engines(servers, config)
    load(engine, parameters_of(config), 0)
    assert engine.verified_by() == {servers[0].url: "digests"}


def ignored(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The smallest change of one value that bfloat16 has."""
    changed = dict(parameters)
    norm = changed["model.norm.weight"].clone()
    norm[0] += 2**-7
    return {**changed, "model.norm.weight": norm}


def test_one_server_that_acknowledges_and_ignores_the_smallest_update_is_noticed(serving, folder, engines):
    servers = serving(1, folder, dtype="bfloat16")
    engine = engines(servers, config_of())
    first = parameters_of(config_of())
    load(engine, first, 0)
    servers[0].fault("ignore_update", UPDATE)
    with pytest.raises(WeightSyncError, match=r"1 of its 19 parameters .* of version 1: model\.norm\.weight, on"):
        load(engine, ignored(first), 1)


def test_of_two_servers_that_disagree_the_one_that_agrees_with_the_trainer_stays(pair, engines):
    servers = pair[:2]
    engine = engines(
        servers, config_of(), timeouts=replace(PATIENT, probe_interval_s=60)
    )  # it does not come back meanwhile
    load(engine, parameters_of(config_of()), 0)
    servers[0].fault("ignore_update", UPDATE)
    load(engine, parameters_of(config_of(), 1), 1)
    report = engine.last_sync
    assert report.versions == {servers[1].url: 1}
    assert "are not the trainer's" in report.lost[servers[0].url]
    assert engine.verified_by()[servers[1].url] == "digests"


def test_a_restart_between_two_syncs_is_noticed_by_the_health_check(pair, engines, caplog):
    servers = pair[:2]
    with caplog.at_level("WARNING", logger="lightrl"):
        engine = engines(servers, config_of())
        load(engine, parameters_of(config_of()), 0)
        url = servers[0].url
        engine.fleet.servers[url].info = ServerInfo(identity="the one before")
        until(lambda: any("another process answers" in message for message in caplog.messages))
        until(lambda: url in engine.fleet.urls("routable"))  # it has the weights again
        assert engine.fleet.servers[url].weight_version == 0
        assert engine.verified_by()[url] == "digests"


def test_a_server_of_another_version_between_two_syncs_is_noticed(pair, engines, caplog):
    servers = pair[:2]
    with caplog.at_level("WARNING", logger="lightrl"):
        engine = engines(servers, config_of())
        load(engine, parameters_of(config_of()), 3)
        asked(servers[0], "set_weight_version", weight_version="2")
        until(lambda: any("reports version '2'" in message for message in caplog.messages))
        until(lambda: len(engine.fleet.urls("routable")) == 2)
        assert asked(servers[0], "model_info")["weight_version"] == "3"


def generate(engine: SGLangEngine) -> None:
    asyncio.run(engine.generate([1, 2, 3], Sampling(max_new_tokens=2), session="s"))


def test_requests_of_one_version_share_a_cache_key_and_other_versions_and_runs_do_not(pair, engines):
    servers = pair[:1]
    keys = []
    for is_last in (False, True):
        engine = engines(servers, config_of())
        for version in range(2):
            load(engine, parameters_of(config_of(), version), version)
            keys.append(engine.fleet.cache_key(version))
            generate(engine)
        if not is_last:
            engine.close()  # or it would give the server its own weights again
    assert len(set(keys)) == 4
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}, "extra_key": keys[-1]}
    assert asked(servers[0], "generate", body=body)["meta_info"]["cached_tokens"] == 2


def test_a_cache_that_a_load_did_not_empty_is_flushed(pair, engines):
    servers = pair[:1]
    engine = engines(servers, config_of())
    load(engine, parameters_of(config_of()), 0)
    before = requests_of(servers[0])
    servers[0].fault("keep_cache", UPDATE)
    load(engine, parameters_of(config_of(), 1), 1)
    until(lambda: (requests_of(servers[0]) - before)["/generate"] == 3)
    assert (requests_of(servers[0]) - before)["/flush_cache"] == 1
    assert engine.fleet.urls("routable") == [servers[0].url]


def test_a_server_whose_cache_cannot_be_emptied_is_lost(pair, engines, caplog):
    servers = pair[:2]
    engine = engines(servers, config_of())
    load(engine, parameters_of(config_of()), 0)
    servers[0].fault("keep_cache", UPDATE)
    servers[0].fault("keep_cache", "/flush_cache")
    load(engine, parameters_of(config_of(), 1), 1)
    said = f"{servers[0].url} is lost: its prefix cache still has key-values of weight version 0, after a load and a"
    until(lambda: any(said in message for message in caplog.messages))


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (Qwen2Config(vocab_size=61, hidden_size=32, num_hidden_layers=2), "type 'qwen3'"),
        (config_of(num_hidden_layers=3), "has 2 layers; the trainer's has 3"),
        (config_of(vocab_size=70), "vocab_size=61 instead of 70"),
        (config_of(hidden_size=64), "hidden_size=32 instead of 64"),
        (config_of(tie_word_embeddings=True), "tie_word_embeddings=False instead of True"),
    ],
    ids=["family", "layers", "vocabulary", "hidden size", "tied head"],
)
def test_a_server_of_another_model_is_named_before_anything_is_loaded(pair, engines, config, told):
    servers = pair[:1]
    before = requests_of(servers[0])
    with pytest.raises(EngineError, match=told) as caught:
        engines(servers, config)
    assert servers[0].url in str(caught.value)
    assert (requests_of(servers[0]) - before)[UPDATE] == 0
    assert servers[0].is_alive()


def test_the_architectures_are_compared_also_of_a_server_of_another_host():
    info, told = ServerInfo(model_path="/nowhere"), {"architectures": ["Qwen3ForSequenceClassification"]}
    assert other_model(config_of(), told, info, []) is None  # the trainer's config names none
    problem = other_model(config_of(architectures=["Qwen3ForCausalLM"]), told, info, [])
    assert "the trainer has Qwen3ForCausalLM" in str(problem)


def test_a_checkpoint_in_fp8_is_named_if_the_run_does_not_say_so(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}
    plain, quantized = config_of(**sizes), block_fp8.quantized_config(config_of(**sizes))
    quantized.save_pretrained(tmp_path / "quantized")
    plain.save_pretrained(tmp_path / "plain")
    infos = {name: ServerInfo(model_path=str(tmp_path / name)) for name in ("plain", "quantized")}
    assert other_model(quantized, {}, infos["quantized"], []) is None
    told = str(other_model(plain, {}, infos["quantized"], []))
    assert "are in block FP8: set trainer.engine.server_args.quantization to fp8" in told
    told = str(other_model(quantized, {}, infos["plain"], []))
    assert "are not block FP8: start it by lightrl serve or from such a checkpoint" in told


def server_of(info: ServerInfo) -> Server:
    return Server(SGLangClient(URL), info=info)


def verifier_of(config: PretrainedConfig, server: Server) -> WeightVerifier:
    verifier = WeightVerifier(config, ServerForm.of(config))
    digests = verifier.begin(0, [server])
    for bucket in bucketed(parameters_of(config).items(), 2**20):
        digests.add(bucket)
    return verifier


def answer_of(config: PretrainedConfig, dtype: torch.dtype, **more: str) -> RankDigests:
    from fake_sglang.layout import checksums

    tensors = {name: tensor.to(dtype) for name, tensor in parameters_of(config).items()}
    return [{**checksums(tensors, config, 1)[0], **more}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_dtype_of_a_server_that_says_auto_is_the_one_that_matches(dtype):
    server = server_of(ServerInfo("a", dtype=None))
    verifier = verifier_of(config_of(), server)
    assert verifier.verify(server, 0, answer_of(config_of(), dtype)) == ("digests", "")
    assert server.digest_dtype == dtype  # from now on


@pytest.mark.parametrize(
    ("info", "answer", "told"),
    [
        (read_server_info({"quantization": "w8a8_int8", "device": "cpu"}), [], "quantization=w8a8_int8"),
        (read_server_info({"pp_size": 2, "device": "cpu"}), [], "pp_size=2"),
        (read_server_info({"moe_runner_backend": "flashinfer_trtllm"}), [], "moe_runner_backend=flashinfer_trtllm"),
        (ServerInfo("a", dtype=torch.float32), None, "does not report checksums"),
        (
            ServerInfo("a", dtype=torch.float32),
            answer_of(config_of(), torch.float32, **{"model.mystery": "0" * 16}),
            "1 parameters that the trainer does not have (model.mystery)",
        ),
    ],
    ids=["quantized", "pipeline stages", "reordered experts", "no checksums", "an unknown parameter"],
)
def test_what_cannot_be_compared_is_logged_once_and_never_after_it_could(info, answer, told, caplog):
    server = server_of(info)
    verifier = verifier_of(config_of(), server)
    with caplog.at_level("WARNING", logger="lightrl"):
        for _ in range(2):
            check, problem = verifier.verify(server, 0, answer)
            assert check == "version"
            assert told in problem
    assert len([message for message in caplog.messages if told in message]) == 1
    server.digest_dtype = torch.float32  # as after a comparison
    check, problem = verifier.verify(server, 0, answer)
    assert check is None
    assert "no longer" in problem


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            answer_of(config_of(tie_word_embeddings=True), torch.float32),
            "1 parameters that the server does not have (lm_head.weight)",
        ),
        (
            answer_of(config_of(), torch.float32, **{"model.layers.1.mlp.experts.w2_weight": "0" * 16}),
            "1 parameters that the trainer does not have (model.layers.1.mlp.experts.w2_weight)",
        ),
    ],
    ids=["no output head", "experts instead of a dense layer"],
)
def test_parameters_that_only_one_side_has_are_another_model(answer, told):
    server = server_of(ServerInfo("a", dtype=torch.float32))
    check, problem = verifier_of(config_of(), server).verify(server, 0, answer)
    assert check is None
    assert told in problem


def test_a_server_with_a_draft_model_is_verified_by_the_targets_digests(serving, folder, engines):
    servers = serving(1, folder, speculative_algorithm="EAGLE", tp_size=2)
    engine = engines(servers, config_of())
    load(engine, parameters_of(config_of()), 0)
    assert engine.verified_by() == {servers[0].url: "digests"}
