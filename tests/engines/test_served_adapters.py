"""Adapters served beside their base: which version wrote each token, what travels, and what servers keep."""

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import EngineCase, run
from engine_contract import recomputed_logprobs as recomputed
from fake_sglang import python_of_fakes
from fake_sglang.process import FakeServerProcess
from real_servers import built_python, fit, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel
from waits import until

from lightrl.engines import Timeouts
from lightrl.engines.servers.engine import ServerEngine
from lightrl.engines.servers.processes.command import flags
from lightrl.engines.servers.sync.adapter_versions import adapters_of
from lightrl.engines.sglang.command import SGLangProcess
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.engines.vllm.command import VLLMProcess
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.errors import WeightSyncError
from lightrl.models.lora import LoRA
from lightrl.models.tuning import tuning_of
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, bucketed

CONFIG = tiny_config()
VLLM_CONFIG = tiny_config("vllm")
CONFIG.intermediate_size = 64  # on a CPU SGLang pads others, and then no adapter fits down_proj
RANK = 4
PROMPT = [3, 1, 4, 1, 5]
SAMPLING = Sampling(max_new_tokens=12, seed=3)
NUM_VERSIONS = 2


def adapted(version: int, config: Any = CONFIG, rank: int = RANK) -> PreTrainedModel:
    """The same base for every version, with adapters of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        LoRA(rank=rank).add_to(model)
        torch.manual_seed(100 + version)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model


MODELS = [adapted(version) for version in range(4)]


def buckets(model: PreTrainedModel, part: Any) -> Iterator[Bucket]:
    parameters = dict(model.named_parameters())
    tuning = tuning_of(model)
    sources = tuning.sources(model, part)
    return bucketed(
        ((name, tuning.merge(model, name, [parameters[one] for one in names])) for name, names in sources.items()),
        20_000,
    )


class AdapterCase(EngineCase):
    def buckets(self, version: int) -> Iterator[Bucket]:
        engine: Any = self.engine
        for part in engine.parts_to_load():
            yield from buckets(self.models[0 if part == "base" else version % len(self.models)], part)


def started(engine: ServerEngine, models: list[PreTrainedModel]) -> AdapterCase:
    engine.expect_policy(models[0], num_versions=NUM_VERSIONS)
    engine.start(models[0].config)
    return AdapterCase(engine, models, is_exact=False)


TARGETS = tuning_of(MODELS[1]).served_form(MODELS[1], 1).config["target_modules"]
LORA: dict[type, dict[str, Any]] = {
    SGLangEngine: {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": TARGETS},
    VLLMEngine: {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": NUM_VERSIONS + 1,
        "lora_target_modules": TARGETS,
    },
}
# kind → the paths that load a base, pause and load an adapter
PATHS = {
    SGLangEngine: ("/update_weights_from_disk", "/pause_generation", "/load_lora_adapter_from_tensors"),
    VLLMEngine: ("/weight_checker", "/pause", "/v1/load_lora_adapter"),
}


@pytest.fixture(scope="module", params=LORA, ids=["SGLang", "vLLM"])
def kind(request: pytest.FixtureRequest) -> type[ServerEngine]:
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    place = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def servers(folder: Path, kind: type[ServerEngine]) -> Iterator[list[FakeServerProcess]]:
    vllm = {"vllm": True} if kind is VLLMEngine else {}
    one, other = (FakeServerProcess(str(folder), piece_tokens=4, **vllm, **LORA[kind]) for _ in range(2))
    with one, other:
        yield [one, other]


@pytest.fixture
def serving(servers: list[FakeServerProcess], kind: type[ServerEngine]) -> Iterator[Callable[..., AdapterCase]]:
    """Starts an engine, on the two servers if nothing else is given; it is closed with the test."""
    cases: list[AdapterCase] = []

    def start(models: list[PreTrainedModel] = MODELS, **settings: Any) -> AdapterCase:
        where = {} if "servers" in settings else {"urls": [one.url for one in servers]}
        engine = kind(**{"adapters": "served", "timeouts": Timeouts(sync_s=30), **where, **settings})
        cases.append(started(engine, models))
        return cases[-1]

    yield start
    for case in cases:
        case.engine.close()


@pytest.fixture
def case(serving: Callable[..., AdapterCase]) -> AdapterCase:
    return serving()


def check_tokens(case: AdapterCase, version: int) -> None:
    (completion,) = run(case.generate(PROMPT, SAMPLING))
    assert completion.weight_versions == [version] * 12
    expected = recomputed(case.models[version], PROMPT, completion.token_ids, SAMPLING)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def check_scores(case: AdapterCase, version: int) -> None:
    engine: Any = case.engine
    row = list(range(2, 30))
    expected = recomputed(case.models[version], row[:1], row[1:], Sampling())
    for scores in engine.score([row]).values():
        assert scores[0][1:] == pytest.approx(expected.tolist(), abs=1e-5)


def listed(case: AdapterCase) -> list[list[str]]:
    """The adapters of each server, without the digests in their names."""
    engine: Any = case.engine
    names = [engine.loader.home.call(adapters_of(server), 10) for server in engine.fleet.in_state()]
    return [sorted(name.rpartition("-")[0] for name in of_server) for of_server in names]


def test_tokens_and_scores_are_those_of_the_adapters_that_were_loaded_last(case):
    for version in range(3):
        case.load(version)
        check_tokens(case, version)
        check_scores(case, version)


def test_the_base_is_loaded_once_and_then_only_adapters_travel_without_a_pause(case, servers, kind):
    before = [one.stats()["requests"] for one in servers]
    for version in range(3):
        case.load(version)
    adapters = sum(value.numel() * 4 for name, value in MODELS[0].named_parameters() if ".lora_" in name)
    assert case.engine.last_sync.num_bytes == 2 * adapters
    assert set(case.engine.verified_by().values()) == {"version"}  # digests: of the base alone
    for one, old in zip(servers, before, strict=True):
        requests = one.stats()["requests"]
        made = {path: requests[path] - old.get(path, 0) for path in requests}
        base, pause, adapter = PATHS[kind]
        assert (made[base], made[pause], made[adapter]) == (1, 1, 3)


def in_flight_over_a_load(case: AdapterCase) -> list[list[int]]:
    """The weight versions of completions that were being written while version 1 was loaded."""
    case.load(0)
    sampling = Sampling(max_new_tokens=200, seed=1)

    async def scenario() -> Any:
        writing = [asyncio.ensure_future(case.generate([number], sampling)) for number in range(2, 10)]
        while (await case.depth()) < 8 or not case.engine.queue_depths()["running"]:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(case.load, 1)
        return [(await one)[0] for one in writing]

    completions = run(scenario())
    for number, completion in zip(range(2, 10), completions, strict=True):
        expected = {
            version: recomputed(case.models[version], [number], completion.token_ids, sampling).tolist()
            for version in (0, 1)
        }
        wanted = [expected[version][place] for place, version in enumerate(completion.weight_versions)]
        assert completion.logprobs == pytest.approx(wanted, abs=1e-4)
    return [completion.weight_versions for completion in completions]


def test_a_completion_finishes_under_the_version_that_it_began_with(case):
    assert in_flight_over_a_load(case) == [[0] * 200] * 8
    check_tokens(case, 1)


def test_servers_keep_as_many_versions_as_the_staleness_allows(case):
    for version in range(4):
        case.load(version)
    run(until(lambda: listed(case) == [["policy-v2", "policy-v3"]] * 2))


def test_a_request_under_a_version_that_is_dropped_continues_under_the_newest(case):
    case.load(0)

    async def scenario() -> Any:
        writing = asyncio.ensure_future(case.generate([7], Sampling(max_new_tokens=220, seed=1)))
        while not case.engine.queue_depths()["running"]:
            await asyncio.sleep(0.01)
        for version in (1, 2):
            await asyncio.to_thread(case.load, version)
        return (await writing)[0]

    completion = run(scenario())
    assert len(completion.token_ids) == 220
    assert set(completion.weight_versions) <= {0, 2}
    run(until(lambda: listed(case) == [["policy-v1", "policy-v2"]] * 2))


def test_a_server_that_acknowledges_an_adapter_and_does_not_load_it_is_lost(case, servers):
    case.load(0)
    servers[0].fault("lose_update", "/load_lora_adapter_from_tensors")
    case.load(1)
    assert "does not list it" in case.engine.last_sync.lost[servers[0].url]
    check_tokens(case, 1)


def test_without_enable_lora_the_error_names_the_arguments(folder, serving, kind):
    cases = [({}, "--enable-lora --max-lora-rank 4 --lora-target-modules down_proj")]
    if kind is VLLMEngine:
        advice = ".*--enable-lora --max-lora-rank 8 --max-loras 3"
        vllm = {"vllm": True, **LORA[kind]}
        cases = [({**vllm, "max_loras": 2}, f"was started with max_loras=2 instead of at least 3{advice}")]
        cases += [({**vllm, "lora_target_modules": ["q_proj"]}, f"lora_target_modules=.'q_proj'. instead of {advice}")]
    for arguments, words in cases:
        with FakeServerProcess(str(folder), **arguments) as one, pytest.raises(WeightSyncError, match=words):
            serving(urls=[one.url]).load(0)


@pytest.mark.parametrize("is_new_run", [False, True])
def test_a_version_that_is_loaded_again_with_other_values_replaces_the_first(is_new_run, case, serving):
    for version in range(2):
        case.load(version)
        check_tokens(case, version)  # so that the prompt is cached under the first names
    other = serving(MODELS[2:]) if is_new_run else case
    other.models = MODELS[2:]
    for version in range(2):
        other.load(version)
        check_tokens(other, version)
        check_scores(other, version)
    run(until(lambda: listed(other) == [["policy-v0", "policy-v1"]] * 2))


def test_the_scores_of_a_server_with_the_old_adapters_under_the_new_name_are_not_the_trainers(case, servers):
    case.load(0)
    for one in servers:
        one.fault("old_adapter", "/load_lora_adapter_from_tensors")
    case.load(1)
    check_scores(AdapterCase(case.engine, MODELS[:1], is_exact=False), 0)  # so the probe finds it


def test_adapters_of_another_shape_are_refused_and_the_old_ones_stay(case):
    case.load(0)
    wrong = {name: torch.cat([value, value]) for name, value in MODELS[1].named_parameters() if ".lora_" in name}
    with pytest.raises(WeightSyncError, match="did not have it with this shape"):
        case.engine.load_weights([Bucket(wrong, is_last=True)], weight_version=1)
    check_tokens(case, 0)


@pytest.mark.extra
def test_a_restarted_server_gets_the_base_and_the_kept_versions_before_requests(folder, serving, kind, tmp_path):
    name, words = ("vllm_python", ["--vllm"]) if kind is VLLMEngine else ("sglang_python", [])
    python = python_of_fakes(tmp_path, "--model-path", str(folder), *words, *flags(LORA[kind]))
    case = serving(servers=1, **{name: python})
    for version in range(3):
        case.load(version)
    engine = case.engine
    (old,) = engine.fleet.urls()
    engine.drop_replica(old, "on purpose")
    run(until(lambda: engine.fleet.urls("routable") not in ([], [old])))
    assert listed(case) == [["policy-v1", "policy-v2"]]
    check_tokens(case, 2)


@pytest.mark.parametrize(
    ("settings", "num_versions", "message"),
    [
        ({"transport": "delta"}, 1, "adapters='served' needs transport='disk' for VLLMEngine, got 'delta'"),
        ({"server_args": {"max-loras": 2}}, 2, "has max_loras=2 instead of at least 3, which max_staleness"),
        ({"server_args": {"max_lora_rank": 1}}, 1, "server_args has max_lora_rank=1 instead of at least 8"),
        ({"server_args": {"max_loras": None}}, 1, "server_args has max_loras=None instead of at least 2"),
        ({"server_args": {"enable_lora": False}}, 1, "server_args has enable_lora=False instead of True"),
        ({"server_args": {"lora_target_modules": ["q_proj"]}}, 1, "lora_target_modules=..q_proj.. instead of "),
        ({"server_args": {"quantization": "fp8"}}, 1, r"server_args\.quantization needs adapters='merged'"),
        ({}, 1, r"lora\.rank must be at most 512 on vLLM with adapters='served', got 513"),
    ],
)
def test_what_vllm_cannot_serve_is_refused_before_a_server_is_started(settings, num_versions, message):
    policy = MODELS[0] if settings else adapted(0, rank=513)
    with pytest.raises(ValueError, match=message):
        VLLMEngine(servers=1, adapters="served", **settings).expect_policy(policy, num_versions=num_versions)


def test_vllm_is_started_with_an_allowed_rank_and_room_for_the_staleness_and_one_more(folder):
    engine = VLLMEngine(servers=1, adapters="served")
    engine.expect_policy(MODELS[0], num_versions=3)
    assert engine.start_args([]) == {**LORA[VLLMEngine], "max_loras": 4, "lora_target_modules": TARGETS}
    process = VLLMProcess(folder, python=sys.executable, args=engine.start_args([]))
    assert process.environment()["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"


@pytest.mark.parametrize("kind", [VLLMEngine], indirect=True)
def test_folders_stay_while_a_request_may_name_them_and_no_longer(case):
    for version in range(4):
        case.load(version)
        run(until(lambda: len(listed(case)[0]) <= NUM_VERSIONS))
    names = {path.name.rpartition("-")[0] for path in case.engine.loader.versions.root.iterdir()}
    assert names == {"policy-v1", "policy-v2", "policy-v3"}  # the oldest one goes with the next load


def test_colocated_servers_cannot_serve_adapters():
    with pytest.raises(ValueError, match="needs placement='separate'"):
        SGLangEngine(adapters="served", placement="colocated")


@pytest.mark.extra
@pytest.mark.real_sglang
@pytest.mark.parametrize("kind", [SGLangEngine], indirect=True)
def test_the_real_sglang_serves_each_version_within_rounding(serving, monkeypatch):
    """SGLang 0.5.23 pins memory for adapters, which a CPU build of torch cannot: sglang_without_pinned_memory.py."""
    built_python()
    launcher = str(Path(__file__).with_name("sglang_without_pinned_memory.py"))

    command_line = SGLangProcess.command_line

    def with_launcher(process: SGLangProcess, secrets_file: str) -> list[str]:
        words = command_line(process, secrets_file)
        place = words.index("-m")
        return [*words[:place], launcher, *words[place + 2 :]]

    monkeypatch.setattr(SGLangProcess, "command_line", with_launcher)
    case = serving(servers=1, timeouts=Timeouts(startup_s=170))
    for version in range(3):
        case.load(version)
        check_tokens(case, version)
        check_scores(case, version)
    run(until(lambda: listed(case) == [["policy-v1", "policy-v2"]]))
    assert case.engine.last_sync.seconds["load"] < case.engine.timeouts.sync_s


@pytest.mark.extra
@pytest.mark.real_vllm
@pytest.mark.parametrize("kind", [VLLMEngine], indirect=True)
def test_the_real_vllm_serves_each_version_within_rounding(serving):
    built_python("vllm")
    models = [adapted(version, VLLM_CONFIG) for version in range(3)]
    case = serving(models, servers=1, timeouts=Timeouts(startup_s=600, sync_s=60))
    for version in range(3):
        case.load(version)
        check_tokens(case, version)
        check_scores(case, version)
    run(until(lambda: listed(case) == [["policy-v1", "policy-v2"]]))
    assert in_flight_over_a_load(case) == [[0] * 200] * 8
    check_tokens(case, 1)


@pytest.mark.extra
@pytest.mark.real_vllm
def test_a_run_trains_adapters_on_the_real_vllm_and_every_sync_is_probed(tmp_path):
    built_python("vllm")
    engine = VLLMEngine(servers=1, adapters="served", timeouts=Timeouts(startup_s=600, sync_s=60))
    trainer, _ = fit(engine, VLLM_CONFIG, tmp_path, lora=LoRA(rank=RANK))
    assert float(trainer.callback_metrics["sync/probe_abs_dlogp_nats"]) < 1e-5
    assert [*engine.last_sync.versions.values()] == [4]
    adapters = sum(
        value.numel() * 4 for name, value in trainer.lightning_module.policy.named_parameters() if "lora_" in name
    )
    assert engine.last_sync.num_bytes == adapters
