"""The compiled kernels of LocalEngine: against exact products and torch's step, whatever rows and threads there are."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_cases import SMALL
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from lightrl.engines.local.fast import kernels
from lightrl.engines.local.fast.decoder import FusedLinear, LlamaDecoder, find_family
from lightrl.engines.local.fast.kernels import Kernels, LinearOfKernel

SIZES: dict[str, Any] = {**SMALL, "hidden_size": 40, "intermediate_size": 72}


@pytest.fixture
def built() -> Kernels:
    found = kernels.kernels()
    if found is None:
        pytest.skip("there is no C++ compiler on this machine")
    return found


def unit_rounding(terms: int) -> float:
    """Of a float32 sum of so many products, relative to the sum of their absolute values; twice what can be."""
    return 2 * (terms + 2) * torch.finfo(torch.float32).eps


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 1, 1), (7, 33, 20), (12, 64, 16), (61, 100, 130)])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_product_is_right_and_each_row_has_the_bits_that_it_has_alone(
    built: Kernels, rows: int, outputs: int, inputs: int, threads: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(outputs, inputs, generator=generator), torch.randn(outputs, generator=generator)
    values, added = torch.randn(rows, inputs, generator=generator), torch.randn(rows, outputs, generator=generator)
    packed = built.pack(weight)
    linear = LinearOfKernel(packed.data_ptr(), bias.data_ptr(), inputs, outputs)
    built.threads = threads
    product = built.linear(values, linear, added)
    exact = values.double() @ weight.double().T + bias.double() + added.double()
    size = values.abs() @ weight.abs().T + bias.abs() + added.abs()
    assert ((product - exact).abs() <= unit_rounding(inputs) * size).all()
    for row in range(rows):
        alone = built.linear(values[row : row + 1], linear, added[row : row + 1])
        assert torch.equal(alone[0], product[row])


@pytest.mark.parametrize("is_shared", [False, True], ids=["alone", "shared"])
def test_a_packed_weight_is_held_once_and_gives_the_products_of_the_present_values(
    built: Kernels, is_shared: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1024, 512, generator=generator)
    copies = [weight.clone(), torch.randn(weight.shape, generator=generator)]
    bias, inputs = torch.randn(1024, generator=generator), torch.randn(5, 512, generator=generator)
    part = weight[3:, ::2]
    linear = FusedLinear(weight, bias, built, is_shared=is_shared)
    for values in copies:
        linear.unpack()
        weight.copy_(values)
        linear.pack()
        assert weight.untyped_storage().nbytes() == (values.nbytes if is_shared else 0)
        assert torch.equal(linear.current(part), values[3:, ::2])
        exact = inputs.double() @ values.double().T + bias.double()
        rounding = unit_rounding(512) * (inputs.abs() @ values.abs().T + bias.abs())
        assert ((linear(inputs) - exact).abs() <= rounding).all()
        assert ((linear(inputs, linear(inputs)) - 2 * exact).abs() <= 3 * rounding).all()


@pytest.mark.parametrize("head_size", sorted(kernels.HEAD_SIZES))
@pytest.mark.parametrize("kind", [Qwen3Config, LlamaConfig], ids=["norms", "biases"])
def test_a_step_is_as_exact_as_torchs_and_independent_of_other_rows(
    built: Kernels, kind: type[PretrainedConfig], head_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {} if kind is Qwen3Config else {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}
    decoder = make_decoder(kind(**{**SIZES, "head_dim": head_size, **settings}), torch.float32)
    exact = make_decoder(kind(**{**SIZES, "head_dim": head_size, **settings}), torch.float64)
    steps: list[object] = []
    step = Kernels.step
    monkeypatch.setattr(Kernels, "step", lambda *inputs: steps.append(inputs) or step(*inputs))
    prompts = [[1 + (7 * row + place) % 60 for place in range(1 + 3 * row % 17)] for row in range(29)]
    told = {"kernels": logits_of(decoder, prompts), "three threads": logits_of(decoder, prompts, threads=3)}
    assert len(steps) == 6  # three in each of two runs
    alone = torch.cat([logits_of(decoder, [prompt], first=row) for row, prompt in enumerate(prompts)], dim=1)
    decoder.kernels = None
    told["torch"] = logits_of(decoder, prompts)
    truth = logits_of(exact, prompts)
    error = {name: (logits - truth).abs().max() for name, logits in told.items()}
    assert error["kernels"] <= 4 * error["torch"] + 1e-7  # both round; neither order of sums is the better one
    assert torch.equal(told["kernels"], told["three threads"])
    torch.testing.assert_close(alone, told["kernels"], atol=1e-5, rtol=1e-5)  # torch computes prompts, in batches


def make_decoder(config: PretrainedConfig, dtype: torch.dtype) -> LlamaDecoder:
    decoder = LlamaDecoder(config, find_family(config), dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for name, shape in decoder.shapes.items():
        decoder.write(name, (torch.randn(shape, generator=generator, dtype=torch.float64) / 4).float())
    return decoder


def logits_of(decoder: LlamaDecoder, prompts: list[list[int]], *, threads: int = 1, first: int = 0) -> torch.Tensor:
    """Of three steps after these prompts, which are rows `first` and on of a batch: [3, n, V]."""
    if decoder.kernels is not None:
        decoder.kernels.threads = threads
    decoder.clear()
    with torch.inference_mode():
        decoder.append(prompts, range(len(prompts)))
        places = torch.tensor([len(prompt) for prompt in prompts])
        tokens = torch.arange(first, first + len(prompts)) % 60
        return torch.stack([decoder.step(tokens, places + num, int(places.max()) + num + 1) for num in range(3)])


def test_a_forked_process_which_has_lost_the_threads_computes_all_blocks_itself(built: Kernels) -> None:
    weight, inputs = torch.ones(64, 16), torch.ones(100, 16)
    packed = built.pack(weight)
    linear = LinearOfKernel(packed.data_ptr(), None, 16, 64)
    built.threads = 3
    built.linear(inputs, linear)
    child = os.fork()
    if child == 0:
        os._exit(0 if bool((built.linear(inputs, linear) == 16).all()) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_without_a_compiler_torch_decodes_and_the_log_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "no-compiler"))
    build = kernels._library.__wrapped__  # the cache has one that works
    assert build() is None
    assert "no-compiler" in caplog.text
    assert "CXX" in caplog.text
    monkeypatch.setenv("CXX", sys.executable)  # a program that refuses the flags
    assert build() is None
    monkeypatch.setattr("lightrl.engines.local.fast.decoder.kernels", lambda: None)
    decoder = make_decoder(Qwen3Config(**SIZES), torch.float32)
    assert decoder.kernels is None
    assert logits_of(decoder, [[1, 2]]).isfinite().all()
