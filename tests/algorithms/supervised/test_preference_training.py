"""DPO, IPO and RewardModel on pairs: worked by hand, against Hugging Face, trained, resumed and exported."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tiny import QUIET, slow_outputs, tiny_spec
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import lightrl
from lightrl.algorithms import DPO, IPO, SFT, RewardModel
from lightrl.algorithms.supervised import SupervisedModule
from lightrl.callbacks import HuggingFaceExport
from lightrl.data import PairBatch, PreferenceDataModule
from lightrl.models import ModelSpec, Role, RoleMesh
from lightrl.models.lora import LoRA
from lightrl.trajectory import Prompt


class Digits(PreferenceDataModule):
    """`3=` is answered by 3, not by 4."""

    def make_prompts(self, split: str) -> list[Prompt]:
        numbers = range(10) if split == "train" else range(4)
        return [
            Prompt(
                id=f"{split}-{n}",
                messages=[{"role": "user", "content": f"{n}="}],
                fields={"chosen": str(n), "rejected": str((n + 1) % 10)},
            )
            for n in numbers
        ]


def make_trainer(folder: Path, **settings: Any) -> lightrl.Trainer:
    defaults = {"default_root_dir": folder, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    return lightrl.Trainer(**(QUIET | defaults | settings))


def make_batch() -> PairBatch:
    """Two pairs with prompts of two tokens."""
    token_ids = torch.tensor([[4, 13, 5, 1, 0], [4, 13, 6, 7, 1], [8, 13, 9, 1, 0], [8, 13, 3, 1, 0]])
    lengths = torch.tensor([4, 5, 4, 4])
    columns = torch.arange(5)
    return PairBatch(token_ids, (columns >= 2) & (columns < lengths[:, None]), lengths)


def attached(module: SupervisedModule, folder: Path) -> Any:
    module.trainer = make_trainer(folder, max_steps=1)
    module.configure_model()
    return module


@pytest.mark.parametrize("family", ["qwen3", "gemma2 with capped logits"])
def test_dpo_equals_its_formula_on_hugging_faces_logits(tmp_path: Path, family: str) -> None:
    module = attached(DPO(tiny_spec(family), reference=tiny_spec(family, seed=1), kl_coef=0.3), tmp_path)
    batch = make_batch()
    experience = batch.experience()
    policy = slow_outputs(module.policy, experience)[0].sum(1)
    reference = slow_outputs(module.reference, experience)[0].sum(1).detach()
    moved = policy - reference
    expected = torch.stack([-torch.sigmoid(0.3 * (moved[row] - moved[row + 1])).log() for row in (0, 2)])
    expected.mean().backward()
    gradient = module.policy.get_output_embeddings().weight.grad.clone()
    module.zero_grad()
    measured = module.measure(batch)
    measured["loss"].mean().backward()
    torch.testing.assert_close(measured["loss"], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(measured["margin_nats"], (moved[::2] - moved[1::2]).detach(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(module.policy.get_output_embeddings().weight.grad, gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("kind", "loss"), [(DPO, math.log(2)), (IPO, 25.0)], ids=["DPO", "IPO"])
def test_a_policy_that_is_its_reference_has_margin_zero(tmp_path: Path, kind: type[DPO], loss: float) -> None:
    """-log sigmoid(0), and the square of IPO's target 1/(2·0.1)."""
    measured = attached(kind(tiny_spec()), tmp_path).measure(make_batch())
    assert measured["margin_nats"].tolist() == pytest.approx([0.0, 0.0], abs=1e-5)
    assert measured["loss"].tolist() == pytest.approx([loss] * 2, rel=1e-4)


def test_settings_of_an_rlmodules_roles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"SFT's policy may set only model and lora of a Role, got Role.*lr=0\.1"):
        SFT(Role(tiny_spec(), lr=0.1, mesh=RoleMesh(0)))
    with pytest.raises(ValueError, match=r"DPO's reference may set only model and lora of a Role, got .*offload=True"):
        DPO(tiny_spec(), reference=Role(tiny_spec(), offload=True))


@pytest.mark.parametrize("make", [SFT, RewardModel, DPO], ids=lambda make: make.__name__)
def test_batches_of_another_data_module_are_refused_and_the_right_one_is_named(make: Any, tmp_path: Path) -> None:
    module = attached(make(tiny_spec()), tmp_path)
    batch, right = (
        (make_batch(), "SFTDataModule") if make is SFT else ([Prompt("a", token_ids=[3])], "PreferenceDataModule")
    )
    with pytest.raises(TypeError, match=rf"{make.__name__} needs batches of type \w+Batch, got \w+\. Use {right}"):
        module.training_step(batch, 0)


def test_with_adapters_the_policy_without_them_is_the_reference(tmp_path: Path) -> None:
    module = DPO(Role(tiny_spec(), lora=LoRA(rank=2)), lr=1e-2)
    trainer = make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, Digits(None, batch_size=5))
    assert not hasattr(module, "reference")
    plain = DPO(Role(tiny_spec(), lora=LoRA(rank=2)), reference=tiny_spec(), lr=1e-2)
    other = make_trainer(tmp_path, max_epochs=2)
    other.fit(plain, Digits(None, batch_size=5))
    actual, expected = (float(one.callback_metrics["dpo/margin_nats"]) for one in (trainer, other))
    assert actual != 0
    assert actual == pytest.approx(expected, rel=1e-5)


def reward_of(model: Any, token_ids: torch.Tensor) -> float:
    """Hugging Face's own forward, one trajectory at a time."""
    return float(model(input_ids=token_ids[None]).logits[0, 0].detach())


def test_the_reward_model_equals_hugging_faces_and_the_pair_loss_by_hand(tmp_path: Path) -> None:
    module, batch = attached(RewardModel(tiny_spec()), tmp_path), make_batch()
    torch.nn.init.normal_(module.reward_model.score.weight, generator=torch.Generator().manual_seed(3))
    rewards = [
        reward_of(module.reward_model, ids[:length])
        for ids, length in zip(batch.token_ids, batch.lengths.tolist(), strict=True)
    ]
    measured = module.measure(batch)
    margins = [rewards[0] - rewards[1], rewards[2] - rewards[3]]
    assert min(map(abs, margins)) > 0.1
    assert measured["margin"].tolist() == pytest.approx(margins, rel=1e-4, abs=1e-5)
    assert measured["loss"].tolist() == pytest.approx([math.log(1 + math.exp(-m)) for m in margins], rel=1e-4)
    assert measured["accuracy_fraction"].tolist() == [float(m > 0) for m in margins]


@pytest.mark.parametrize("kind", [DPO, IPO, RewardModel], ids=lambda kind: kind.__name__)
def test_training_learns_which_answer_is_preferred_and_logs_it(tmp_path: Path, kind: type[SupervisedModule]) -> None:
    module = kind(tiny_spec(), lr=1e-2, lr_decay="constant")
    data = Digits(None, batch_size=10)
    (before,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    trainer = make_trainer(tmp_path, max_steps=40, logger=CSVLogger(tmp_path), limit_val_batches=0)
    trainer.fit(module, data)
    (after,) = make_trainer(tmp_path).validate(module, data, verbose=False)
    assert after["val/accuracy_fraction"] == 1.0
    assert after["val/loss"] < 0.5 * before["val/loss"]
    header = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()[0]
    assert {f"{kind.log_prefix}/{name}" for name in ("loss", "accuracy_fraction")} <= set(header.split(","))


@pytest.mark.parametrize("kind", [DPO, RewardModel], ids=lambda kind: kind.__name__)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, kind: type[SupervisedModule]) -> None:
    def run(steps: int, ckpt_path: Path | None = None) -> SupervisedModule:
        module = kind(tiny_spec(), lr=1e-2, lr_decay="constant")
        trainer = make_trainer(tmp_path, max_steps=steps, limit_val_batches=0)
        trainer.fit(module, Digits(None, batch_size=4), ckpt_path=ckpt_path, weights_only=True)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return module

    plain = run(5)
    run(2)
    resumed = run(5, tmp_path / "2.ckpt")
    trained = getattr(plain, kind.trained_role).state_dict()
    actual = getattr(resumed, kind.trained_role).state_dict()
    assert all(torch.equal(value, actual[name]) for name, value in trained.items())


def test_exports_load_as_what_they_are_and_begin_the_next_stage(tmp_path: Path) -> None:
    def train(module: SupervisedModule, name: str) -> None:
        export = HuggingFaceExport(str(tmp_path / name))
        make_trainer(tmp_path, max_steps=2, limit_val_batches=0, callbacks=[export]).fit(
            module, Digits(None, batch_size=5)
        )

    policy, trained = DPO(tiny_spec()), RewardModel(tiny_spec())
    train(policy, "dpo")
    train(trained, "reward_model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "dpo")
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in policy.policy.state_dict().items())
    scorer = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward_model").eval()
    token_ids = make_batch().token_ids[1]
    assert reward_of(scorer, token_ids) == pytest.approx(reward_of(trained.reward_model.eval(), token_ids), rel=1e-5)
    again = attached(RewardModel(ModelSpec(path=str(tmp_path / "reward_model"))), tmp_path)
    assert torch.equal(again.reward_model.score.weight, trained.reward_model.score.weight)
    from_language_model = attached(RewardModel(ModelSpec(path=str(tmp_path / "dpo"))), tmp_path)
    torch.testing.assert_close(
        from_language_model.reward_model.model.embed_tokens.weight, loaded.model.embed_tokens.weight
    )


@pytest.mark.parametrize("name", sorted(SupervisedModule.fixed_settings))
def test_a_setting_that_the_optimizer_has_read_is_fixed_until_the_runs_end(tmp_path: Path, name: str) -> None:
    module = RewardModel(tiny_spec())
    module.on_train_start = lambda: setattr(module, name, getattr(module, name))  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=rf"RewardModel\.{name} cannot be set during a run"):
        make_trainer(tmp_path, max_steps=1).fit(module, Digits(None, batch_size=5))
    module.lr = 0.5


def test_a_coefficient_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_coef must be above 0 .* got 0.0"):
        DPO(tiny_spec(), kl_coef=0.0)
