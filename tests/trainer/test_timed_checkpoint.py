from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny_run import Digits, TinyGRPO, make_trainer, train

import lightrl
from lightrl.callbacks.run_files import TimedCheckpoint


def test_the_newest_timed_checkpoint_is_the_only_one_and_a_run_continues_from_it(tmp_path: Path) -> None:
    callbacks = [TimedCheckpoint(every_s=0), ModelCheckpoint(save_top_k=0)]
    trainer = train(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_steps=3)
    (place,) = (tmp_path / "checkpoints").iterdir()
    assert place.name == "last-timed.ckpt"
    assert torch.load(place, weights_only=True)["global_step"] == 3
    assert not trainer.strategy.checkpoint_io.save_async  # only this callback's saves are in the background
    again = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[TimedCheckpoint(every_s=0)], max_steps=4)
    again.fit(TinyGRPO(), datamodule=Digits(), ckpt_path="last")
    assert again.global_step == 4


def test_it_is_there_unless_the_user_chose_a_checkpoint_or_none(tmp_path: Path) -> None:
    def timed(**settings: object) -> int:
        trainer = lightrl.Trainer(accelerator="cpu", default_root_dir=tmp_path, logger=False, **settings)
        return sum(isinstance(callback, TimedCheckpoint) for callback in trainer.callbacks)

    assert timed() == 1
    assert timed(callbacks=ModelCheckpoint()) == 0
    assert timed(enable_checkpointing=False) == 0
    assert timed(fast_dev_run=True) == 0
