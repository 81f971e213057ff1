"""`ckpt_path="last"` and `"best"` in plain Python find what the command finds, or say that there is none."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer, train

import lightrl
from lightrl import ModelSpec

OTHER = ModelSpec(config=CONFIG, tokenizer="tiny_run.tokenizer", seed=4)


def trainer_of(folder: Path, max_steps: int, **flags: Any) -> lightrl.Trainer:
    return make_trainer(folder, logger=True, enable_checkpointing=True, max_steps=max_steps, **flags)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The last checkpoint of a finished run of one iteration."""
    trainer_of(tmp_path, 1).fit(TinyGRPO(), datamodule=Digits())
    return tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"


def test_a_fit_continues_from_the_newest_run_in_another_folder(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = TinyGRPO()
    with caplog.at_level("INFO", logger="lightrl"):
        trainer_of(tmp_path, 3).fit(module, datamodule=Digits(), ckpt_path="last")
    assert len(module.trained) == 2
    assert f"ckpt_path=last is {saved}. This run writes to a new folder." in caplog.text
    assert (tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt").exists()


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_other_stages_use_the_newest_run_too(
    stage: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "7")  # any seed can be validated
    trainer = trainer_of(tmp_path, 3, limit_val_batches=1)
    getattr(trainer, stage)(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    assert trainer.ckpt_path == str(saved)


def test_the_newest_checkpoint_counts_and_a_half_written_one_does_not(saved: Path, tmp_path: Path) -> None:
    for age, version in ((2, 7), (1, 10)):
        place = tmp_path / f"lightning_logs/version_{version}/checkpoints/last.ckpt"
        shutil.copytree(saved.parent, place.parent)
        os.utime(place, (age, age))
    saved.rename(saved.with_suffix(".ckpt.tmp"))
    trainer = trainer_of(tmp_path, 3, limit_val_batches=1)
    trainer.validate(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "lightning_logs/version_7/checkpoints/last.ckpt")


def test_a_link_to_nothing_is_refused_unless_there_is_another_checkpoint(saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt"
    link.parent.mkdir(parents=True)
    link.symlink_to("gone.ckpt")
    trainer_of(tmp_path, 1, limit_val_batches=1).validate(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    saved.unlink()
    with pytest.raises(ValueError, match=r"version_1/checkpoints/last.ckpt is a link to gone.ckpt, which"):
        trainer_of(tmp_path, 1).fit(TinyGRPO(), datamodule=Digits(), ckpt_path="last")


def test_without_loggers_the_folder_of_all_runs_is_searched(tmp_path: Path) -> None:
    train(tmp_path, enable_checkpointing=True, max_steps=1)
    module = TinyGRPO()
    train(tmp_path, module, enable_checkpointing=True, max_steps=3, ckpt_path="last")
    assert len(module.trained) == 2


@pytest.mark.parametrize(
    ("seed", "module", "data", "difference"),
    [
        (1, TinyGRPO, Digits, "its seed_everything is 0, this run has 1"),
        (0, type("Own", (TinyGRPO,), {}), Digits, "its model.class is 'TinyGRPO', this run has 'Own'"),
        (0, TinyGRPO, type("More", (Digits,), {}), "its data.class is 'Digits', this run has 'More'"),
        (0, lambda: TinyGRPO(OTHER), Digits, "its model.policy.model.seed is 3, this run has 4"),
    ],
    ids=["seed", "module", "data", "policy"],
)
def test_another_experiment_starts_from_the_beginning_and_says_why(
    seed, module, data, difference, saved, tmp_path, caplog, monkeypatch
):
    monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
    own = module()
    trainer_of(tmp_path, 3).fit(own, datamodule=data(), ckpt_path="last")
    assert len(own.trained) == 3
    assert f"The newest is {saved} ({difference})" in caplog.text
    assert "The run starts from the beginning." in caplog.text


def test_a_plain_module_continues_too(tmp_path: Path) -> None:
    trainer_of(tmp_path, 1, limit_train_batches=1).fit(BoringModel(), datamodule=BoringDataModule())
    trainer = trainer_of(tmp_path, 2, limit_train_batches=1)
    trainer.fit(BoringModel(), datamodule=BoringDataModule(), ckpt_path="last")
    assert Path(str(trainer.ckpt_path)) == tmp_path / "lightning_logs/version_0/checkpoints/last.ckpt"


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("last", r"ckpt_path=last: \S+ has no last\*.ckpt of an earlier run. Pass the path of a checkpoint."),
        ("best", "ckpt_path=best: this trainer has saved no checkpoint in a fit of its own"),
        ("bset.ckpt", r"ckpt_path=bset.ckpt does not exist. Pass a checkpoint, last or best"),
    ],
)
def test_a_stage_without_such_a_checkpoint_is_refused(stage: str, word: str, message: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 1)
    with pytest.raises(ValueError, match=message):
        getattr(trainer, stage)(TinyGRPO(), datamodule=Digits(), ckpt_path=word)


def test_best_is_of_this_trainers_fit(tmp_path: Path) -> None:
    best = ModelCheckpoint(monitor="rollout/reward", mode="max")
    trainer, module = trainer_of(tmp_path, 2, callbacks=best, limit_val_batches=1), TinyGRPO()
    trainer.fit(module, datamodule=Digits())
    trainer.validate(module, datamodule=Digits(), ckpt_path="best")
    assert trainer.ckpt_path == best.best_model_path
