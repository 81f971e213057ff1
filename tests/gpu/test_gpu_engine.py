"""LocalEngine on the device: the contract of engines, and weights that reach it and other processes' GPU memory."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from engine_contract import CONTRACT, EngineCase
from test_local_engine import CASES, make_models
from torch import Tensor
from weight_cases import buckets, parameters, read_shared

from lightrl.engines import LocalEngine
from lightrl.engines.local.fast.decoder import LlamaDecoder, find_family
from lightrl.engines.local.running_batch import Row, RunningBatch
from lightrl.trajectory import Sampling
from lightrl.weights import ServerForm, SharedBucket

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture(params=["fast Qwen3", "fallback GPT2"])
def case(request: pytest.FixtureRequest, device: torch.device) -> Iterator[EngineCase]:
    make_config, fast_path = CASES[request.param]
    models = make_models(make_config())
    engine = LocalEngine(device=str(device), dtype="float32", fast_path=fast_path, max_batch=8)
    engine.start(models[0].config)
    yield EngineCase(engine, models)
    engine.close()


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
def test_contract(case: EngineCase, check: Callable[[EngineCase], None]) -> None:
    check(case)


def test_loaded_weights_are_the_trainers_bit_for_bit(case: EngineCase, device: torch.device) -> None:
    model = case.models[1].to(device)
    case.load(1)
    read = case.engine.read_weights()  # type: ignore[attr-defined]
    assert read
    assert all(torch.equal(read[name], value) for name, value in model.named_parameters() if name in read)
    model.to("cpu")


def test_a_step_never_waits_for_the_device(
    device: torch.device, no_waits: AbstractContextManager[None], only_cuda: None
) -> None:
    config = CASES["fast Qwen3"][0]()
    family = find_family(config)
    assert family is not None
    decoder = LlamaDecoder(config, family, dtype=torch.bfloat16, device=device)
    batch = RunningBatch(decoder, max_rows=4, vocab_size=config.vocab_size, device=device)
    rows = [Row((3, 4), Sampling(max_new_tokens=40 + i, stop_token_ids=(1,), seed=i)) for i in range(4)]
    with torch.inference_mode():
        batch.admit(rows, 0)  # the kernel's trial waits
        batch.step()
        with no_waits:
            batch.step()
        batch.read()


def test_another_process_reads_a_bucket(device: torch.device, not_pretended: None) -> None:
    """Through CUDA IPC on a GPU; the reader opens the memory as an SGLang server does."""
    payloads, answers = SPAWN.Queue(), SPAWN.Queue()
    reader = SPAWN.Process(target=read_shared, args=(payloads, answers), daemon=True)
    reader.start()
    sent: dict[str, Tensor] = {name: value.to(device) for name, value in parameters().items()}
    shared, received = SharedBucket(ServerForm(torch.bfloat16), device=str(device)), {}
    for bucket in buckets(sent):
        shared.fill(bucket)
        payloads.put(shared.payload())
        received |= answers.get(timeout=600)
    payloads.put(None)
    reader.join(600)
    assert received.keys() == sent.keys()
    for name, tensor in sent.items():
        assert (received[name] == tensor.bfloat16().double().cpu().numpy()).all()
