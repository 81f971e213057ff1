"""VLLMEngine on a fake server with vLLM's interface: the contract, what it was started without, its command line."""

import asyncio
import functools
import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_contract import CONTRACT, EngineCase
from fake_sglang.process import FakeServerProcess
from moe_cases import moe_spec
from sync_cases import LARGE, EngineOn, config_of, one_weight
from waits import Deadlines, comes_true

from lightrl.columns import TokenArray
from lightrl.engines.servers.request import CompletionDraft, MalformedAnswer
from lightrl.engines.sglang import generation as sglang
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.engines.vllm.client import VLLMClient, rank_digests, read_server_info
from lightrl.engines.vllm.command import VLLMProcess
from lightrl.engines.vllm.engine import VLLMEngine
from lightrl.engines.vllm.generation import read_answer, request_of
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, Digests, ServerForm, ServerLayout

CONFIG = config_of()


@pytest.fixture(scope="module")
def vllm_server(model_folder: Path) -> Iterator[FakeServerProcess]:
    with FakeServerProcess(model_folder, vllm=True) as server:
        yield server


@pytest.fixture
def vllm_on(engine_on: EngineOn) -> EngineOn:
    return functools.partial(engine_on, kind=VLLMEngine)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_the_engine_on_a_fake_vllm_keeps_the_contract(check, vllm_server, vllm_on, models):
    check(EngineCase(vllm_on(vllm_server, config=CONFIG), models, is_exact=False))


def test_a_load_that_changed_nothing_is_found_by_the_digests_that_there_are(models, start, vllm_on, model_folder):
    server = start(model_folder, vllm=True)
    engine = vllm_on(server, config=CONFIG)
    case = EngineCase(engine, models)
    case.load(0)
    assert engine.verified_by() == {server.url: "version"}  # the linear layers have none
    server.fault("ignore_update", "/update_weights_from_disk")
    with pytest.raises(WeightSyncError, match=r"2 of its 19 parameters differ from the trainer's version 1"):
        case.load(1)


def test_digests_of_vllm_on_a_gpu_are_of_the_bytes_without_padding():
    gate, up, embedding = torch.randn(3, 4), torch.randn(3, 4), torch.randn(61, 4)
    layout = ServerLayout(torch.float32, is_cpu=False, is_vllm=True)
    digests = Digests(CONFIG, ServerForm(), [layout])
    names = ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight")
    digests.add(Bucket(dict(zip(names, (gate, up, embedding), strict=True)), is_last=True))
    (rank,) = digests.finish()[layout]
    expected = {
        "model.layers.0.mlp.gate_up_proj.weight": torch.cat([gate, up]),
        "model.embed_tokens.weight": torch.cat([embedding, torch.zeros(3, 4)]),  # to a multiple of 64 rows
    }
    assert rank == {name: sha256(tensor.numpy().tobytes()).hexdigest()[:16] for name, tensor in expected.items()}


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (["dev-mode"], r"started without VLLM_SERVER_DEV_MODE=1 in its environment\. Restart"),
        (["dev-mode", "scale-out"], r"VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out\. Restart"),
        (["scale-out", "mode"], "without --enable-scale-out and --logprobs-mode processed_logprobs"),
        (["one"], r"started without --api-server-count 1\. Restart"),
        (["weight-info"], r"http.* is a vLLM server without /weight_info\. Use vLLM 0\.32 or later"),
        (["form"], r"http.* answered /server_info in an unknown format \(TypeError.*Use vLLM 0\.32"),
    ],
)
def test_a_server_without_what_rollouts_need_is_refused_and_all_of_it_is_named(without, message, start):
    server = start(vllm=True, vllm_without=without)
    with pytest.raises(EngineError, match=message):
        VLLMEngine(urls=[server.url], timeouts=Deadlines()).start(LARGE)


@pytest.mark.parametrize("num_errors", [0, 4], ids=["at the start", "at the first load"])
def test_it_is_refused_also_if_nothing_is_verified(num_errors, start, vllm_on):
    server = start(vllm=True, vllm_without=["mode"])
    refused = functools.partial(vllm_on, server, should_verify=False, only_starts=True)
    if num_errors:
        server.fault("error", "/server_info", count=num_errors)  # at the start it does not answer
        refused = functools.partial(refused().load_weights, one_weight(0), weight_version=0)
    with pytest.raises(EngineError, match="without --logprobs-mode processed_logprobs"):
        refused()


@pytest.mark.parametrize(
    ("is_known", "returns"),
    [(True, False), (False, False), pytest.param(True, True, marks=pytest.mark.extra)],
    ids=["known", "one unknown", "returns"],
)
def test_a_server_that_was_restarted_without_what_rollouts_need_is_lost_at_the_load(is_known, returns, start, vllm_on):
    other, restarted = start(vllm=True), start(vllm=True)
    if not is_known:
        other.fault("error", "/server_info", count=8)
    timeouts = Deadlines(probe_interval_s=5.0 if returns else 60.0)
    engine = vllm_on(other, restarted, timeouts=timeouts, should_verify=False, only_starts=True)
    restarted.arguments["vllm_without"] = ["mode"]
    restarted.start(restarted.port)
    if not is_known:
        other.reset()
    engine.load_weights(one_weight(0), weight_version=0)
    assert other.url in engine.fleet.urls("routable")
    assert comes_true(lambda: engine.fleet.urls("lost") == [restarted.url])
    assert "without --logprobs-mode processed_logprobs" in engine.fleet.servers[restarted.url].reason
    if returns:
        del restarted.arguments["vllm_without"]
        restarted.start(restarted.port)
        assert comes_true(lambda: engine.fleet.urls("routable") == [other.url, restarted.url])


def test_whether_a_server_generates_is_asked_once_and_not_behind_completions(start):
    server = start(vllm=True)
    server.fault("hang", "/inference/v1/generate", count=1)
    client = VLLMClient(server.url, timeouts=Deadlines(), max_connections=1)

    async def ask_thrice() -> None:
        hung = asyncio.ensure_future(client.generate({}))
        while "/inference/v1/generate" not in server.stats()["requests"]:
            await asyncio.sleep(0.01)
        for _ in range(3):
            await client.server_info()
        hung.cancel()
        await client.close()

    asyncio.run(asyncio.wait_for(ask_thrice(), 600))
    num_requests = server.stats()["requests"]
    assert (num_requests["/server_info"], num_requests["/inference/v1/generate"]) == (3, 2)


def test_a_server_that_cannot_tell_what_was_cached_is_refused_by_the_probe(start, vllm_on):
    engine = vllm_on(start(vllm=True, vllm_without=["details"]))
    with pytest.raises(EngineError, match="without --enable-prompt-tokens-details"):
        engine.score([[1, 2]])


def test_each_kind_of_engine_names_a_server_of_the_other_kind(start):
    with pytest.raises(EngineError, match=r"is an SGLang server\. Set the engine to SGLangEngine"):
        VLLMEngine(urls=[start().url], timeouts=Deadlines()).start(LARGE)
    with pytest.raises(EngineError, match=r"is a vLLM server\. Set the engine to VLLMEngine"):
        SGLangEngine(urls=[start(vllm=True).url], timeouts=Deadlines()).start(LARGE)


def test_top_p_at_a_server_of_few_logprobs_says_how_to_start_it(start, vllm_on):
    engine = vllm_on(start(vllm=True, vllm_without=["max-logprobs"]))
    request = engine.generate([1, 2], Sampling(top_p=0.5), session="s")
    with pytest.raises(EngineError, match=r"HTTP 400.*max allowed: 20.*needs --max-logprobs 4008"):
        asyncio.run(request)


def test_a_broadcast_without_a_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="transport='distributed' needs a GPU"):
        VLLMEngine(urls=["http://127.0.0.1:9"], transport="distributed").check()


def test_a_wrong_token_is_refused_at_the_start(start, monkeypatch):
    server = start(vllm=True, api_key="right")
    monkeypatch.setenv("LIGHTRL_SERVER_TOKEN", "wrong")
    with pytest.raises(EngineError, match=r"HTTP 401.*does not accept this token"):
        VLLMEngine(urls=[server.url], timeouts=Deadlines()).start(LARGE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router": "smg"}, "router must be None for VLLMEngine, got 'smg'"),
        ({"transport": "tensor"}, "transport must be disk or delta or distributed for VLLMEngine, got 'tensor'"),
        ({"placement": "colocated"}, "placement must be separate for VLLMEngine"),
    ],
)
def test_what_only_the_other_engine_does_is_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(servers=1, **settings)


@pytest.mark.parametrize("name", ["model_config", "aux_output_config"])
def test_a_server_that_returns_routes_says_so_and_one_that_does_not_is_refused_by_name(name, start):
    (url,) = urls = [start(vllm=True).url]
    config = moe_spec().load_config()
    with pytest.raises(ValueError, match=f"record_routes is true, but {url} does not return tokens' experts"):
        VLLMEngine(urls=urls, record_routes=True, timeouts=Deadlines()).start(config)
    flag = {"enable_return_routed_experts": True}
    assert VLLMEngine(servers=1, record_routes=True).start_args(["routes"]) == flag
    assert VLLMEngine(servers=1).start_args(["routes"]) == {}
    answer = {
        "instance_id": "a", "device_config": {"device": "cpu"},
        "cache_config": {"block_size": 1, "cache_dtype": "auto"},
        "parallel_config": {"tensor_parallel_size": 1, "pipeline_parallel_size": 1},
        "model_config": {"model": "m", "dtype": "torch.float32", "quantization": None},
    }  # fmt: skip
    assert read_server_info(answer).returned_columns == frozenset()
    assert read_server_info({**answer, name: {**answer.get(name, {}), **flag}}).returned_columns == {"routes"}


def test_a_request_that_continues_has_other_random_numbers_and_no_more_logprobs_than_the_vocabulary():
    draft = CompletionDraft([1, 2], Sampling(max_new_tokens=9, top_p=0.5, seed=7, stop_token_ids=(4,)), vocab_size=61)
    first = request_of(draft, "r", "run-3")
    assert first["sampling_params"]["seed"] == 7
    assert first["sampling_params"]["logprobs"] == 61
    assert first["cache_salt"] == "run-3"
    draft.token_ids = read_answer(reply()).token_ids
    second = request_of(draft, "s", "run-3")
    assert second["token_ids"] == [1, 2, 3, 4]
    assert second["sampling_params"]["max_tokens"] == 7
    assert second["sampling_params"]["seed"] != 7


def test_a_grammar_goes_to_the_server_with_a_request_for_supports_and_starts_over_in_a_new_request():
    draft = CompletionDraft([1, 2], Sampling(max_new_tokens=9, grammar="{}", stop_token_ids=(4,)), vocab_size=61)
    params = request_of(draft, "r", "run-3")["sampling_params"]
    assert params["structured_outputs"] == {"structural_tag": "{}"}
    assert (params["top_k"], params["logprobs"]) == (64, 61)
    params = sglang.request_of(draft, "r", "run-3")
    assert (params["sampling_params"]["structural_tag"], params["return_sampling_mask"]) == ("{}", True)
    for grammar, num_left in (("", 2), ("{}", 0)):
        draft = CompletionDraft([1, 2], Sampling(max_new_tokens=9, top_p=0.5, grammar=grammar), vocab_size=61)
        supports = {"supports": TokenArray(b"\x01\x01", "B")}
        draft.add(replace(read_answer(reply()), columns=supports, full_support=None, finish="abort"), "server")
        assert (len(draft.token_ids), draft.finish_reason) == (num_left, None)


def reply(**changes: Any) -> bytes:
    entries = [
        {"token_id": token, "logprob": -0.5, "top_logprobs": [{"token_id": token, "logprob": -0.5}]} for token in (3, 4)
    ]
    choice = {"token_ids": [3, 4], "finish_reason": "length", "logprobs": {"content": entries},
              "weight_versions": [{"version": "7", "start": 0, "end": 2}]}  # fmt: skip
    return json.dumps({"choices": [{**choice, **changes}]}).encode()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": [3, 9]}, "2 tokens, 2 logprobs, 2 versions and the finish reason 'length'"),
        ({"finish_reason": "error"}, "the finish reason 'error'"),
        ({"weight_versions": [{"version": "default", "start": 0, "end": 2}]}, "a numbered weight version"),
        ({"weight_versions": None}, "a numbered weight version"),
        ({"logprobs": None}, "instead of tokens, logprobs"),
    ],
)
def test_an_answer_with_an_error_is_unusable(changes, problem):
    assert not read_answer(reply()).problem
    answer = read_answer(reply(**changes))
    assert problem in answer.problem
    with pytest.raises(MalformedAnswer, match="http://there answered /inference/v1/generate with "):
        CompletionDraft([1], Sampling()).add(answer, "http://there", path=VLLMClient.generate_path)


@pytest.mark.parametrize(("temperature", "is_refused"), [(0, 0), (0.005, 1), (0.01, 0), (2, 0), (2.1, 1)])
def test_a_temperature_that_vllm_changes_or_refuses_is_refused_before_a_server_is_asked(temperature, is_refused):
    engine, sampling = VLLMEngine(urls=["http://there"]), Sampling(temperature=temperature)
    SGLangEngine(urls=["http://there"]).check_sampling(sampling)
    with pytest.raises(ValueError, match=r"0 or from 0\.01 to 2 for VLLMEngine") if is_refused else nullcontext():
        engine.check_sampling(sampling)


def test_an_answer_without_supports_says_which_argument_gives_them():
    draft = CompletionDraft([1], Sampling(max_new_tokens=2, top_k=2))
    with pytest.raises(MalformedAnswer, match=r"the supports of its tokens.* needs --max-logprobs 4008"):
        draft.add(read_answer(reply()), "http://there", column_help=VLLMClient.column_help)


def truncated_reply(num_possible: int, num_requested: int) -> bytes:
    """One token, and as many most likely ones as were requested; the rest of them is impossible."""
    top = [{"token_id": token, "logprob": -0.5 if token < num_possible else -9999.0} for token in range(num_requested)]
    entries = [{"token_id": 0, "logprob": -0.5, "top_logprobs": top}]
    versions = [{"version": "7", "start": 0, "end": 1}]
    return reply(token_ids=[0], logprobs={"content": entries}, weight_versions=versions)


@pytest.mark.parametrize(
    ("num_possible", "vocab_size", "requests"),
    [(2, 61, [10]), (9, 61, [10]), (10, 61, [10, 61]), (10, 10, [10]), (600, 9000, [10, 66, 514, 4008])],
)
def test_a_support_that_may_lack_tied_tokens_is_asked_for_again_with_more(num_possible, vocab_size, requests):
    draft = CompletionDraft([1], Sampling(max_new_tokens=1, top_k=2), vocab_size=vocab_size)
    for attempt, expected in enumerate(requests, start=1):
        num_requested = request_of(draft, "r", "run-3")["sampling_params"]["logprobs"]
        assert num_requested == expected
        answer = read_answer(truncated_reply(num_possible, num_requested))
        if attempt < len(requests):
            with pytest.raises(MalformedAnswer, match=rf"only the {expected} most likely.* tie with the 2 most likely"):
                draft.add(answer, "http://there")
    draft.add(answer, "http://there")
    assert draft.finish_reason == "length"


def test_digests_are_sorted_by_rank_and_packed_parameters_have_none():
    of_nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    found = rank_digests({
        "dp0:pp0:pcp0:tp1:model.norm.weight": "b" * 64,
        "dp0:pp0:pcp0:tp0:model.norm.weight": "a" * 64,
        "dp0:pp0:pcp0:tp0:model.layers.0.mlp.down_proj.weight": of_nothing,
    })  # fmt: skip
    assert found == [
        {"model.norm.weight": "a" * 16, "model.layers.0.mlp.down_proj.weight": ""},
        {"model.norm.weight": "b" * 16},
    ]


def test_the_command_has_what_rollouts_need_and_no_token(model_folder):
    args = {"load_format": "dummy", "gpu-memory-utilization": 0.5}
    server = VLLMProcess(model_folder, python=sys.executable, args=args, tp=2, seed=3, token="secret")
    line = " ".join(server.command_line("secrets.yaml"))
    assert f"-m vllm.entrypoints.cli.main serve {model_folder} --host 127.0.0.1" in line
    for words in (
        "--enable-scale-out", "--logprobs-mode processed_logprobs", "--enable-prompt-tokens-details",
        "--max-model-len 257", "--seed 3", "--tensor-parallel-size 2", "--load-format dummy",
        "--gpu-memory-utilization 0.5",
    ):  # fmt: skip
        assert words in line
    assert "secret" not in line.replace("secrets.yaml", "")
    variables = server.environment()
    assert (variables["VLLM_API_KEY"], variables["VLLM_SERVER_DEV_MODE"]) == ("secret", "1")


def test_an_argument_that_lightrl_sets_is_refused(model_folder):
    with pytest.raises(ValueError, match="server_args has api_key, which lightrl sets"):
        VLLMProcess(model_folder, python=sys.executable, args={"api-key": "k"})
    with pytest.raises(ValueError, match=r"server_args.api_server_count must be 1, because .*, got 2"):
        VLLMEngine(servers=1, server_args={"api-server-count": 2}).source.check(lambda urls: None)
