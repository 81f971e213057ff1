"""`ckpt_path="last"` and `"best"` in plain Python find what the command finds, or say that there is none."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny_run import CONFIG, POLICY, Digits, TinyGRPO, make_trainer, train

import lightrl
from lightrl import ModelSpec
from lightrl.callbacks.run_files import TimedCheckpoint

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
        ("last", r"ckpt_path=last: \S+ has no last\*.ckpt from an earlier run. Pass the path to a checkpoint."),
        ("best", "ckpt_path=best needs a checkpoint that this trainer saved in a fit"),
        ("bset.ckpt", r"ckpt_path=bset.ckpt does not exist. Pass a checkpoint's path, 'last' or 'best'"),
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


@pytest.mark.parametrize("stage", ["validate", "test"])
@pytest.mark.parametrize("has_logger", [True, False])
def test_a_fit_after_another_stage_of_the_trainer_continues(stage: str, has_logger: bool, tmp_path: Path) -> None:
    make_trainer(tmp_path, logger=has_logger, enable_checkpointing=True, max_steps=1).fit(
        TinyGRPO(), datamodule=Digits()
    )
    trainer, module = trainer_of(tmp_path, 3, limit_val_batches=1, limit_test_batches=1), TinyGRPO()
    if not has_logger:
        trainer = make_trainer(tmp_path, logger=False, enable_checkpointing=True, max_steps=3, limit_val_batches=1)
    getattr(trainer, stage)(module, datamodule=Digits())
    trainer.fit(module, datamodule=Digits(), ckpt_path="last")
    assert len(module.trained) == 2


def test_a_second_fit_continues_from_the_trainers_own_run(saved: Path, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, 2, limit_val_batches=1)
    trainer.fit(TinyGRPO(), datamodule=Digits())
    os.utime(saved)  # another run, which saved later
    trainer.validate(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    assert trainer.ckpt_path == str(tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt")


@pytest.mark.parametrize("is_first", [True, False])
def test_the_dirpath_of_one_callback_does_not_hide_what_another_saved(is_first: bool, tmp_path: Path) -> None:
    def callbacks() -> list[ModelCheckpoint]:
        made = [ModelCheckpoint(save_last=True), ModelCheckpoint(tmp_path / "best", monitor="rollout/reward")]
        return made if is_first else made[::-1]

    trainer_of(tmp_path, 1, callbacks=callbacks()).fit(TinyGRPO(), datamodule=Digits())
    module = TinyGRPO()
    trainer_of(tmp_path, 3, callbacks=callbacks()).fit(module, datamodule=Digits(), ckpt_path="last")
    assert len(module.trained) == 2


def test_the_newest_of_a_named_folder_and_the_runs_counts(saved: Path, tmp_path: Path) -> None:
    named = tmp_path / "named/last-timed.ckpt"
    shutil.copytree(saved.parent, named.parent)
    (named.parent / "last.ckpt").rename(named)
    for newest in (named, saved):
        os.utime(saved, (1, 1))
        os.utime(named, (1, 1))
        os.utime(newest, (2, 2))
        callbacks = [TimedCheckpoint(named.parent), ModelCheckpoint()]
        trainer = trainer_of(tmp_path, 2, callbacks=callbacks, limit_val_batches=1)
        trainer.validate(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
        assert trainer.ckpt_path == str(newest)


@pytest.mark.parametrize(("policy", "num_trained"), [(POLICY, 2), (OTHER, 3)], ids=["the same", "another"])
def test_without_loggers_the_folder_of_all_runs_is_searched_for_the_experiment(
    policy: Any, num_trained: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(tmp_path, enable_checkpointing=True, max_steps=1)
    module = TinyGRPO(policy)
    train(tmp_path, module, enable_checkpointing=True, max_steps=3, ckpt_path="last")
    assert len(module.trained) == num_trained
    assert ("its model.policy.model.seed is 3, this run has 4" in caplog.text) == (policy is OTHER)


@pytest.mark.parametrize("named", [True, False])
def test_the_choice_is_logged_without_a_new_folder_too(
    named: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trained(max_steps: int, **flags: Any) -> None:
        callbacks = ModelCheckpoint(tmp_path / "checkpoints", save_last=True) if named else None
        train(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_steps=max_steps, **flags)

    trained(1)
    with caplog.at_level("INFO", logger="lightrl"):
        trained(2, ckpt_path="last")
    assert f"ckpt_path=last is {tmp_path}/checkpoints/last.ckpt." in caplog.messages


def test_an_unreadable_file_does_not_win_over_an_older_checkpoint(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "lightning_logs/version_1/checkpoints/last.ckpt"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(saved.read_bytes()[:1000])
    os.utime(saved, (1, 1))
    module = TinyGRPO()
    trainer_of(tmp_path, 3).fit(module, datamodule=Digits(), ckpt_path="last")
    assert len(module.trained) == 2
