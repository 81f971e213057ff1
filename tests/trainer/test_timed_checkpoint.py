import contextlib
import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from tiny_run import Digits, TinyGRPO, make_trainer, train

import lightrl
from lightrl.callbacks.run_files import TimedCheckpoint


def test_the_newest_timed_checkpoint_is_the_only_one_and_a_run_continues_from_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = [TimedCheckpoint(every_s=0), ModelCheckpoint(save_top_k=0)]
    trainer = train(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_steps=3)
    (place,) = (tmp_path / "checkpoints").iterdir()
    assert place.name == "last-timed.ckpt"
    assert torch.load(place, weights_only=True)["global_step"] == 3
    assert not trainer.strategy.checkpoint_io.save_async  # only this callback's saves are in the background
    again = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[TimedCheckpoint(every_s=0)], max_steps=4)
    with caplog.at_level("INFO", logger="lightrl"):
        again.fit(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    assert again.global_step == 4
    assert re.search(r"Continues after iteration 3 of 4 from \S+last-timed.ckpt, saved \d+ (s|min) ago\.", caplog.text)


@pytest.mark.parametrize(("steps", "is_interrupted"), [(3, False), (2, True)], ids=["at the end", "on Ctrl-C"])
def test_it_saves_the_last_iteration_where_the_users_checkpoint_does_not(
    steps: int, is_interrupted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(trainer: lightrl.Trainer, *_: object) -> None:
        if is_interrupted and trainer.global_step == steps:
            raise KeyboardInterrupt

    best = ModelCheckpoint(tmp_path / "best", monitor="rollout/reward", mode="max", every_n_train_steps=100)
    callbacks = [best, LambdaCallback(on_train_batch_start=interrupt)]
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_steps=3)
    ends = pytest.raises(SystemExit) if is_interrupted else contextlib.nullcontext()
    with ends, caplog.at_level("INFO", logger="lightrl"):
        trainer.fit(TinyGRPO(), datamodule=Digits())
    assert ("last-timed.ckpt; --ckpt_path last continues from it." in caplog.text) is is_interrupted
    (place,) = (tmp_path / "best").iterdir()
    assert (place.name, torch.load(place, weights_only=True)["global_step"]) == ("last-timed.ckpt", steps)


def test_it_is_there_unless_checkpoints_are_off(tmp_path: Path) -> None:
    def timed(**settings: object) -> int:
        trainer = lightrl.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, **settings)
        return sum(isinstance(callback, TimedCheckpoint) for callback in trainer.callbacks)

    assert timed() == 1
    assert timed(callbacks=ModelCheckpoint()) == timed(callbacks=TimedCheckpoint()) == 1
    assert timed(enable_checkpointing=False) == 0
    assert timed(fast_dev_run=True) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, SIGTERMException, ZeroDivisionError])
@pytest.mark.parametrize("interval", [1, 100], ids=["already saved", "saved now"])
def test_the_checkpoint_that_a_users_callback_saved_is_named_too(
    error: type[BaseException], interval: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def interrupt(trainer: lightrl.Trainer, *_: object) -> None:
        if trainer.global_step == 2:
            raise error

    own = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True, every_n_train_steps=interval)
    callbacks = [own, LambdaCallback(on_train_batch_start=interrupt)]
    with pytest.raises((SystemExit, error)), caplog.at_level("INFO", logger="lightrl"):
        train(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_steps=3)
    assert [text for text in caplog.messages if text.startswith("Saved")] == [
        f"Saved {tmp_path / 'last.ckpt'}; --ckpt_path last continues from it."
    ]
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 2


@pytest.mark.parametrize("is_rank_0", [True, False])
@pytest.mark.parametrize("is_saved", [True, False])
def test_it_says_that_it_saved_only_if_it_did_and_once(
    is_saved: bool, is_rank_0: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightrl.Trainer, "is_global_zero", property(lambda _: is_rank_0))
    trainer = train(tmp_path, enable_checkpointing=True, callbacks=TimedCheckpoint(), max_steps=1)
    if not is_saved:
        trainer.rollout_loop.resume.why_no_checkpoint = "this rank failed"
    (timed,) = trainer.checkpoint_callbacks
    with caplog.at_level("INFO", logger="lightrl"):
        timed.on_exception(trainer, trainer.lightning_module, RuntimeError())
    assert ("continues from it" in caplog.text) is (is_saved and is_rank_0)
