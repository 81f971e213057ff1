"""A run that is resumed is the run that never stopped: to the bit on-policy, without loss or repetition otherwise."""

import collections
import contextlib
import functools
import logging
import os
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tiny_run import BATCH_SIZE, Digits, TinyGRPO, are_equal, make_trainer, train, weights
from torch import Tensor
from torch.utils.data import DataLoader

from lightrl import Experience, FakeEngine, HuggingFaceExport, Outputs, Sampling, StalenessControl
from lightrl.concurrency.owner import own_mark
from lightrl.loops.resume import settings_of
from lightrl.strategies import AtomicCheckpointIO

NUM_ITERATIONS = 7  # epochs of 3: iterations 3 and 6 are ends of epochs
# Of the wall clock; and the probe of a weight sync, which the first load of each process has.
WALL_TIME = ("time/", "rollout/tokens_per_s", "update/tokens_per_s", "sync/probe")


class Noisy(TinyGRPO):
    """Everything that a resume could get wrong: updates, random numbers in the loss, momentum, a schedule."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            num_minibatches=2, update_epochs=2, warmup_iterations=5, validation_sampling=Sampling(max_new_tokens=6),
            validation_group_size=2, **kwargs,
        )  # fmt: skip

    def loss(self, experience: Experience, outputs: Outputs) -> dict[str, Tensor]:
        result = super().loss(experience, outputs)
        noise = torch.rand(outputs.logprobs.shape)
        return {**result, "loss": result["loss"] * (1 + 0.1 * noise), "noise": noise}


class Record(Callback):
    """Metrics by iteration, of training and of validation."""

    def __init__(self) -> None:
        self.train: dict[int, dict[str, float]] = {}
        self.validation: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        self.train[trainer.global_step] = {
            name: value for name, value in metrics.items() if not name.startswith((*WALL_TIME, "val/"))
        }

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        values = trainer.callback_metrics.items()
        self.validation[trainer.global_step] = {name: float(value) for name, value in values if name.startswith("val/")}


def fit(folder, *, resume=None, flags=None, callbacks=None):
    torch.manual_seed(5)
    module, record = Noisy(), Record()
    settings = {"max_steps": NUM_ITERATIONS, "limit_val_batches": 1.0, "num_sanity_val_steps": 1} | (flags or {})
    trainer = make_trainer(folder, enable_checkpointing=True, callbacks=[record, *(callbacks or [])], **settings)
    trainer.fit(module, datamodule=Digits(), ckpt_path=resume)
    return trainer, module, record


SAVES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "after each iteration": ({"every_n_train_steps": 1}, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
    "after each validation": ({}, {"val_check_interval": 2, "check_val_every_n_epoch": None}),
    "after each epoch": ({"save_on_train_epoch_end": True}, {"val_check_interval": 1 / 3}),
    "without validation": ({"every_n_train_steps": 1}, {"limit_val_batches": 0}),
}


@pytest.mark.parametrize(
    "name", [name if name == "after each validation" else pytest.param(name, marks=pytest.mark.extra) for name in SAVES]
)
def test_resumed_on_policy_anywhere_it_is_the_uninterrupted_run_to_the_bit(name: str, tmp_path: Path) -> None:
    when, flags = SAVES[name]
    checkpoint = ModelCheckpoint(tmp_path / "whole", filename="{step}", save_top_k=-1, **when)
    trainer, module, record = fit(tmp_path, flags=flags, callbacks=[checkpoint])
    files = {int(path.stem.split("=")[1]): path for path in (tmp_path / "whole").glob("step=*.ckpt")}
    assert set(files) >= ({3, 6} if name == "after each epoch" else {2, 4, 6})
    for iteration, file in files.items():
        if iteration == NUM_ITERATIONS:
            continue
        other = ModelCheckpoint(tmp_path / f"resumed-{iteration}", filename="{step}", save_top_k=-1, **when)
        resumed_trainer, resumed, resumed_record = fit(tmp_path, resume=file, flags=flags, callbacks=[other])
        assert resumed_trainer.global_step == NUM_ITERATIONS
        assert resumed.trained == module.trained[iteration:]
        assert are_equal(weights(resumed), weights(module))
        states = [item.optimizers[0].state_dict() for item in (trainer, resumed_trainer)]
        for left, right in zip(states[0]["state"].values(), states[1]["state"].values(), strict=True):
            assert are_equal(left, right)
        assert states[0]["param_groups"] == states[1]["param_groups"]
        later = {step: metrics for step, metrics in record.train.items() if step > iteration}
        assert resumed_record.train == later
        assert resumed_record.validation.keys() >= {step for step in record.validation if step > iteration}
        for step, metrics in resumed_record.validation.items():
            assert metrics == record.validation[step]


def test_a_users_own_loaders_resume_to_the_bit_too(tmp_path: Path) -> None:
    """They draw from the global random state whenever they are iterated over."""
    runs: list[Noisy] = []
    for resume in (None, *(tmp_path / f"step={iteration}.ckpt" for iteration in (2, 3, 4))):
        torch.manual_seed(5)
        runs.append(Noisy())
        loader = DataLoader(["0 1", "1 2", "2 3", "3 4", "4 5", "0 5"], batch_size=2, shuffle=True)
        validation = DataLoader(["0 1", "1 2"], batch_size=2)
        save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
        callbacks = [save] if resume is None else []
        flags: dict[str, Any] = {"max_steps": NUM_ITERATIONS, "limit_val_batches": 1.0, "val_check_interval": 2}
        trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=callbacks, **flags)
        trainer.fit(runs[-1], loader, validation, ckpt_path=resume)
    for iteration, resumed in zip((2, 3, 4), runs[1:], strict=True):
        assert resumed.trained == runs[0].trained[iteration:]
        assert are_equal(weights(resumed), weights(runs[0]))


def test_the_last_checkpoint_is_found_and_half_written_ones_are_ignored(tmp_path: Path) -> None:
    last = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1)
    fit(tmp_path, flags={"max_steps": 2}, callbacks=[last])
    (tmp_path / "last.ckpt.1234.part").write_bytes(b"half")
    (tmp_path / "last-v1.ckpt.77.part").write_bytes(b"half")
    _, module, _ = fit(tmp_path, resume="last", callbacks=[ModelCheckpoint(tmp_path, save_last=True)])  # type: ignore[arg-type]
    _, whole, _ = fit(tmp_path / "whole")
    assert module.trained == whole.trained[2:]
    assert are_equal(weights(module), weights(whole))


def lr_and_decay(
    folder: Path, steps: int, *, resume: Path | None = None, scheduler: Any = None, **settings: Any
) -> list[tuple[float, float]]:
    """Learning rate and weight decay of each iteration; leaves a checkpoint."""
    used: list[tuple[float, float]] = []

    class Own(TinyGRPO):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            group = self.optimizers().param_groups[0]  # type: ignore[union-attr]
            used.append((round(group["lr"], 9), group["weight_decay"]))

        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return optimizer if scheduler is None else ([optimizer], [scheduler(optimizer)])

    trainer = train(folder, Own(**settings), ckpt_path=resume, max_steps=steps)
    trainer.save_checkpoint(folder / "a.ckpt")
    return used


LINEAR = {"lr": 0.4, "lr_decay": "linear"}


@pytest.mark.parametrize(
    ("before", "after", "expected", "message"),
    [
        ({"lr": 0.4}, {"lr": 0.2}, [(0.2, 0.0)] * 2, "model.lr 0.4 → 0.2"),
        ({"lr": 0.4}, {"lr": 0.4, "weight_decay": 0.1}, [(0.4, 0.1)] * 2, "model.weight_decay 0.0 → 0.1"),
        (LINEAR, {"lr": 0.4}, [(0.4, 0.0)] * 2, "model.lr_decay linear → constant"),
        ({"lr": 0.4}, LINEAR, [(0.2, 0.0), (0.1, 0.0)], "model.lr_decay constant → linear"),
        (LINEAR, LINEAR, [(0.2, 0.0), (0.1, 0.0)], None),
        (LINEAR, {**LINEAR, "lr": 0.8}, [(0.4, 0.0), (0.2, 0.0)], "model.lr 0.4 → 0.8"),
        ({"lr": 0.4}, {"lr": 0.4}, [(0.4, 0.0)] * 2, None),
    ],
    ids=["lr", "weight decay", "no decay after one that has ended", "a decay from now on", "a decay with a later end",
         "a decay of another lr", "nothing"],
)  # fmt: skip
def test_a_resumed_run_has_its_own_lr_and_weight_decay_and_says_which_differ(
    before: dict[str, Any], after: dict[str, Any], expected: Any, message: str | None,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    lr_and_decay(tmp_path, 2, **before)
    with caplog.at_level(logging.INFO, logger="lightrl.loops.resume"):
        found = lr_and_decay(tmp_path, 4, resume=tmp_path / "a.ckpt", **after)
    assert found == expected
    start, record = [record for record in caplog.records if record.name == "lightrl.loops.resume"]
    assert start.getMessage().startswith("Continuing after iteration 2 of 4 from ")
    assert "trainer.max_steps 2 → 4" in record.getMessage()
    assert record.levelname == ("INFO" if message is None else "WARNING")  # a later end alone is meant
    assert (message or "Changed since the checkpoint: ") in record.getMessage()


def test_a_resume_with_nothing_left_to_train_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lr_and_decay(tmp_path, 2, lr=0.4)
    assert lr_and_decay(tmp_path, 2, resume=tmp_path / "a.ckpt", lr=0.4) == []
    assert "Nothing is left to train: the checkpoint is already at trainer.max_steps=2." in caplog.text


def test_an_lr_that_a_users_scheduler_and_a_callback_have_changed_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    halve: Any = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    lr_and_decay(tmp_path, 1, scheduler=halve, lr=0.4)
    path = tmp_path / "a.ckpt"
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        assert lr_and_decay(tmp_path, 2, resume=path, scheduler=halve, lr=0.8) == [(0.4, 0.0)]
    assert "lr=0.8 has no effect on this resumed run: StepLR continues from the checkpoint's 0.4" in caplog.text


def test_a_resume_with_another_seed_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, _, _ = fit(tmp_path, flags={"max_steps": 2})
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        fit(tmp_path, resume=tmp_path / "a.ckpt")
    assert "made with seed 0, but this run has seed 8" in caplog.text


class Stop(Exception):
    pass


class StopAfter(Callback):
    """Ends the run as a crash would, between two checkpoints or in the middle of an iteration."""

    def __init__(self, iteration: int, hook: str = "on_train_batch_end") -> None:
        self.iteration = iteration
        setattr(self, hook, self.stop)

    def stop(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.iteration:
            raise Stop


def engine() -> FakeEngine:
    """Every fifth prompt takes long, and nobody is as fast as the update."""
    return FakeEngine(seconds_per_token=lambda prompt, sampling: 0.03 if prompt[0] == 4 else 0.002)


def fit_async(folder, staleness, *, resume=None, callbacks=None, num=8):
    module = TinyGRPO()
    trainer = make_trainer(
        folder, engine=engine(), max_steps=num, enable_checkpointing=True,
        callbacks=[StalenessControl(staleness), *(callbacks or [])],
    )  # fmt: skip
    with contextlib.suppress(Stop):
        trainer.fit(module, datamodule=Digits(), ckpt_path=resume)
    return module


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 0), (0, 2)])
def test_no_prompt_is_lost_or_trained_on_twice(before: int, after: int, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    first = fit_async(tmp_path, before, callbacks=[save, StopAfter(4)])
    second = fit_async(tmp_path, after, resume=tmp_path / "step=3.ckpt")
    trained = [position for batch in first.trained[:3] + second.trained for position in batch]
    assert len(second.trained) == 5
    assert len(trained) == len(set(trained)) == 8 * BATCH_SIZE
    # With a straggler in flight at the end a later prompt may take its place; none is skipped for good.
    assert max(trained) < (8 + max(before, after)) * BATCH_SIZE
    assert set(range(6)) <= set(trained)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_rollout_start", "on_train_batch_start"])
def test_a_crash_between_updates_saves_a_checkpoint_from_which_nothing_is_lost(hook: str, tmp_path: Path) -> None:
    save = ModelCheckpoint(tmp_path, save_on_exception=True, filename="{step}")
    first = fit_async(tmp_path, 1, callbacks=[save, StopAfter(3, hook)])
    assert len(first.trained) == 3
    second = fit_async(tmp_path, 1, resume=tmp_path / "step=3.ckpt")
    counts = collections.Counter(position for batch in first.trained + second.trained for position in batch)
    assert set(counts.values()) == {1}
    assert len(counts) == 8 * BATCH_SIZE


@pytest.mark.parametrize("hook", ["on_minibatch_end", "on_policy_updated", "on_weight_sync", "on_weights_synced"])
def test_a_crash_within_an_iteration_saves_no_checkpoint(hook, tmp_path, caplog):
    save = ModelCheckpoint(tmp_path, save_on_exception=True, every_n_train_steps=2, filename="{step}")
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        fit_async(tmp_path, 1, callbacks=[save, StopAfter(3, hook)])
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=2.ckpt"]
    assert "No checkpoint was saved" in caplog.text


def test_max_epochs_holds_after_a_crash_and_a_resume(tmp_path: Path) -> None:
    for hook in ("on_train_batch_end", "on_rollout_start"):
        folder = tmp_path / hook
        save = ModelCheckpoint(folder, save_on_exception=True, filename="{step}")
        first = TinyGRPO()
        callbacks = [save, StopAfter(4, hook)]
        trainer = make_trainer(tmp_path, max_epochs=2, enable_checkpointing=True, callbacks=callbacks)
        with pytest.raises(Stop):
            trainer.fit(first, datamodule=Digits())
        second = TinyGRPO()
        trainer = train(tmp_path, second, ckpt_path=folder / "step=4.ckpt", max_epochs=2)
        assert trainer.global_step == 6
        assert sorted(position for batch in first.trained + second.trained for position in batch) == list(range(12))


def test_a_full_disk_leaves_the_checkpoint_before_and_says_so(tmp_path: Path) -> None:
    """/dev/full accepts nothing; the checkpoint before it stays whole."""
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"step": 1}, target)
    (tmp_path / f"a.ckpt.{own_mark()}.part").symlink_to("/dev/full")
    said = rf"^Checkpoint {target} could not be written: the disk that holds '{tmp_path}' is full \(.*, 391 KiB"
    with pytest.raises(OSError, match=said + r" to write\)\. The disk needs space.*Free some") as caught:
        AtomicCheckpointIO().save_checkpoint({"step": 2, "weights": torch.zeros(100_000)}, target)
    assert "enforce fail" not in "".join(traceback.format_exception(caught.value))  # torch's words for it
    assert torch.load(target) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_dead_writers_left_is_cleared_away(tmp_path: Path) -> None:
    host = own_mark().rpartition("-")[2]
    (tmp_path / f"b.ckpt.4194305-1-{host}.part").write_bytes(b"half")  # above the largest process id
    (tmp_path / "b.ckpt.1.part").write_bytes(b"half")
    AtomicCheckpointIO().save_checkpoint({"step": 1}, tmp_path / "a.ckpt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.ckpt", "b.ckpt.1.part"]


def test_a_callback_that_fails_on_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    class FullDisk(Callback):
        def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
            raise OSError("no space left")

    trainer = make_trainer(tmp_path, callbacks=[FullDisk(), StopAfter(1)])
    with pytest.raises(OSError, match="no space left"):
        trainer.fit(TinyGRPO(), datamodule=Digits())  # the fixture looks for threads


@pytest.mark.parametrize("save_async", [False, True])
def test_the_error_of_a_run_is_not_hidden_by_a_checkpoint_that_cannot_be_written_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, save_async: bool
) -> None:
    (tmp_path / "file").touch()
    saves = ModelCheckpoint(dirpath=tmp_path / "file" / "checkpoints", save_on_exception=True)
    callbacks = [saves, StopAfter(1)]
    plugins = [AtomicCheckpointIO(save_async=save_async)]
    trainer = make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True, plugins=plugins)
    with pytest.raises(Stop):
        trainer.fit(TinyGRPO(), datamodule=Digits())
    assert "could not be written: Not a directory" in caplog.text


def test_a_folder_that_cannot_be_written_is_refused_before_models_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda folder, mode: mode != os.W_OK or folder != tmp_path)
    make_trainer(tmp_path, max_steps=1).fit(TinyGRPO(), datamodule=Digits())  # which writes nothing
    module = TinyGRPO()
    trainer = make_trainer(tmp_path / "runs", enable_checkpointing=True)
    with pytest.raises(ValueError, match=rf"write to {tmp_path}/runs, but {tmp_path} is read-only.*default_root_dir"):
        trainer.fit(module, datamodule=Digits())
    assert not hasattr(module, "policy")


@pytest.mark.parametrize("root", ["s3://bucket/runs", "hf://buckets/me/runs", "file:///tmp/runs"])
def test_a_url_to_write_to_is_refused_by_name(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"default_root_dir='{root}' must be a local or mounted folder, not a URL"):
        make_trainer(root)
    trainer = make_trainer(tmp_path, logger=CSVLogger("memory://runs"), enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"save_dir='memory://runs' must be a local or mounted folder"):
        trainer.fit(TinyGRPO(), datamodule=Digits())
    with pytest.raises(ValueError, match=rf"to='{root}' must be a local or mounted folder"):
        HuggingFaceExport(root)
    assert not list(tmp_path.glob("*:*"))


def test_a_failed_run_can_continue_with_the_same_trainer(tmp_path: Path) -> None:
    stop = StopAfter(1, "on_minibatch_end")
    trainer = make_trainer(tmp_path, callbacks=[stop], max_steps=4)
    with pytest.raises(Stop):
        trainer.fit(TinyGRPO(), datamodule=Digits())
    stop.iteration = -1
    module = TinyGRPO()
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == 4
    assert module.trained == [[2, 3], [4, 5], [6, 7]]
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert (tmp_path / "a.ckpt").exists()


def test_no_checkpoint_holds_a_secret_of_the_settings() -> None:
    settings = {"model": {"api_key": "s3cret", "group_size": 4}, "trainer": {"engine": {"token": "s3cret"}}}
    assert settings_of(SimpleNamespace(settings=settings), []) == {"model.group_size": 4}


@pytest.mark.parametrize("when", ["before it", "in it", "after it"])
@pytest.mark.parametrize("iteration", [2, 3], ids=["in an epoch", "at the end of an epoch"])
def test_a_validation_that_was_due_when_the_run_was_interrupted_is_made_up_for(
    when: str, iteration: int, tmp_path: Path
) -> None:
    class Interrupts(Callback):
        def interrupt(self, trainer: L.Trainer, *_: object) -> None:
            if trainer.global_step == iteration and not trainer.sanity_checking:
                raise KeyboardInterrupt

    hook = {"before it": "on_validation_start", "in it": "on_validation_batch_end", "after it": "on_train_batch_start"}
    setattr(Interrupts, hook[when], Interrupts.interrupt)
    flags = {"max_steps": 5, "val_check_interval": iteration, "check_val_every_n_epoch": None}
    last = ModelCheckpoint(tmp_path, save_last=True, save_on_exception=True, save_top_k=0)
    _, _, whole = fit(tmp_path / "whole", flags=flags)
    with pytest.raises(SystemExit):
        fit(tmp_path, flags=flags, callbacks=[last, Interrupts()])
    _, _, resumed = fit(tmp_path, flags=flags, resume="last", callbacks=[ModelCheckpoint(tmp_path)])
    assert [step for step in resumed.validation if step == iteration] == ([] if when == "after it" else [iteration])
    assert all(metrics == whole.validation[step] for step, metrics in resumed.validation.items() if step)
    assert resumed.train == {step: metrics for step, metrics in whole.train.items() if step > iteration}
