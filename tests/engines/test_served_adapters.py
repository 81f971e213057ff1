"""Adapters served beside their base: which version wrote each token, what travels, and what servers keep."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import EngineCase, run
from engine_contract import recomputed_logprobs as recomputed
from fake_sglang import python_of_fakes
from fake_sglang.process import FakeServerProcess
from real_servers import built_python, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel
from waits import until

from lightrl.engines import Timeouts
from lightrl.engines.servers.processes.command import flags
from lightrl.engines.sglang.command import SGLangProcess
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import WeightSyncError
from lightrl.models.lora import LoRA
from lightrl.models.tuning import tuning_of
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, bucketed

CONFIG = tiny_config()
CONFIG.intermediate_size = 64  # on a CPU SGLang pads others, and then no adapter fits down_proj
RANK = 4
PROMPT = [3, 1, 4, 1, 5]
SAMPLING = Sampling(max_new_tokens=12, seed=3)
NUM_VERSIONS = 2


def adapted(version: int) -> PreTrainedModel:
    """The same base for every version, with adapters of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()
        LoRA(rank=RANK).add_to(model)
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


def started(engine: SGLangEngine) -> AdapterCase:
    engine.expect_policy(MODELS[0], num_versions=NUM_VERSIONS)
    engine.start(CONFIG)
    return AdapterCase(engine, MODELS, is_exact=False)


TARGETS = tuning_of(MODELS[1]).served_form(MODELS[1], 1).config["target_modules"]
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": RANK, "lora_target_modules": TARGETS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    place = tmp_path_factory.mktemp("model")
    CONFIG.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[list[FakeServerProcess]]:
    one, other = (FakeServerProcess(str(folder), piece_tokens=4, **LORA) for _ in range(2))
    with one, other:
        yield [one, other]


@pytest.fixture
def serving(servers: list[FakeServerProcess]) -> Iterator[Callable[..., AdapterCase]]:
    """Starts an engine, on the two servers if nothing else is given; it is closed with the test."""
    cases: list[AdapterCase] = []

    def start(**settings: Any) -> AdapterCase:
        where = {} if "servers" in settings else {"urls": [one.url for one in servers]}
        cases.append(
            started(SGLangEngine(**{"adapters": "served", "timeouts": Timeouts(sync_s=30), **where, **settings}))
        )
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
    """The adapters of each server."""
    engine: Any = case.engine
    return [sorted(engine.loader.home.call(server.client.adapters(), 10)) for server in engine.fleet.in_state()]


def test_tokens_and_scores_are_those_of_the_adapters_that_were_loaded_last(case):
    for version in range(3):
        case.load(version)
        check_tokens(case, version)
        check_scores(case, version)


def test_the_base_is_loaded_once_and_then_only_adapters_travel_without_a_pause(case, servers):
    before = [one.stats()["requests"] for one in servers]
    for version in range(3):
        case.load(version)
    adapters = sum(value.numel() * 4 for name, value in MODELS[0].named_parameters() if ".lora_" in name)
    assert case.engine.last_sync.num_bytes == 2 * adapters
    assert set(case.engine.verified_by().values()) == {"version"}  # digests: of the base alone
    for one, old in zip(servers, before, strict=True):
        requests = one.stats()["requests"]
        made = {path: requests[path] - old.get(path, 0) for path in requests}
        assert made["/update_weights_from_disk"] == made["/pause_generation"] == 1
        assert made["/load_lora_adapter_from_tensors"] == 3


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


def test_without_enable_lora_the_error_names_the_arguments(folder, serving):
    words = "--enable-lora --max-lora-rank 4 --lora-target-modules down_proj"
    with FakeServerProcess(str(folder)) as one, pytest.raises(WeightSyncError, match=words):
        serving(urls=[one.url]).load(0)


def test_adapters_of_another_shape_are_refused_and_the_old_ones_stay(case):
    case.load(0)
    wrong = {name: torch.cat([value, value]) for name, value in MODELS[1].named_parameters() if ".lora_" in name}
    with pytest.raises(WeightSyncError, match="did not have it with this shape"):
        case.engine.load_weights([Bucket(wrong, is_last=True)], weight_version=1)
    check_tokens(case, 0)


@pytest.mark.extra
def test_a_restarted_server_gets_the_base_and_the_kept_versions_before_requests(folder, serving, tmp_path):
    case = serving(servers=1, sglang_python=python_of_fakes(tmp_path, "--model-path", str(folder), *flags(LORA)))
    for version in range(3):
        case.load(version)
    engine = case.engine
    (old,) = engine.fleet.urls()
    engine.drop_replica(old, "on purpose")
    run(until(lambda: engine.fleet.urls("routable") not in ([], [old])))
    assert listed(case) == [["policy-v1", "policy-v2"]]
    check_tokens(case, 2)


def test_colocated_servers_cannot_serve_adapters():
    with pytest.raises(ValueError, match="needs placement='separate'"):
        SGLangEngine(adapters="served", placement="colocated")


@pytest.mark.extra
@pytest.mark.real_sglang
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
