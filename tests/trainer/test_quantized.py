"""A base in 4 bits: trainer, engine, checkpoints and exports have one model, the dequantized base with the adapters."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import random_experience, tiny_model
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer, train, weights
from transformers import AutoModelForCausalLM

from lightrl import FSDP2Strategy, HuggingFaceExport, LocalEngine, LoRA, ModelSpec, Parallel3DStrategy, Role
from lightrl.algorithms import ReferenceKL
from lightrl.commands.export import export_checkpoint, write_card
from lightrl.models.tuning import held_tensors, whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel, check_strategy

get_4bit_type = pytest.importorskip("bitsandbytes.functional").get_4bit_type


def quantized(folder: Path, **lora: Any) -> Role:
    return Role(ModelSpec(str(folder), tokenizer="tiny_run.tokenizer", quantization="nf4"), lora=LoRA(rank=2, **lora))


def load(family: str, folder: Path) -> Any:
    tiny_model(family).save_pretrained(folder)
    return quantized(folder).load_model()


def by_hand(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 16 levels in each block of 64 values, times the block's largest magnitude."""
    blocks, levels = weight.reshape(-1, 64), get_4bit_type("nf4", device="cpu")
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)
    return (levels[nearest] * scale).view_as(weight)


def logprobs(model: Any, experience: Any) -> Any:
    return next(iter(SingleModel(model, LogprobSettings()).forward([experience]))).logprobs


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_linear_layers_are_quantized_and_all_else_is_as_in_the_folder(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path)
    found, plain = dict(whole_parameters(model, "base")), dict(tiny_model(family).named_parameters())
    expected = {name: by_hand(weight) if name.endswith("proj.weight") else weight for name, weight in plain.items()}
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert sum(value.dtype == torch.uint8 for value in held_tensors(model).values()) == 14
    assert all(torch.equal(value, found[name].bfloat16()) for name, value in whole_parameters(model.bfloat16(), "base"))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16-mixed"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2"])
def test_logprobs_and_gradients_are_those_of_a_float_model(family: str, autocast: bool, tmp_path: Path) -> None:
    model, plain = load(family, tmp_path), tiny_model(family)
    plain.load_state_dict(dict(whole_parameters(model, "base")))
    LoRA(rank=2).add_to(plain)
    experience, results = random_experience(is_scored=False), []
    for one in (model, plain):
        for name, parameter in one.named_parameters():
            if ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            first = logprobs(one, experience)
            again = SingleModel(one, LogprobSettings()).measure(experience).logprobs
        torch.testing.assert_close(again.detach(), first)  # the forward without gradient has changed nothing
        (again**2).sum().backward()
        results.append((first, {name: value.grad for name, value in one.named_parameters() if value.requires_grad}))
    (found, gradients), (expected, reference) = results
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == reference.keys()
    for name, gradient in reference.items():
        assert 0 < (gradient.norm()) >= 1e5 * (gradients[name] - gradient).norm(), name


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyGRPO, Path]:
    folder = tmp_path_factory.mktemp("run")
    module, engine = TinyGRPO(quantized(base), reference=ReferenceKL(0.1), num_minibatches=2), LocalEngine()
    module.synced = {}  # type: ignore[assignment]
    module.on_weights_synced = lambda version: module.synced.update(engine.read_weights())  # type: ignore
    exports = [HuggingFaceExport(str(folder / name), merged=name == "merged") for name in ("merged", "adapters")]
    train(folder, module, engine=engine, callbacks=exports).save_checkpoint(folder / "run.ckpt")
    return module, folder


def test_engine_and_exports_have_the_trainers_model(finished: Any, base: Path, tmp_path: Path) -> None:
    module, folder = finished
    merged, experience = dict(whole_parameters(module.policy)), module.experiences[-1]
    assert all(torch.equal(module.synced[name], merged[name]) for name in merged)
    plain = AutoModelForCausalLM.from_pretrained(folder / "merged")
    torch.testing.assert_close(logprobs(module.policy, experience), logprobs(plain, experience), rtol=1e-5, atol=1e-5)
    plain.load_state_dict(dict(whole_parameters(module.policy, "base")), strict=False)
    torch.testing.assert_close(experience.reference_logprobs, logprobs(plain, experience), rtol=1e-5, atol=1e-5)
    assert float(module.trainer.callback_metrics["sync/max_mismatch_abs_dlogp_nats"]) < 1e-5
    export_checkpoint(folder / "run.ckpt", tmp_path / "merged", tokenizer="tiny_run.tokenizer", merged=True)
    export_checkpoint(folder / "run.ckpt", tmp_path / "adapters", tokenizer="tiny_run.tokenizer")
    write_card(tmp_path / "adapters", repo="me/a", checkpoint=folder / "run.ckpt", role="policy", base=None)
    for place in (folder / "adapters" / "README.txt", tmp_path / "adapters" / "README.md"):
        assert "trained on a base in 4 bits (NF4)" in place.read_text()
    for place in (folder / "merged", tmp_path / "merged"):
        assert not (place / "README.txt").exists()
        model = AutoModelForCausalLM.from_pretrained(place)
        assert not hasattr(model.config, "quantization_config")
        assert all(torch.equal(value, merged[name]) for name, value in model.named_parameters())
    again = quantized(base, adapter=str(folder / "adapters")).load_model()
    assert all(torch.equal(value, merged[name]) for name, value in whole_parameters(again))


def test_a_resumed_run_repeats_the_whole_one(base: Path, tmp_path: Path, finished: Any) -> None:
    first, second = (TinyGRPO(quantized(base), reference=ReferenceKL(0.1), num_minibatches=2) for _ in range(2))
    train(tmp_path, first, max_steps=2).save_checkpoint(tmp_path / "run.ckpt")
    assert all(map(LoRA().adds, torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]))
    make_trainer(tmp_path, max_steps=3).fit(second, datamodule=Digits(), ckpt_path=tmp_path / "run.ckpt")
    torch.testing.assert_close(weights(second), weights(finished[0]), rtol=0, atol=0)
    other = TinyGRPO(replace(quantized(base), model=replace(quantized(base).spec, quantization=None)))
    with pytest.raises(ValueError, match="The policy was trained with quantization='nf4', got None"):
        make_trainer(tmp_path, max_steps=3).fit(other, datamodule=Digits(), ckpt_path=tmp_path / "run.ckpt")


def test_what_cannot_be_exact_is_refused(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    role, config = quantized(base), (base / "config.json").read_text()
    with pytest.raises(ValueError, match="quantization='nf4' needs lora"):
        TinyGRPO(role.spec)
    with pytest.raises(ValueError, match="quantization='nf4' needs a checkpoint"):
        replace(POLICY, quantization="nf4")
    for strategy in Parallel3DStrategy(tp=2), FSDP2Strategy(ep=2), FSDP2Strategy(offload_to_cpu=["parameters"]):
        strategy.parallel_devices, strategy.num_nodes = [torch.device("cpu")] * 2, 1
        with pytest.raises(ValueError, match=r"(cannot split|does not support) .*quantization='nf4'"):
            check_strategy(strategy, TinyGRPO(role))
    with pytest.raises(ValueError, match=r"unquantized base, .* Set engine.adapters to merged"):
        role.tuning.served_form(role.load_model(), 1)
    tensors = load_file(base / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for content, message in {
        config: r"cannot be loaded: weight 'model.layers.0.mlp.up_proj.weight' has NaN",
        '{"quantization_config": {"quant_method": "fp8"},' + config[1:]: r"already quantized, so .* its unquantized",
        '{"model_type": "mamba2"}': r"text models with attention only, got .* of type 'mamba2'",
    }.items():
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            quantized(tmp_path).load_model()
    with pytest.raises(ValueError, match="does not support Conv1D, the type of"):
        load("gpt2", tmp_path)
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ImportError, match="quantization='nf4' needs bitsandbytes: pip install bitsandbytes"):
        quantized(base).load_model()
