"""Runs that train adapters: what is saved, exported, synced and compared with is what the setting promises."""

import json
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
import torch.distributed as dist
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer, train, weights
from transformers import AutoModelForCausalLM

from lightrl import FSDP2Strategy, HuggingFaceExport, LocalEngine, LoRA, ModelSpec, ReferenceKL, RLCallback, Role
from lightrl.commands.export import export_checkpoint
from lightrl.models.tuning import whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel

ADAPTED = Role(POLICY, lora=LoRA(rank=2))


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


class Misnamed(LoRA):
    """Describes its adapters as if only one layer had some."""

    is_wrong: ClassVar[bool] = True

    def saved_config(self, model: Any, base: str | None) -> str:
        config = super().saved_config(model, base)
        return json.dumps(json.loads(config) | {"target_modules": ["q_proj"]}) if self.is_wrong else config


def misnamed_run(folder: Path, *callbacks: Any, **flags: Any) -> TinyGRPO:
    module = TinyGRPO(Role(POLICY, lora=Misnamed(rank=2)))
    train(folder, module, callbacks=[*callbacks, HuggingFaceExport(str(folder / "model"))], **flags)
    return module


@pytest.mark.parametrize("strategy", [None, FSDP2Strategy], ids=["whole", "sharded"])
def test_adapters_that_peft_would_misread_are_refused_before_the_first_rollout(strategy: Any, tmp_path: Path) -> None:
    flags = {} if strategy is None else {"strategy": strategy()}
    try:
        with pytest.raises(ValueError, match=r"would load the adapters that this run exports as a different model"):
            misnamed_run(tmp_path, NoRollout(), **flags)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert not (tmp_path / "model").exists()


class NoRollout(RLCallback):
    def on_rollout_start(self, *args: Any) -> None:
        raise AssertionError("a rollout started")


def test_adapters_found_wrong_at_the_end_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(RLCallback):
        def on_train_batch_end(self, *args: Any) -> None:
            monkeypatch.setattr(Misnamed, "is_wrong", True)

    monkeypatch.setattr(Misnamed, "is_wrong", False)
    with pytest.raises(ValueError, match=rf"load the adapters in {tmp_path}/model as a different model: .* differ"):
        misnamed_run(tmp_path, Breaks())
    assert (tmp_path / "model" / "adapter_model.safetensors").stat().st_size > 0


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
    train(tmp_path, first, max_steps=2).save_checkpoint(tmp_path / "run.ckpt")
    make_trainer(tmp_path, max_steps=3).fit(second, datamodule=Digits(), ckpt_path=tmp_path / "run.ckpt")
    expected, found = weights(whole), weights(second)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
