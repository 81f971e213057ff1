"""A resume from the checkpoint of another configuration: refused with what differs, and nothing is left behind."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, make_trainer, train

from lightrl import PPO, LoRA, Role, Sampling


class ByGradients(TinyGRPO):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameter_groups(), lr=0.1)


class InTwoGroups(TinyGRPO):
    def configure_optimizers(self) -> Any:
        first, *others = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW([{"params": [first]}, {"params": others}])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two iterations of TinyGRPO, with the file that the command writes beside it."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, max_steps=2).save_checkpoint(folder / "checkpoints" / "last.ckpt")
    (folder / "config.yaml").touch()
    return folder / "checkpoints" / "last.ckpt"


WIDER = replace(POLICY, config={**CONFIG, "intermediate_size": 24})
DEEPER = replace(POLICY, config={**CONFIG, "num_hidden_layers": 2})
CASES: dict[str, tuple[Any, str]] = {
    "wider": (
        lambda: TinyGRPO(WIDER),
        r"3 of a different shape \(policy\.model\.layers\.0\.mlp\.gate_proj\.weight \[16, 16\] instead of \[24, 16\]",
    ),
    "deeper": (lambda: TinyGRPO(DEEPER), r"11 only in this run \(policy\.model\.layers\.1\.self_attn\.q_proj\.weight,"),
    "with adapters": (lambda: TinyGRPO(Role(POLICY, lora=LoRA(rank=2))), r"only in the checkpoint \(policy\.model"),
    "another algorithm": (
        lambda: PPO(POLICY, reward="digit_reward.token_reward", sampling=Sampling(max_new_tokens=6)),
        r"only in this run \(critic\.",
    ),
    "another optimizer": (ByGradients, r"optimizer's state has no dampening, momentum, nesterov, which SGD has"),
    "other groups": (InTwoGroups, r"optimizer groups have \[\d+\] parameters, but this run's have \[1, \d+\]"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("name", CASES)
def test_another_configuration_is_refused_with_what_differs(name: str, checkpoint: Path, tmp_path: Path) -> None:
    make, difference = CASES[name]
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True)
    trainer = make_trainer(tmp_path, max_steps=4, callbacks=[save], enable_checkpointing=True)
    with pytest.raises(ValueError, match=difference) as refusal:
        trainer.fit(make(), datamodule=Digits(), ckpt_path=checkpoint)
    assert f"{checkpoint} does not fit this configuration" in str(refusal.value)
    assert f"Resume with that run's configuration ({checkpoint.parents[1] / 'config.yaml'})" in str(refusal.value)
    assert f"lightrl export {checkpoint} --to FOLDER" in str(refusal.value)
    assert not list(tmp_path.glob("*.ckpt"))  # half restored: `last` must not find it
    assert save.save_on_exception is False


def test_after_a_refused_stage_a_run_saves_on_exceptions_again(checkpoint: Path, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True)
    trainer = make_trainer(tmp_path, max_steps=4, callbacks=[save], enable_checkpointing=True)
    with pytest.raises(ValueError, match="does not fit"):
        trainer.validate(TinyGRPO(WIDER), datamodule=Digits(), ckpt_path=checkpoint)
    assert save.save_on_exception is False
    trainer.fit(TinyGRPO(), datamodule=Digits(), ckpt_path=checkpoint)
    assert save.save_on_exception is True


START_FAILS = {
    "at the weights": lambda: TinyGRPO(WIDER),
    "at the optimizer": ByGradients,
    "when all is restored": lambda: TinyGRPO(num_minibatches=3),
}


@pytest.mark.parametrize("place", START_FAILS)
def test_after_a_resume_that_fails_the_trainer_refuses_to_fit_again(place, checkpoint, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=2)
    with pytest.raises(ValueError, match=r"does not (fit|divide)"):
        trainer.fit(START_FAILS[place](), datamodule=Digits(), ckpt_path=checkpoint)
    for ckpt_path in (None, checkpoint):
        with pytest.raises(RuntimeError, match=f"failed while it resumed from {checkpoint}.*Create a new Trainer"):
            trainer.fit(TinyGRPO(), datamodule=Digits(), ckpt_path=ckpt_path)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_after_a_refused_stage_a_run_without_a_checkpoint_starts_afresh(stage, checkpoint, tmp_path):
    trainer = make_trainer(tmp_path, max_steps=1)
    with pytest.raises(ValueError, match="does not fit"):
        getattr(trainer, stage)(TinyGRPO(WIDER), datamodule=Digits(), ckpt_path=checkpoint)
    module = TinyGRPO()
    trainer.fit(module, datamodule=Digits())
    assert len(module.trained) == 1
