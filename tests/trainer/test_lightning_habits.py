"""What a Lightning user does by habit works with an RLModule: flags, callbacks, loggers, stages, loaders."""

import inspect
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch
import pytest
import torch
from habits import MARKS, ROOT, all_habits, habit, refused, tables
from lightning.fabric.plugins.environments import slurm
from lightning.pytorch.demos.boring_classes import BoringModel
from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, Logged, TinyGRPO, are_equal, make_trainer, train, weights
from torch.utils.data import DataLoader, IterableDataset

import lightrl
from lightrl import Prompt, Sampling
from lightrl.data import DataSource
from lightrl.module import NEEDS_OUR_TRAINER
from lightrl.trainer import ignore_srun_advice
from lightrl.trajectory import Group


@habit(
    "trainer.validate(module), trainer.test(module)",
    "log reward and pass@k for the prompts, and accuracy if the reward reports it",
)
@habit("trainer.predict(module)", "returns groups of trajectories with their rewards")
def test_validate_test_and_predict_need_no_training(tmp_path: Path) -> None:
    module = TinyGRPO(validation_group_size=2, validation_sampling=Sampling(max_new_tokens=3))
    trainer = make_trainer(tmp_path, limit_val_batches=1.0)
    (validated,) = trainer.validate(module, datamodule=Digits(), verbose=False)
    (tested,) = trainer.test(module, datamodule=Digits(), verbose=False)
    assert {"val/reward", "val/pass_at_2_fraction"} <= validated.keys()
    assert tested["test/prompts"] == 4
    predicted = trainer.predict(module, datamodule=Digits())
    groups: list[Group] = [group for batch in predicted for group in batch]  # type: ignore[union-attr]
    assert [len(group.trajectories) for group in groups] == [2] * 4
    assert all(trajectory.reward is not None for group in groups for trajectory in group.trajectories)


@habit('trainer.validate(module, ckpt_path="a.ckpt")')
def test_a_checkpoint_is_measured_as_the_run_that_saved_it(tmp_path: Path) -> None:
    trainer = train(tmp_path, TinyGRPO(lr=0.1), limit_val_batches=1.0, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    reward = float(trainer.callback_metrics["val/reward"])
    length = float(trainer.callback_metrics["val/length_tokens"])
    other = make_trainer(tmp_path, limit_val_batches=1.0)
    (fresh,) = other.validate(TinyGRPO(), datamodule=Digits(), verbose=False)
    (loaded,) = other.validate(TinyGRPO(), datamodule=Digits(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    (tested,) = other.test(TinyGRPO(), datamodule=Digits(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert (loaded["val/reward"], loaded["val/length_tokens"]) == pytest.approx((reward, length))
    assert tested["test/reward"] == pytest.approx(reward)
    assert (fresh["val/reward"], fresh["val/length_tokens"]) != pytest.approx((reward, length))


@habit("trainer.fit(module); trainer.fit(module)")
@habit("trainer.fit(module); trainer.test(module)")
@pytest.mark.parametrize("engine", [None, lightrl.FakeEngine()], ids=["default", "own"])
def test_one_trainer_does_one_stage_after_the_other(engine: Any, tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, engine=engine, limit_val_batches=1.0)
    trainer.fit(module, datamodule=Digits())
    assert trainer.validate(module, datamodule=Digits(), verbose=False)[0]["val/prompts"] == 4
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, datamodule=Digits())
    assert module.trained == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert trainer.test(module, datamodule=Digits(), verbose=False)[0]["test/prompts"] == 4


@habit("lightrl.Trainer().fit(any LightningModule)")
def test_a_plain_module_trains_as_with_lightnings_trainer(tmp_path: Path) -> None:
    final = []
    for kind in (L.Trainer, lightrl.Trainer):
        torch.manual_seed(0)
        module = BoringModel()
        trainer = kind(
            accelerator="cpu", max_epochs=1, limit_train_batches=5, limit_val_batches=1, accumulate_grad_batches=2,
            log_every_n_steps=1, gradient_clip_val=0.5, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module)
        final.append((trainer.global_step, module.state_dict()))
    assert final[0][0] == final[1][0] == 3
    assert are_equal(final[0][1], final[1][1])


@pytest.mark.parametrize("job", [None, "7"], ids=["outside a Slurm job", "in a Slurm job"])
def test_srun_on_the_path_is_mentioned_in_a_slurm_job_only(job, monkeypatch):
    advice = "The `srun` command is available"
    assert advice in inspect.getsource(slurm)  # Lightning's own text
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ignore_srun_advice()
        warnings.warn(f"{advice} on your system but is not used.", UserWarning, stacklevel=1)
    assert bool(warned) is (job is not None)


QUESTIONS = ["0 1", "1 2", "2 3", "3 4", "4 5"]


@habit(
    "trainer.fit(module, DataLoader(...), DataLoader(...))",
    "items are strings, or dicts with `prompt`, `messages` or `token_ids`",
)
@pytest.mark.parametrize(
    "make_item",
    [
        lambda index: QUESTIONS[index],
        lambda index: {"prompt": QUESTIONS[index], "answer": str(index)},
        lambda index: {"token_ids": torch.tensor([2 + index, 3 + index]), "id": f"q{index}"},
    ],
    ids=["strings", "dicts with text", "dicts with token ids"],
)
def test_a_users_own_loaders_train_and_validate(make_item: Callable[[int], Any], tmp_path: Path) -> None:
    items = [make_item(index) for index in range(4)]
    module = TinyGRPO()
    trainer = make_trainer(tmp_path, max_epochs=2, limit_val_batches=1.0)
    trainer.fit(module, DataLoader(items, batch_size=2), DataLoader(items, batch_size=3))
    assert trainer.global_step == 4
    assert module.experiences[0].token_ids[::GROUP_SIZE, :2].tolist() == [[2, 3], [3, 4]]
    assert trainer.callback_metrics["val/prompts"] == 4


@habit("def train_dataloader(self), def val_dataloader(self)")
@habit("def validation_step(self, batch, batch_idx)", "`batch` has groups of trajectories with their rewards")
def test_a_users_module_may_give_the_loaders_and_log_in_its_own_validation(tmp_path: Path) -> None:
    class Own(TinyGRPO):
        def train_dataloader(self) -> Any:
            return DataLoader(QUESTIONS[:4], batch_size=2, shuffle=True)

        def val_dataloader(self) -> Any:
            return DataLoader(QUESTIONS[:4], batch_size=2)

        def validation_step(self, batch: list[Group], batch_idx: int) -> None:
            rewards = [item.reward for group in batch for item in group.trajectories]
            self.log("val/highest", max(rewards))

    trainer = make_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0)
    trainer.fit(Own())
    assert 0 <= trainer.callback_metrics["val/highest"] <= 1


@habit("val_dataloader that returns several", "logs one value for each, `val/reward/dataloader_idx_0`, as in Lightning")
def test_several_validation_loaders_have_a_number_each(tmp_path: Path) -> None:
    rewards = iter([1.0, 0.0, 0.5, 0.25])

    class Own(TinyGRPO):
        def reward(self, trajectory: Any) -> float:
            return next(rewards)

    loaders = [DataLoader(QUESTIONS[:2], batch_size=1), DataLoader(QUESTIONS[2:4], batch_size=2)]
    trainer, module = make_trainer(tmp_path, limit_val_batches=1.0), Own()
    first, second = trainer.validate(module, loaders)
    assert first["val/reward/dataloader_idx_0"] == 0.5
    assert second["val/reward/dataloader_idx_1"] == 0.375


@habit("validation=[DataSource(..., label=NAME), ...]", "logs `val/reward` for all, and `val/reward/NAME` for each")
def test_several_labeled_validation_sources_have_a_number_each(tmp_path: Path) -> None:
    class Own(TinyGRPO):
        def reward(self, trajectory: Any) -> float:
            return float(trajectory.prompt.fields["worth"])

    files = {name: tmp_path / f"{name}.jsonl" for name in ("easy", "hard")}
    files["easy"].write_text('{"question": "0", "worth": 1}\n' * 3)
    files["hard"].write_text('{"question": "1", "worth": 0}\n')
    sources = [DataSource(str(path), label=name) for name, path in files.items()]
    data = lightrl.PromptDataModule(None, sources, batch_size=1, answer_column=None, validation_batch_size=2)
    found, = make_trainer(tmp_path, limit_val_batches=1.0).validate(Own(), data)  # fmt: skip
    assert [found[f"val/{name}"] for name in ("reward", "reward/easy", "reward/hard")] == [0.75, 1.0, 0.0]
    assert [found[f"val/{name}"] for name in ("prompts", "prompts/easy", "prompts/hard")] == [4, 3, 1]


@habit("IterableDataset", "needs `max_steps`")
def test_an_iterable_dataset_trains(tmp_path: Path) -> None:
    class Endless(IterableDataset[str]):
        def __iter__(self) -> Any:
            while True:
                yield "0 1"

    module = TinyGRPO()
    make_trainer(tmp_path, max_steps=2).fit(module, DataLoader(Endless(), batch_size=2))
    assert module.trained == [[0, 1], [2, 3]]


def test_validation_draws_the_same_each_time_without_ids(tmp_path: Path) -> None:
    drawn: list[list[list[int]]] = []

    class Own(TinyGRPO):
        def validation_step(self, batch: list[Group], batch_idx: int) -> None:
            drawn.append([item.completion_ids for group in batch for item in group.trajectories])

    module = Own(validation_sampling=Sampling(max_new_tokens=6), lr=0.0)
    loader = DataLoader(QUESTIONS[:4], batch_size=4)
    make_trainer(tmp_path, max_epochs=2, limit_val_batches=1.0).fit(module, DataLoader(QUESTIONS, batch_size=2), loader)
    assert drawn[0] == drawn[1]


@habit("lightrl.SFT, DPO, RewardModel")
def test_sft_trains_through_the_same_trainer(tmp_path: Path) -> None:
    rows = [{"question": QUESTIONS[index], "answer": str(index)} for index in range(4)]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(f'{{"question": "{row["question"]}", "answer": "{row["answer"]}"}}' for row in rows))
    module = lightrl.SFT(TinyGRPO().policy_spec, lr=0.05, lr_decay="constant")
    logged = Logged("sft/loss_nats")
    train(tmp_path, module, lightrl.SFTDataModule(str(file), batch_size=4), max_steps=10, callbacks=[logged])
    assert logged.values[-1] < logged.values[0] < 2 * math.log(8)


@habit("DataLoader of lightrl.Prompt", "needs `collate_fn=list`")
def test_prompts_that_are_prompts_need_no_data_module(tmp_path: Path) -> None:
    prompts = [Prompt(f"p{index}", token_ids=[2 + index]) for index in range(4)]
    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0, precision="bf16-true")
    loader = DataLoader(prompts, batch_size=BATCH_SIZE, collate_fn=list)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["val/prompts"] == 4


class TwoOptimizers(TinyGRPO):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.policy.parameters(), lr=lr) for lr in (0.1, 0.2)]


class Manual(TinyGRPO):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class OwnStep(TinyGRPO):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.log("never", 1.0)


REFUSED = refused("test_lightning_habits", [
    ("def configure_optimizers(self): return [one, another]", lambda: (lightrl.Trainer, TwoOptimizers()),
     "TwoOptimizers.configure_optimizers must return one optimizer, with a parameter group for each learning rate; "
     "`parameter_groups` returns one for each trained model."),
    ("self.automatic_optimization = False", lambda: (lightrl.Trainer, Manual()),
     "Manual.automatic_optimization must be True, because the loop updates the policy with `loss`."),
    ("def training_step(self, batch, batch_idx)", lambda: (lightrl.Trainer, OwnStep()),
     "OwnStep.training_step is never called: an RLModule has no training_step. Write loss."),
    ("lightning.Trainer().fit(RLModule)", lambda: (L.Trainer, TinyGRPO()), NEEDS_OUR_TRAINER),
])  # fmt: skip


@pytest.mark.parametrize(("make", "sentence"), REFUSED)
def test_what_a_module_cannot_do_is_refused(make: Any, sentence: str, tmp_path: Path) -> None:
    kind, module = make()
    flags = {"accelerator": "cpu", "max_steps": 1, "logger": False, "enable_checkpointing": False}
    trainer = kind(**flags, enable_progress_bar=False, default_root_dir=tmp_path)
    with pytest.raises((ValueError, RuntimeError)) as error:
        trainer.fit(module, datamodule=Digits())
    assert str(error.value) == sentence


@habit(
    "def configure_optimizers(self)",
    "returns one optimizer, with or without a scheduler, which steps once per iteration",
)
@habit("ReduceLROnPlateau with a monitor")
def test_a_module_has_its_own_optimizer_and_scheduler(tmp_path: Path) -> None:
    class Own(TinyGRPO):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameter_groups(), lr=0.5)
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0, factor=0.5)
            config = {"scheduler": scheduler, "monitor": "policy/flat", "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("policy/flat", 1.0)

    assert train(tmp_path, Own(), max_steps=4).optimizers[0].param_groups[0]["lr"] < 0.5


@habit("def configure_model(self)", "call `super()`'s, then freeze or change the loaded models")
def test_layers_that_are_frozen_after_loading_stay_as_they_are(tmp_path: Path) -> None:
    class Frozen(TinyGRPO):
        def configure_model(self) -> None:
            super().configure_model()
            self.policy.get_input_embeddings().requires_grad_(False)

    module = Frozen()
    module.configure_model()
    before = weights(module)
    make_trainer(tmp_path).fit(module, datamodule=Digits())
    changed = {name for name, value in weights(module).items() if not torch.equal(value, before[name])}
    assert changed
    assert not [name for name in changed if "embed_tokens" in name or "lm_head" in name]


def test_every_flag_and_callback_of_lightning_has_a_row() -> None:
    written = " ".join(row.written for row in all_habits())
    flags = set(inspect.signature(L.Trainer.__init__).parameters) - {"self", "callbacks"}
    assert [name for name in sorted(flags) if f"{name}=" not in written] == []
    base = {"Callback", "Checkpoint", "ProgressBar", "BaseFinetuning"}
    assert [name for name in lightning.pytorch.callbacks.__all__ if name not in base and name not in written] == []


def test_the_page_has_the_tables() -> None:
    page = (ROOT / "docs" / "lightning-habits.md").read_text()
    assert page.partition(f"{MARKS[0]}\n\n")[2].partition(MARKS[1])[0] == tables()
