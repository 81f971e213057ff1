"""The same numbers on the device as on the CPU: attention, logprobs and gradients, packed and padded."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager

import pytest
import torch
from tiny import random_experience, with_supports
from tiny import tiny_model as tinier_model
from torch import Tensor

from lightrl.experience import Experience
from lightrl.functional import hidden_logprobs
from lightrl.models import Outputs
from lightrl.strategies import LogprobSettings, SingleModel
from lightrl.strategies.layouts.packed_attention import KERNELS, PackedRows, kernel_for
from lightrl.weights.block_fp8 import quantize

tiny_model = functools.partial(tinier_model, head_dim=16)  # the smallest that both kernels for GPUs take
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo reads it

FAMILIES = ["llama", "qwen3", "mistral with a window", "gemma3 hybrid"]
LENGTHS = [300, 1, 129, 40, 700, 64]
# Per logprob: sums of some hundred roundings, of float32 or of bfloat16.
BOUND = {torch.float32: 2e-4, torch.bfloat16: 0.15}


def numbers(
    device: torch.device, family: str, dtype: torch.dtype, form: str | None, experience: Experience
) -> tuple[Tensor, Tensor]:
    """Logprobs [B, T], and the gradient of all parameters, on the CPU in float32."""
    model = tiny_model(family, dtype=dtype).to(device)
    model.load_state_dict(tiny_model(family).state_dict())  # torch 2.11 samples other weights in bfloat16
    compiles = device.type == "cuda" and family == "qwen3" and form == "packed"  # the others would only take longer
    single = SingleModel(model, LogprobSettings(temperature=0.9), form=form, compile_layers=compiles)  # type: ignore[arg-type]
    logprobs: list[Tensor] = []

    def loss(part: Experience, outputs: Outputs) -> Tensor:
        logprobs.append(outputs.logprobs.detach().float().cpu())
        return (outputs.logprobs * part.rewards[:, None] + 0.1 * outputs.entropy).sum()

    single.forward_backward([experience.to(device)], loss, Tensor.backward)
    gradients = [item.grad.flatten() for item in model.parameters() if item.grad is not None]
    return logprobs[0], torch.cat(gradients).float().cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_are_those_of_the_cpu(device: torch.device, family: str, dtype: torch.dtype) -> None:
    experience = random_experience(num_groups=6)
    expected = numbers(torch.device("cpu"), family, torch.float32, "rectangles", experience)
    for form in (None, "packed", "rectangles"):
        logprobs, gradient = numbers(device, family, dtype, form, experience)
        assert (logprobs - expected[0]).abs().mean() < BOUND[dtype]
        assert (gradient - expected[1]).norm() < 2 * BOUND[dtype] * expected[1].norm()


def test_block_fp8_has_the_bits_of_the_cpu(device: torch.device) -> None:
    weight = torch.randn(200, 384, generator=torch.Generator().manual_seed(0)).mul(3).exp()
    for found, expected in zip(quantize(weight.to(device)), quantize(weight), strict=True):
        assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("is_chain", [False, True])
def test_a_kernel_gives_what_sdpa_gives(
    device: torch.device, kernel: str, window: int | None, is_chain: bool, only_cuda: None
) -> None:
    if kernel == "flex" and torch._dynamo.config.disable:
        pytest.skip("needs torch.compile")
    dtype = torch.bfloat16 if kernel == "flash" else torch.float32
    generator = torch.Generator().manual_seed(0)
    rows = PackedRows(LENGTHS, device, parents=[-1, *range(len(LENGTHS) - 1)] if is_chain else None)
    num_keys = int(rows.key_starts[-1])
    inputs = [
        torch.randn(1, heads, num_tokens, 64, generator=generator).to(device, dtype).requires_grad_()
        for heads, num_tokens in ((8, sum(LENGTHS)), (2, num_keys), (2, num_keys))
    ]
    results = []
    for function in (KERNELS[kernel], KERNELS["sdpa"]):
        output = function(*inputs, rows, None, window)
        results.append([output, *torch.autograd.grad(output.float().square().sum(), inputs)])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).abs().max() <= (2e-2 if kernel == "flash" else 1e-4) * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_in_one_pass_gives_the_numbers_of_the_cpu(
    device: torch.device, dtype: torch.dtype, only_cuda: None
) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(shape, generator=generator) for shape in ((700, 64), (50_000, 64)))
    weight /= 4  # logits up to 10, as models have: bfloat16 rounds them by up to 2^-5
    ids = torch.randint(0, 50_000, (700,), generator=generator)
    weights = torch.randn(700, generator=generator)
    results = []
    for place, kind in ((torch.device("cpu"), torch.float32), (device, dtype)):
        inputs = [value.to(place, dtype).to(kind).requires_grad_() for value in (hidden, weight)]
        logprobs, entropy = hidden_logprobs(*inputs, None, ids.to(place), 0.9, chunk_tokens=300)
        loss = (logprobs * weights.to(place)).sum() + 0.1 * entropy.sum()
        values = [logprobs, entropy, *torch.autograd.grad(loss, inputs)]
        results.append([value.detach().float().cpu() for value in values])
    for actual, expected in zip(results[1], results[0], strict=True):
        assert (actual - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_flash_attention_is_what_runs_in_bfloat16(device: torch.device, shares_prefixes: bool, only_cuda: None) -> None:
    kernel_for.cache_clear()
    assert kernel_for(device, torch.bfloat16, 128, 128, shares_prefixes) == "flash"


def test_the_memory_of_a_packed_row_does_not_grow_with_its_square(
    device: torch.device, only_cuda: None, not_pretended: None
) -> None:
    peaks = []
    for num_groups in (64, 256):
        experience = random_experience(num_groups=num_groups, group_size=8, completion_tokens=(8, 8))
        torch.cuda.reset_peak_memory_stats()
        numbers(device, "qwen3", torch.bfloat16, "packed", experience)
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[1] < 6 * peaks[0]  # 4 times the tokens; 16 times as many pairs


@pytest.mark.parametrize("is_truncated", [False, True])
def test_a_microbatch_never_waits_for_the_device(
    device: torch.device, is_truncated: bool, no_waits: AbstractContextManager[None], only_cuda: None
) -> None:
    model = tiny_model(dtype=torch.bfloat16).to(device)
    single = SingleModel(model, LogprobSettings())
    experience = random_experience()
    part = (with_supports(experience)[0] if is_truncated else experience).to(device)

    def loss(part: Experience, outputs: Outputs) -> Tensor:
        return (outputs.logprobs * part.rewards[:, None]).sum()

    single.forward_backward([part], loss, Tensor.backward)  # the kernel's trial waits
    with no_waits:
        single.forward_backward([part], loss, Tensor.backward)
