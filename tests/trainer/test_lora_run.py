"""Runs that train adapters: what is saved, exported, synced and compared with is what the setting promises."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer, train, weights
from transformers import AutoModelForCausalLM

from lightrl import HuggingFaceExport, LocalEngine, LoRA, ModelSpec, ReferenceKL, Role
from lightrl.commands.export import export_checkpoint
from lightrl.models.tuning import whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel

ADAPTED = Role(POLICY, lora=LoRA(rank=2))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that the adapters belong to."""
    folder = tmp_path_factory.mktemp("base")
    POLICY.load_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def finished(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyGRPO, Path, LocalEngine]:
    """A run's module, its checkpoint and its engine."""
    folder = tmp_path_factory.mktemp("run")
    spec = Role(ModelSpec(path=str(base), tokenizer="tiny_run.tokenizer"), lora=LoRA(rank=2))
    module, engine = TinyGRPO(spec, reference=ReferenceKL(0.1)), LocalEngine()
    module.synced = {}  # type: ignore[assignment]
    module.on_weights_synced = lambda version: module.synced.update(engine.read_weights())  # type: ignore
    trainer = train(folder, module, engine=engine, callbacks=[HuggingFaceExport(str(folder / "model"))])
    trainer.save_checkpoint(folder / "run.ckpt")
    return module, folder, engine


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([[2, 3, 4]])).logits
    return found


def test_the_base_does_not_move_and_the_policy_does(finished: Any) -> None:
    policy = finished[0].policy
    plain = dict(POLICY.load_model().named_parameters())
    parameters = dict(policy.named_parameters())
    kept = [name for name in parameters if not LoRA().adds(name)]
    assert all(torch.equal(parameters[name], plain[name.replace(".base_layer.", ".")]) for name in kept)
    assert any(not torch.equal(tensor, plain[name]) for name, tensor in whole_parameters(policy))


def test_the_engine_has_the_merged_weights(finished: Any) -> None:
    merged = dict(whole_parameters(finished[0].policy))
    assert merged.keys() <= finished[0].synced.keys()
    assert all(torch.equal(finished[0].synced[name], merged[name]) for name in merged)


def test_the_reference_is_the_policy_without_adapters(finished: Any) -> None:
    module = finished[0]
    assert not hasattr(module, "reference")
    experience = module.experiences[-1]
    plain = SingleModel(POLICY.load_model(), LogprobSettings())
    expected = next(iter(plain.forward([experience]))).logprobs
    torch.testing.assert_close(experience.reference_logprobs, expected, rtol=1e-5, atol=1e-5)
    assert (experience.reference_logprobs - experience.behavior_logprobs).abs().max() > 1e-3


def test_a_checkpoint_holds_adapters_only(finished: Any) -> None:
    state = torch.load(finished[1] / "run.ckpt", weights_only=True)["state_dict"]
    assert state
    assert all(LoRA().adds(name) for name in state)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
def test_an_export_loads_in_peft(finished: Any, base: Path, tmp_path: Path) -> None:
    module, folder, _ = finished
    export_checkpoint(folder / "run.ckpt", tmp_path / "model", tokenizer="tiny_run.tokenizer")
    for adapter in (folder / "model", tmp_path / "model"):
        loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
        assert torch.equal(logits(loaded), logits(module.policy))


def test_a_resumed_run_repeats_the_whole_one(tmp_path: Path) -> None:
    whole, first, second = (TinyGRPO(ADAPTED, num_minibatches=2) for _ in range(3))
    make_trainer(tmp_path, max_steps=3).fit(whole, datamodule=Digits())
    trainer = train(tmp_path, first, max_steps=2)
    trainer.save_checkpoint(tmp_path / "run.ckpt")
    make_trainer(tmp_path, max_steps=3).fit(second, datamodule=Digits(), ckpt_path=tmp_path / "run.ckpt")
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
