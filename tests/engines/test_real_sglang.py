"""The real SGLang on this machine's CPU, as lightrl starts it: who may ask, what it stops at, its weights and seeds."""

import asyncio
import itertools
import json
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from chat_texts import END, chat_tokenizer
from engine_contract import BUCKET_BYTES, CONTRACT, EngineCase, run
from moe_cases import moe_model, sampled_by
from real_servers import own_server, tiny_config, tiny_models
from sync_cases import EngineOn, fed
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightrl.columns import NATIVE
from lightrl.engines import Timeouts
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import DeltaTransport, DiskTransport, WeightTransport
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.engine import SGLangEngine
from lightrl.errors import EngineError
from lightrl.experience import Experience
from lightrl.models.conversion import checkpoint_tensors
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.weights import ServerForm, WeightFolder, block_fp8, bucketed
from lightrl.workflows.workflow import SingleTurn

pytestmark = [pytest.mark.real_sglang, pytest.mark.extra]  # of test_real_sglang_runs.py one always runs


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__.replace("_", " "))
def test_the_contract_of_engines_holds_through_disk(check, real_server, engine_on):
    engine = engine_on(urls=[real_server["url"]], config=tiny_config(), timeouts=Timeouts(sync_s=60))
    check(EngineCase(engine, tiny_models(), is_exact=False))


@contextmanager
def loaded(
    model: PreTrainedModel, server: dict[str, Any], spread: float = 0.2, **settings: Any
) -> Iterator[SGLangEngine]:
    """An engine that has sent changed weights and verified them by digests."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    named = [checkpoint_tensors(model, name, tensor) for name, tensor in model.named_parameters()]
    sent = [(name, tensor) for tensors in named for name, tensor in tensors.items()]
    engine = SGLangEngine(urls=[server["url"]], timeouts=Timeouts(sync_s=60, startup_s=60), **settings)
    engine.start(model.config)
    try:
        engine.load_weights(bucketed(sent, BUCKET_BYTES), weight_version=0)
        assert engine.verified_by() == {server["url"]: "digests"}
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("ep", [1, 2])
def test_experts_on_two_ranks_are_verified(ep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `ep_size` SGLang cannot generate on a CPU: its plain torch operations index experts of other ranks."""
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|0")  # two ranks may share a core
    model = moe_model(moe_intermediate_size=64)
    with own_server(tmp_path, model.config, tp_size=2, ep_size=ep) as server, loaded(model, server):
        pass


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_a_mixture_is_verified_and_returns_its_routes(family: str, tmp_path: Path) -> None:
    model = moe_model(family)
    with own_server(tmp_path, model.config, enable_return_routed_experts=True) as server:
        for transport in ("disk", "tensor"):
            with loaded(model, server, transport=transport, record_routes=True) as engine:
                experience = Experience.from_trajectories(sampled_by(engine))
            assert (experience.routes[0, : experience.lengths[0] - 1] != NATIVE).all()
            for part in (experience, experience.without(["routes"])):  # the engine's are those that the trainer chooses
                (outputs,) = SingleModel(model, LogprobSettings()).forward([part])
                assert torch.allclose(outputs.logprobs, experience.behavior_logprobs, atol=1e-4)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_block_fp8_is_verified_and_its_logprobs_are_the_rounded_models(
    tp_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join(["0"] * tp_size))  # ranks may share a core
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(tiny_config(**sizes, num_key_value_heads=4), dtype=torch.float32)
    served = block_fp8.quantized_config(model.config, tp_size)
    with own_server(tmp_path, served, dtype="bfloat16", tp_size=tp_size, quantization="fp8") as server:
        for transport in ("disk", "tensor"):
            with loaded(model, server, spread=0.05, transport=transport, server_args={"quantization": "fp8"}) as engine:
                assert engine.dtypes() == {"float8_e4m3fn"}
                experience = Experience.from_trajectories(sampled_by(engine))
    rounded = block_fp8.dequantized(block_fp8.quantized(dict(model.named_parameters())))
    model.load_state_dict(rounded, strict=False)
    (outputs,) = SingleModel(model, LogprobSettings()).forward([experience])
    difference = (outputs.logprobs - experience.behavior_logprobs)[experience.loss_mask].abs().mean()
    # Servers round activations too, to 3 bits of mantissa; logprobs of another model differ by as much as they vary.
    assert difference < 0.2 * outputs.logprobs[experience.loss_mask].std()


def test_a_grammars_mask_is_the_support_of_each_token_and_the_trainer_computes_the_same_logprobs(
    tmp_path: Path,
) -> None:
    """As agents ask for it: JSON of a schema, then an end token."""
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    model = AutoModelForCausalLM.from_config(tiny_config(vocab_size=len(tokenizer), eos_token_id=END))
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, 25]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    sampling = Sampling(max_new_tokens=200, stop_token_ids=(END,), grammar=json.dumps(tag))
    prompt = [5, 6, 7]

    async def sampled(engine: SGLangEngine) -> list[Trajectory]:
        engine.check_sampling(sampling)
        drawn = [engine.generate(prompt, replace(sampling, seed=seed), session="one") for seed in range(8)]
        made = SingleTurn(tokenizer)
        return [made.trajectory_of(Prompt("p", token_ids=prompt), one) for (one,) in await asyncio.gather(*drawn)]

    with (
        own_server(tmp_path, model.config, tokenizer_path=str(tmp_path / "tokenizer")) as server,
        loaded(model, server) as engine,
    ):
        trajectories = asyncio.run(sampled(engine))
    finished = [item for item in trajectories if item.finish_reason == "stop"]
    assert finished
    assert all(json.loads(item.completion)["a"] in (1, 25) for item in finished)
    for item in trajectories:
        item.reward = 0.0
    experience = Experience.from_trajectories(trajectories)
    (outputs,) = SingleModel(model, LogprobSettings()).forward([experience])
    mask = experience.loss_mask
    assert torch.allclose(outputs.logprobs[mask], experience.behavior_logprobs[mask], atol=1e-4)
    (unmasked,) = SingleModel(model, LogprobSettings()).forward([experience.without(["supports"])])
    assert not torch.allclose(unmasked.logprobs[mask], experience.behavior_logprobs[mask], atol=1.0)


def with_client(server: dict[str, Any], question: Callable[[SGLangClient], Awaitable[Any]], token: str = "") -> Any:
    async def scenario() -> Any:
        timeouts = Timeouts(request_s=30)
        client = SGLangClient(server["url"], token=token or server["token"], num_retries=0, timeouts=timeouts)
        try:
            return await question(client)
        finally:
            await client.close()

    return run(scenario())


def asked(server: dict[str, Any], *bodies: dict[str, Any], **settings: Any) -> list[Any]:
    """The answers to /generate, one after the other."""

    async def each(client: SGLangClient) -> list[Any]:
        return [await client.generate({"return_logprob": True, **body}) for body in bodies]

    return with_client(server, each, **settings)


def load(server: dict[str, Any], folder: Path, version: int, model: torch.nn.Module) -> None:
    path = WeightFolder(folder, tiny_config()).write(bucketed(model.named_parameters(), BUCKET_BYTES), version)
    with_client(server, lambda client: client.update_weights_from_disk(str(path), str(version), timeout_s=60))


def body(token_ids: list[int], **sampling: Any) -> dict[str, Any]:
    return {"input_ids": token_ids, "sampling_params": {"max_new_tokens": 12, **sampling}}


def test_it_stops_at_the_tokens_a_request_names_and_at_no_others(real_server, tmp_path):
    load(real_server, tmp_path, 0, tiny_models(1)[0])
    always = {"logit_bias": {"1": 1e4}}  # token 1 is the end token of the trainer's config
    free, stopped, delayed = asked(
        real_server,
        body([5], **always),
        body([5], **always, stop_token_ids=[1]),
        body([5], **always, stop_token_ids=[1], min_new_tokens=4),
    )
    assert free["output_ids"] == [1] * 12
    assert (stopped["output_ids"], stopped["meta_info"]["finish_reason"]["type"]) == ([1], "stop")
    assert len(delayed["output_ids"]) == 5


def test_a_seed_samples_the_same_tokens_wherever_a_completion_is_interrupted_and_next_to_others(real_server, tmp_path):
    load(real_server, tmp_path, 0, tiny_models(1)[0])
    bodies = [body([3, 1, 4], sampling_seed=seed) for seed in range(8)]

    async def together(client: SGLangClient) -> list[Any]:
        return list(await asyncio.gather(*(client.generate(one) for one in bodies)))

    alone = [answer["output_ids"] for answer in asked(real_server, *bodies)]
    assert [answer["output_ids"] for answer in with_client(real_server, together)] == alone
    rest = body([3, 1, 4, *alone[5][:7]], sampling_seed=5, max_new_tokens=5)
    assert asked(real_server, rest)[0]["output_ids"] == alone[5][7:]


@pytest.mark.parametrize("is_load", [True, False], ids=["load", "pause"])
def test_an_interruption_does_not_bar_stop_tokens_for_longer(
    is_load: bool, real_server: dict[str, Any], engine_on: EngineOn
) -> None:
    """SGLang counts the minimum of a request that a pause retracts from there, so such a request is sent again."""
    engine = engine_on(urls=[real_server["url"]], config=tiny_config(), timeouts=Timeouts(sync_s=60))
    weights = list(tiny_models(1)[0].named_parameters())
    versions = itertools.count()

    def load_again() -> None:
        engine.load_weights(bucketed(weights, BUCKET_BYTES), weight_version=next(versions))

    async def completed(seed: int, *, is_interrupted: bool) -> tuple[list[int], bool]:
        """Its tokens, and whether the interruption came amid them."""
        sampling = Sampling(max_new_tokens=240, min_new_tokens=160, stop_token_ids=tuple(range(1, 40)), seed=seed)
        task = asyncio.create_task(engine.generate([50], sampling, session="s"))
        is_amid = False
        if is_interrupted:
            while not engine.queue_depths()["running"]:
                await asyncio.sleep(0.001)
            if is_load:
                await asyncio.to_thread(load_again)
            else:
                await engine.pause()
                is_amid = not task.done()
                await engine.resume()
        completion = (await task)[0]
        return list(completion.token_ids), is_amid or len(set(completion.weight_versions)) > 1

    load_again()
    for seed in range(20):  # until one is interrupted amid its tokens
        interrupted, is_amid = run(completed(seed, is_interrupted=True))
        assert (interrupted, False) == run(completed(seed, is_interrupted=False))
        assert 160 < len(interrupted) < 240
        if is_amid:
            break
    assert is_amid


def test_a_request_without_the_token_is_refused(real_server):
    with pytest.raises(EngineError, match="401"):
        asked(real_server, body([1]), token="guessed")


def test_the_token_is_in_no_command_line_of_the_server(real_server):
    watch = psutil.Process(real_server["watch_pid"])
    family = [watch, *watch.children(recursive=True)]
    assert len(family) >= 3  # the watch process, the server, its workers
    assert not [process for process in family if real_server["token"] in " ".join(process.cmdline())]
    assert stat.S_IMODE(Path(real_server["log"]).stat().st_mode) == 0o600
    assert "--config" in real_server["command"]


def test_it_answers_on_the_loopback_only(real_server):
    """PyTorch's rendezvous of the server's workers listens on all addresses; docs/security.md says so."""
    port = int(real_server["url"].rpartition(":")[2])
    addresses = {
        connection.laddr.ip
        for process in psutil.Process(real_server["watch_pid"]).children(recursive=True)
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    assert addresses == {"127.0.0.1"}


def test_deltas_give_the_real_server_the_weights_that_it_loads_from_the_disk(real_server, tmp_path):
    config, token = tiny_config(), real_server["token"]
    form = ServerForm.of(config)
    receivers = Receivers()
    receivers.start("127.0.0.1", token)
    delta = DeltaTransport(
        form, config, connect=lambda url: Connection(url, token=token), receiver_of=receivers.of, wait_s=20
    )
    disk = DiskTransport(WeightFolder(tmp_path, config, form=form))
    model = tiny_models(1)[0]

    def synced(transport: WeightTransport, version: int) -> tuple[SyncReport, dict[str, Any]]:
        async def load(client: SGLangClient) -> tuple[SyncReport, dict[str, Any]]:
            buckets = fed(bucketed(model.named_parameters(), BUCKET_BYTES))
            report = await ServerSync(transport, timeout_s=60).load([Server(client)], buckets, weight_version=version)
            return report, (await client.checksum())["ranks"][0]["checksums"]

        return with_client(real_server, load)

    try:
        full, before = synced(delta, 100)
        for version in (101, 102):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_((torch.rand_like(parameter) < 0.02) * 1e-3)
            report, found = synced(delta, version)
            assert report.num_bytes < 0.3 * full.num_bytes
            assert found != before
            _, expected = synced(disk, 1000 + version)
            assert found == expected
            before = found
    finally:
        receivers.stop()
