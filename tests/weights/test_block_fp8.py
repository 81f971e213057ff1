"""Block FP8: transformers' own numbers, exact values, and what of a model is quantized on its way to a server."""

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_cases
import pytest
import torch
from checkpoint_cases import checkpoint_of, tensors_in
from fake_sglang.layout import checksums
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config, PreTrainedModel
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from lightrl.weights import Bucket, Digests, HostCopy, ServerForm, ServerLayout, SharedFolder, WeightFolder, bucketed
from lightrl.weights.block_fp8 import (
    FP8,
    SCALE,
    dequantize,
    dequantized,
    is_block_fp8,
    is_linear,
    quantize,
    quantized,
    quantized_config,
)
from lightrl.weights.delta import DeltaCopy
from lightrl.weights.disk import ShareWriter, files_of, read_back

SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "vocab_size": 130}
SIZES |= {"num_experts": 2, "num_experts_per_tok": 1}


def model_of(family: str = "qwen3", **changes: Any) -> PreTrainedModel:
    return checkpoint_cases.model_of(family, **{**SIZES, **changes})


def some_weight(*shape: int) -> torch.Tensor:
    """Values of very different sizes, in and between blocks."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).mul(4).exp()


def test_the_numbers_are_those_of_transformers() -> None:
    weight = some_weight(256, 384)
    weight[:128, :128] = 0
    settings = SimpleNamespace(weight_block_size=[128, 128], scale_fmt="ue8m0")
    theirs = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"a.weight": weight})
    ours = quantized({"a.weight": weight})
    assert list(ours) == ["a.weight", "a.weight_scale_inv"] == list(theirs)
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in ours)


def test_an_error_is_at_most_half_a_step_of_float8() -> None:
    weight = some_weight(256, 384)
    values, scale = quantize(weight)
    steps = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    error = (dequantize(values, scale).float() - weight).abs()
    # 3 bits of mantissa; below float8's smallest normal number its steps are 2^-9.
    assert (error <= torch.maximum(weight.abs() * 2**-4, steps * 2**-10)).all()


@pytest.mark.parametrize("largest", [448.0, 448.1, 224.1, 224.0, 1e-3, 3e38, 1e-44])
def test_what_is_quantized_once_more_stays_as_it_is(largest: float) -> None:
    weight = some_weight(128, 128).tanh() * largest
    weight[0, 0] = largest
    once = dequantize(*quantize(weight))
    assert torch.equal(dequantize(*quantize(once)), once)


def test_a_block_may_be_cut_off_and_each_expert_is_quantized_alone() -> None:
    weight = some_weight(3, 200, 130)
    values, scale = quantize(weight)
    assert (values.shape, scale.shape) == (weight.shape, (3, 2, 2))
    for expert in range(3):
        assert torch.equal(dequantize(values, scale)[expert], dequantize(*quantize(weight[expert])))
    corner = weight[1, 128:, 128:]
    assert torch.equal(dequantize(values, scale)[1, 128:, 128:], dequantize(*quantize(corner)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_shows(value: float) -> None:
    weight = torch.ones(128, 256)
    weight[3, 200] = value
    found = dequantize(*quantize(weight))
    assert found[:, 128:].isnan().all()
    assert torch.equal(found[:, :128], torch.ones(128, 128).bfloat16())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "qwen3_moe", "mixtral"])
def test_linear_layers_are_quantized_and_nothing_else(family: str) -> None:
    model = model_of(family, tie_word_embeddings=False)
    apart = {name for name, tensor in checkpoint_of(model).items() if is_linear(name, tensor)}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name for name in apart if ".experts." not in name} == linear - {"lm_head.weight"}
    experts = [name for name in checkpoint_of(model) if ".experts." in name]
    assert set(experts) <= apart
    assert len(experts) == (6 if family in ("qwen3_moe", "mixtral") else 0)
    joined = dict(model.named_parameters())
    rounded = copy.deepcopy(model)  # the engine in this process has the experts of a block in one parameter
    with torch.no_grad():
        for name, tensor in dequantized(quantized(joined)).items():
            rounded.get_parameter(name).copy_(tensor)
    expected = dequantized(quantized(checkpoint_of(model)))
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in checkpoint_of(rounded).items())


def test_transformers_loads_what_a_server_gets(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = model_of()
    form = ServerForm.of(quantized_config(model.config), torch.bfloat16)
    buckets = map(form.quantized, bucketed(checkpoint_of(model).items(), 2**16))
    folder = WeightFolder(tmp_path, quantized_config(model.config), form=form).write(buckets, 0)
    reading = FineGrainedFP8Config(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=reading)
    expected = dequantized(quantized(checkpoint_of(model)))
    for name, tensor in loaded.named_parameters():
        assert torch.equal(tensor, expected[name].bfloat16()), name


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_digests_are_of_the_values_in_bfloat16(family: str, dtype: torch.dtype, num_ranks: int) -> None:
    sizes = {"num_key_value_heads": 4, "intermediate_size": 256, "moe_intermediate_size": 256}
    model = model_of(family, **sizes, tie_word_embeddings=num_ranks == 1)
    parameters, layout = checkpoint_of(model), ServerLayout(dtype, num_ranks)
    form = ServerForm.of(quantized_config(model.config), dtype)
    digests = Digests(model.config, form, [layout])
    for bucket in bucketed(parameters.items(), 2**16):
        digests.add(form.quantized(bucket))
    rounded = dequantized(quantized(parameters))
    held = {name: rounded[name] if is_linear(name, tensor) else tensor.to(dtype) for name, tensor in parameters.items()}
    found = digests.finish()[layout]
    if num_ranks == 1:  # for servers that hold a tied head twice
        assert found[0].pop("lm_head.weight") == found[0]["model.embed_tokens.weight"]
    assert found == checksums(held, model.config, num_ranks)


def test_a_rank_writes_its_share_in_block_fp8(tmp_path: Path) -> None:
    folder = SharedFolder(str(tmp_path), "bfloat16", [], timeout_s=5.0, is_block_fp8=True)
    writer = ShareWriter(folder, 1)
    tensors = {"a.q_proj.weight": some_weight(128, 128), "a.norm.weight": some_weight(128)}
    writer.add(Bucket(tensors))
    (file,) = files_of([writer.record()])
    written = load_file(file.path)
    assert {name: tensor.dtype for name, tensor in written.items()} == {
        "a.q_proj.weight": FP8, f"a.q_proj.weight{SCALE}": torch.float32, "a.norm.weight": torch.bfloat16,
    }  # fmt: skip
    (bucket,) = read_back([file])
    expected = dequantized(quantized(tensors))
    assert all(torch.equal(tensor, expected[name].bfloat16()) for name, tensor in dequantized(bucket.tensors).items())
    own = folder.form.quantized(Bucket({"b.q_proj.weight": tensors["a.q_proj.weight"]}))
    versions = WeightFolder(tmp_path, model_of().config, form=folder.form)
    whole = tensors_in(versions.write([replace(own, is_last=True, files=(file,))], 3))
    assert whole.keys() == {*written, "b.q_proj.weight", f"b.q_proj.weight{SCALE}"}
    for letter in "ab":  # each is quantized once
        pair = whole[f"{letter}.q_proj.weight"], whole[f"{letter}.q_proj.weight{SCALE}"]
        assert torch.equal(dequantize(*pair), expected["a.q_proj.weight"])


def test_a_copy_for_late_servers_is_not_quantized_again() -> None:
    form = ServerForm(torch.bfloat16, is_block_fp8=True)
    bucket = form.quantized(Bucket({"a.q_proj.weight": some_weight(128, 128)}, is_last=True))
    copied = HostCopy(form)
    copied.begin(0)
    copied.add(bucket)
    (kept,) = copied.buckets()
    sent = dict(form.tensors(kept))
    assert [(name, tensor.dtype) for name, tensor in sent.items()] == [(n, d) for n, d, _ in form.layout(bucket)]
    for name, tensor in sent.items():
        assert torch.equal(tensor.view(torch.uint8), bucket.tensors[name].view(torch.uint8))


def test_a_delta_of_quantized_weights_is_that_of_their_bits() -> None:
    form, weight = ServerForm(torch.bfloat16, is_block_fp8=True), some_weight(128, 256)
    copied = DeltaCopy(form)
    try:
        for version, changed in enumerate((weight, torch.where(torch.arange(256) == 7, weight * 1.5, weight))):
            bucket = form.quantized(Bucket({"a.q_proj.weight": changed}, is_last=True))
            copied.begin(version)
            sent, kept = copied.take_delta(bucket, has_base=version > 0)
            for name, tensor in bucket.tensors.items():
                assert torch.equal(kept.tensors[name].view(torch.uint8), tensor.view(torch.uint8))
        assert 0 < sum(map(len, sent)) < 0.1 * bucket.num_bytes
    finally:
        copied.close()


@pytest.mark.parametrize(
    ("family", "changes", "tp", "told"),
    [
        ("deepseek_v3", {}, 1, "works only for gemma3_text, llama, .*; the model is 'deepseek_v3'"),
        ("qwen3", {"hidden_size": 192}, 4, "needs hidden_size to be a multiple of 128, got 192"),
        ("qwen3", {"num_key_value_heads": 1}, 1, r"head_dim to be a multiple of 128, got 64\. The model is too small"),
        ("mixtral", {"num_attention_heads": 8, "head_dim": 128}, 4, "tp=4 needs .*intermediate_size .* 512, got"),
        ("qwen3_moe", {"moe_intermediate_size": 64}, 1, "moe_intermediate_size to be a multiple of 128, got 64"),
    ],
)
def test_a_model_that_servers_could_not_hold_is_refused(family: str, changes: Any, tp: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        quantized_config(AutoConfig.for_model(family, **{**SIZES, **changes}), tp)


def test_ranks_that_divide_the_experts_divide_no_expert() -> None:
    config = AutoConfig.for_model("qwen3_moe", **{**SIZES, "num_key_value_heads": 4})
    with pytest.raises(ValueError, match="tp=2 needs moe_intermediate_size to be a multiple of 256, got 128"):
        quantized_config(config, 2)
    assert is_block_fp8(quantized_config(config, 2, ep=2))


def test_the_trainers_config_stays_as_it_is() -> None:
    config = AutoConfig.for_model("qwen3", **SIZES)
    assert quantized_config(config).to_dict()["quantization_config"]["weight_block_size"] == [128, 128]
    assert not hasattr(config, "quantization_config")
