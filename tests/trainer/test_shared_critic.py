"""A critic that is a head on the policy's body: in checkpoints, in exports, in the next run."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from images_cases import image_spec
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer, train
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lightrl import PPO, HuggingFaceExport, LoRA, ModelSpec, Role
from lightrl.commands.export import export_checkpoint
from lightrl.commands.main import main
from lightrl.models.tuning import whole_parameters
from lightrl.strategies import LogprobSettings, SingleModel


class TinyPPO(TinyGRPO, PPO):
    def __init__(self, policy: str | ModelSpec | Role = POLICY, critic: Any = "shared", **kwargs: Any) -> None:
        super().__init__(policy, critic=critic, **{"value_normalization": "running"} | kwargs)


@dataclass
class Finished:
    module: TinyPPO
    policy: Role
    checkpoint: Path
    exported: Path  # the critic, by the callback


@pytest.fixture(scope="module", params=["whole", pytest.param("lora", marks=pytest.mark.extra)])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A run of three iterations, after which head and body are no longer what they were."""
    folder = tmp_path_factory.mktemp(request.param)
    policy = Role(POLICY, lora=LoRA() if request.param == "lora" else None)
    module = TinyPPO(policy)
    trainer = train(folder, module, callbacks=[HuggingFaceExport(str(folder / "critic"), role="critic")])
    trainer.save_checkpoint(folder / "run.ckpt")
    assert module.value_head.weight.abs().max() > 1e-3
    return Finished(module, policy, folder / "run.ckpt", folder / "critic")


def values(model: Any, experience: Any, head: Any = None) -> torch.Tensor:
    (outputs,) = SingleModel(model, LogprobSettings(), value_head=head).forward([experience])
    assert outputs.values is not None
    return outputs.values


def test_loading_a_checkpoint_brings_the_head_and_the_normalizer(finished: Finished) -> None:
    loaded = TinyPPO.load_from_checkpoint(finished.checkpoint, policy=finished.policy, weights_only=True)
    assert torch.equal(loaded.value_head.weight, finished.module.value_head.weight)
    assert loaded.normalizer == finished.module.normalizer != TinyPPO(finished.policy).normalizer


def test_the_policys_export_is_a_plain_language_model_and_says_where_the_head_is(finished, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lightrl"):
        export_checkpoint(finished.checkpoint, tmp_path / "policy", merged=True, tokenizer="tiny_run.tokenizer")
    assert "To export body and head as a separate model, use role critic" in caplog.text
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", output_loading_info=True)
    assert not info["unexpected_keys"]
    expected = dict(whole_parameters(finished.module.policy))
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())


def test_the_critics_export_says_what_head_and_body_said(finished: Finished, tmp_path: Path) -> None:
    options = ["--to", str(tmp_path / "critic"), "--role", "critic", "--tokenizer", "tiny_run.tokenizer"]
    assert main(["export", str(finished.checkpoint), *options]) == 0
    module, experience = finished.module, finished.module.experiences[0]
    expected = values(module.policy, experience, module.value_head)
    assert expected.abs().max() > 1e-3
    for folder in (tmp_path / "critic", finished.exported):
        model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        torch.testing.assert_close(values(model.eval(), experience), expected, rtol=0, atol=1e-6)


def test_the_critics_export_is_the_start_of_a_critic_and_a_reward_model(finished: Finished, tmp_path: Path) -> None:
    folder = str(finished.exported)
    module = TinyPPO(POLICY, critic=folder, reward_model=folder, value_normalization=None)
    module.configure_model()
    assert torch.equal(module.critic.score.weight, finished.module.value_head.weight)  # type: ignore[union-attr]
    make_trainer(tmp_path, max_steps=1).fit(module, datamodule=Digits())
    (experience,) = module.experiences
    assert experience.values[experience.loss_mask].abs().max() > 1e-3


@pytest.mark.parametrize(("critic", "match"), [(None, "a head on the policy"), ("shared", "a separate model")])
def test_a_critic_of_the_other_form_does_not_resume(critic, match, finished, tmp_path):
    checkpoint = finished.checkpoint
    if critic == "shared":
        trainer = train(tmp_path, TinyPPO(critic=None), max_steps=1)
        checkpoint = tmp_path / "own.ckpt"
        trainer.save_checkpoint(checkpoint)
    with pytest.raises(ValueError, match=f"critic is {match}"):
        make_trainer(tmp_path, max_steps=9).fit(
            TinyPPO(finished.policy, critic=critic), Digits(), ckpt_path=checkpoint, weights_only=True
        )


def test_a_family_without_a_scalar_head_saves_the_critic_and_exports_the_policy_alone(tmp_path: Path) -> None:
    module = TinyPPO(image_spec())
    module.configure_model()
    checkpoint: dict[str, Any] = {"state_dict": module.state_dict()}
    module.on_save_checkpoint(checkpoint)
    assert "value_head.weight" in checkpoint["state_dict"]
    assert list(checkpoint["models"]) == ["policy"]
    export = HuggingFaceExport(str(tmp_path / "critic"), role="critic")
    with pytest.raises(TypeError, match="no sequence classification model of that family"):
        export.on_fit_start(make_trainer(tmp_path), module)
