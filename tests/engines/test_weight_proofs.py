"""A server's weights are verified against the trainer's: what SGLangEngine notices, with one server and several."""

import asyncio
import functools
from collections import Counter
from dataclasses import replace

import pytest
import torch
from fake_sglang.layout import checksums
from fake_sglang.process import FakeServerProcess
from sync_cases import EngineOn, asked, config_of
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen2Config
from waits import Deadlines, comes_true

from lightrl.engines.servers.client import ServerInfo, other_model
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.verification import WeightVerifier
from lightrl.engines.sglang.client import SGLangClient, read_server_info
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import ServerForm, block_fp8, bucketed
from lightrl.weights.digests import RankDigests

URL = "http://server"
PATIENT = Deadlines(request_s=600, sync_s=600)
UPDATE = "/update_weights_from_disk"


def parameters_of(config: PretrainedConfig, version: int = 0) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(version)
        return {name: tensor.detach() for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}


@pytest.fixture
def verifying_on(engine_on: EngineOn) -> EngineOn:
    return functools.partial(engine_on, config=config_of(), timeouts=PATIENT)


def requests_of(server: FakeServerProcess) -> Counter[str]:
    return Counter(server.stats()["requests"])


def load(engine: SGLangEngine, parameters: dict[str, Tensor], version: int) -> None:
    engine.load_weights(bucketed(parameters.items(), 3000), weight_version=version)


@pytest.mark.parametrize(
    ("transport", "settings"),
    [
        *[("disk", {}), ("tensor", {}), ("disk", {"dtype": "bfloat16"}), ("disk", {"tp_size": 2})],
        *[("disk", {"tp_size": 2, "dtype": "bfloat16"}), ("disk", {"tp_size": 2, "speculative_algorithm": "EAGLE"})],
    ],
    ids=["one rank", "shared memory", "bfloat16", "two ranks", "two ranks in bfloat16", "a draft model beside it"],
)
def test_one_healthy_server_is_verified_at_each_sync(start, model_folder, verifying_on, transport, settings, caplog):
    server = start(model_folder, **settings)
    engine = verifying_on(server, transport=transport)
    for version in range(3):
        load(engine, parameters_of(config_of(), version), version)
        assert engine.verified_by() == {server.url: "digests"}
    assert not caplog.messages


def test_a_tied_head_is_verified_too(start, tmp_path, verifying_on):
    config = config_of(tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    server = start(tmp_path)
    engine = verifying_on(server, config=config)
    load(engine, parameters_of(config), 0)
    assert engine.verified_by() == {server.url: "digests"}


def ignored(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """The smallest change of one value that bfloat16 has."""
    changed = dict(parameters)
    norm = changed["model.norm.weight"].clone()
    norm[0] += 2**-7
    return {**changed, "model.norm.weight": norm}


def test_one_server_that_acknowledges_and_ignores_the_smallest_update_is_noticed(start, model_folder, verifying_on):
    server = start(model_folder, dtype="bfloat16")
    engine = verifying_on(server)
    first = parameters_of(config_of())
    load(engine, first, 0)
    server.fault("ignore_update", UPDATE)
    with pytest.raises(WeightSyncError, match=r"1 of its 19 parameters .* version 1: model\.norm\.weight, on"):
        load(engine, ignored(first), 1)


def test_of_two_servers_that_disagree_the_one_that_agrees_with_the_trainer_stays(model_servers, verifying_on):
    wrong, right = model_servers
    engine = verifying_on(wrong, right, timeouts=replace(PATIENT, probe_interval_s=60))  # none comes back meanwhile
    load(engine, parameters_of(config_of()), 0)
    wrong.fault("ignore_update", UPDATE)
    load(engine, parameters_of(config_of(), 1), 1)
    report = engine.last_sync
    assert report.versions == {right.url: 1}
    assert "differ from the trainer's" in report.lost[wrong.url]
    assert engine.verified_by()[right.url] == "digests"


def test_a_restart_between_two_syncs_is_noticed_by_the_health_check(model_servers, verifying_on, caplog):
    with caplog.at_level("WARNING", logger="lightrl"):
        engine = verifying_on(*model_servers)
        load(engine, parameters_of(config_of()), 0)
        url = model_servers[0].url
        engine.fleet.servers[url].info = ServerInfo(identity="the one before")
        assert comes_true(lambda: any("different process answers" in message for message in caplog.messages))
        assert comes_true(lambda: url in engine.fleet.urls("routable"))  # it has the weights again
        assert engine.fleet.servers[url].weight_version == 0
        assert engine.verified_by()[url] == "digests"


def test_a_server_of_another_version_between_two_syncs_is_noticed(model_servers, verifying_on, caplog):
    with caplog.at_level("WARNING", logger="lightrl"):
        engine = verifying_on(*model_servers)
        load(engine, parameters_of(config_of()), 3)
        asked(model_servers[0], "set_weight_version", weight_version="2")
        assert comes_true(lambda: any("reports version '2'" in message for message in caplog.messages))
        assert comes_true(lambda: len(engine.fleet.urls("routable")) == 2)
        assert asked(model_servers[0], "model_info")["weight_version"] == "3"


def generate(engine: SGLangEngine) -> None:
    asyncio.run(engine.generate([1, 2, 3], Sampling(max_new_tokens=2), session="s"))


def test_requests_of_one_version_share_a_cache_key_and_other_versions_and_runs_do_not(model_servers, verifying_on):
    server = model_servers[0]
    keys = []
    for is_last in (False, True):
        engine = verifying_on(server)
        for version in range(2):
            load(engine, parameters_of(config_of(), version), version)
            keys.append(engine.fleet.cache_key(version))
            generate(engine)
        if not is_last:
            engine.close()  # or it would give the server its own weights again
    assert len(set(keys)) == 4
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 1}, "extra_key": keys[-1]}
    assert asked(server, "generate", body=body)["meta_info"]["cached_tokens"] == 2


def test_a_cache_that_a_load_did_not_empty_is_flushed(model_servers, verifying_on):
    server = model_servers[0]
    engine = verifying_on(server)
    load(engine, parameters_of(config_of()), 0)
    before = requests_of(server)
    server.fault("keep_cache", UPDATE)
    load(engine, parameters_of(config_of(), 1), 1)
    assert comes_true(lambda: (requests_of(server) - before)["/generate"] == 3)
    assert (requests_of(server) - before)["/flush_cache"] == 1
    assert engine.fleet.urls("routable") == [server.url]


def test_a_server_whose_cache_cannot_be_emptied_is_lost(model_servers, verifying_on, caplog):
    doomed, _ = model_servers
    engine = verifying_on(*model_servers)
    load(engine, parameters_of(config_of()), 0)
    doomed.fault("keep_cache", UPDATE)
    doomed.fault("keep_cache", "/flush_cache")
    load(engine, parameters_of(config_of(), 1), 1)
    said = f"{doomed.url} is lost: its prefix cache still has tokens from weight version 0 after a load and a"
    assert comes_true(lambda: any(said in message for message in caplog.messages))


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
def test_a_server_of_another_model_is_named_before_anything_is_loaded(model_servers, verifying_on, config, told):
    server = model_servers[0]
    before = requests_of(server)
    with pytest.raises(EngineError, match=told) as caught:
        verifying_on(server, config=config)
    assert server.url in str(caught.value)
    assert (requests_of(server) - before)[UPDATE] == 0
    assert server.is_alive()


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
    assert "are in block FP8; set trainer.engine.server_args.quantization to fp8" in told
    told = str(other_model(quantized, {}, infos["plain"], []))
    assert "are not block FP8; use lightrl serve or start it from an FP8 checkpoint" in told


def server_of(info: ServerInfo) -> Server:
    return Server(SGLangClient(URL), info=info)


def verifier_of(config: PretrainedConfig, server: Server) -> WeightVerifier:
    verifier = WeightVerifier(config, ServerForm.of(config))
    digests = verifier.begin(0, [server])
    for bucket in bucketed(parameters_of(config).items(), 2**20):
        digests.add(bucket)
    return verifier


def answer_of(config: PretrainedConfig, dtype: torch.dtype, **more: str) -> RankDigests:
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
