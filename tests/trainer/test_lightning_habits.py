"""What a Lightning user does by habit works with an RLModule: flags, callbacks, loggers, stages, loaders."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.tuner import Tuner
from tiny_run import BATCH_SIZE, GROUP_SIZE, Digits, TinyGRPO, are_equal, make_trainer, weights
from torch.utils.data import DataLoader, IterableDataset

import lightrl
from lightrl import Prompt, RolloutMetrics, Sampling, StalenessControl, WeightSync
from lightrl.errors import LightRLError
from lightrl.trajectory import Group

# ---------------------------------------------------------------------- how long a run is


def test_max_steps_counts_iterations(tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_steps=4)
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == trainer.weight_version == len(module.trained) == 4
    assert trainer.engine is not None
    assert [set(seen.weight_versions[seen.loss_mask].tolist()) for seen in module.experiences] == [{0}, {1}, {2}, {3}]


def test_max_epochs_gives_each_prompt_once_per_epoch(tmp_path: Path) -> None:
    module, trainer = TinyGRPO(num_minibatches=2, update_epochs=2), make_trainer(tmp_path, max_epochs=2)
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == 6
    assert trainer.rollout_loop.num_updates == 6 * 4
    assert trainer.current_epoch == 2
    assert sorted(position for batch in module.trained for position in batch) == list(range(12))


def test_max_time_ends_the_run_between_two_iterations(tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_time={"seconds": 1})
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == len(module.trained) >= 1


def test_limits_shorten_epochs_and_validation(tmp_path: Path) -> None:
    module, counts = TinyGRPO(), CountValidations()
    trainer = make_trainer(
        tmp_path, max_epochs=2, limit_train_batches=2, limit_val_batches=1, callbacks=[counts], num_sanity_val_steps=1
    )
    trainer.fit(module, datamodule=Digits(validation_batch_size=2))
    assert trainer.global_step == 4
    assert module.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert counts.steps == [0, 2, 4]
    assert trainer.callback_metrics["val/prompts"] == 2


def test_overfit_batches_trains_on_the_same_prompts(tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, overfit_batches=1, max_epochs=3)
    trainer.fit(module, datamodule=Digits())
    prompts = [seen.token_ids[::GROUP_SIZE, :3].tolist() for seen in module.experiences]
    assert prompts == [[[2, 2, 2], [3, 2, 2]]] * 3


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"val_check_interval": 2, "check_val_every_n_epoch": None, "max_steps": 6}, [2, 4, 6]),
        ({"val_check_interval": 1.0, "max_epochs": 2}, [3, 6]),
        ({"val_check_interval": 1 / 3, "max_epochs": 1}, [1, 2, 3]),
        ({"check_val_every_n_epoch": 2, "max_epochs": 4}, [6, 12]),
    ],
    ids=["every second iteration", "every epoch", "thrice per epoch", "every second epoch"],
)
def test_validation_comes_when_lightning_says(flags: dict[str, Any], expected: list[int], tmp_path: Path) -> None:
    counts = CountValidations()
    make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[counts], **flags).fit(TinyGRPO(), datamodule=Digits())
    assert counts.steps == expected


class CountValidations(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.steps.append(trainer.global_step)


# ---------------------------------------------------------------------- fast_dev_run


def test_fast_dev_run_does_everything_once_and_checks_the_resume(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", logger="lightrl")
    module, counts = TinyGRPO(num_minibatches=2, update_epochs=2), CountValidations()
    trainer = make_trainer(tmp_path, fast_dev_run=True, limit_val_batches=1.0, callbacks=[counts])
    trainer.fit(module, datamodule=Digits())
    assert trainer.global_step == 1
    assert counts.steps == [1]
    assert trainer.callback_metrics["rollout/reward"] >= 0
    assert "restores this state exactly" in caplog.text


class Counter(Callback):
    """A callback with state; subclasses lose some of it."""

    def __init__(self) -> None:
        self.num: Any = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num = state_dict["num"]


class ForgetsToLoad(Counter):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class LoadsSomethingElse(Counter):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num = state_dict["num"] + 1


class SavesAnObject(Counter):
    def state_dict(self) -> dict[str, Any]:
        return {"num": [SavesAnObject]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ForgetsToLoad, r"'ForgetsToLoad'\]\['num'\] differs after a resume\. Restore in load_state_dict"),
        (LoadsSomethingElse, r"'LoadsSomethingElse'\]\['num'\] differs after a resume\. Restore in load_state_dict"),
        (SavesAnObject, r"because of checkpoint\['callbacks'\]\['SavesAnObject'\]\['num'\]\[0\].*Convert it there"),
    ],
)
def test_fast_dev_run_fails_if_state_would_not_survive(
    kind: Callable[[], Callback], message: str, tmp_path: Path
) -> None:
    with pytest.raises(LightRLError, match=f"(?s){message}"):
        make_trainer(tmp_path, fast_dev_run=True, callbacks=[kind()]).fit(TinyGRPO(), datamodule=Digits())


def test_fast_dev_run_accepts_a_callback_that_keeps_its_state(tmp_path: Path) -> None:
    callback = Counter()
    make_trainer(tmp_path, fast_dev_run=2, callbacks=[callback]).fit(TinyGRPO(), datamodule=Digits())
    assert callback.num == 2


# ---------------------------------------------------------------------- the update


class GradientNorms(Callback):
    """Seen by the optimizer: after clipping."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.largest: list[float] = []

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        if gradients:
            self.norms.append(float(torch.stack([gradient.norm() for gradient in gradients]).norm()))
            self.largest.append(max(float(gradient.abs().max()) for gradient in gradients))


def test_gradients_are_clipped_by_norm(tmp_path: Path) -> None:
    seen, logged = GradientNorms(), Logged("policy/grad_norm")
    trainer = make_trainer(tmp_path, gradient_clip_val=0.01, callbacks=[seen, logged], max_steps=4)
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert seen.norms == pytest.approx([0.01] * 3, rel=1e-3)
    assert min(logged.values) > 0.1  # of the gradient before clipping


def test_gradients_are_clipped_by_value(tmp_path: Path) -> None:
    seen = GradientNorms()
    trainer = make_trainer(
        tmp_path, gradient_clip_val=0.001, gradient_clip_algorithm="value", callbacks=[seen], max_steps=4
    )
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert seen.largest == pytest.approx([0.001] * 3)


class Logged(Callback):
    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.values.append(float(trainer.callback_metrics[self.name]))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_trains_validates_and_predicts(precision: Any, tmp_path: Path) -> None:
    module, before = TinyGRPO(), None
    trainer = make_trainer(tmp_path, precision=precision, limit_val_batches=1.0, limit_predict_batches=1)
    module.configure_model()
    before = weights(module)
    trainer.fit(module, datamodule=Digits())
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    after = weights(module)
    assert {value.dtype for value in after.values()} == {dtype}
    assert any(not torch.equal(before[name].to(dtype), after[name]) for name in after)
    assert 0 <= trainer.callback_metrics["val/reward"] <= 1
    assert trainer.callback_metrics["policy/kl_behavior_nats"] < (1e-9 if precision == "32-true" else 0.1)
    assert trainer.predict(module, datamodule=Digits())


def test_the_learning_rate_changes_per_iteration_not_per_update(tmp_path: Path) -> None:
    rates = Rates()
    module = TinyGRPO(lr=0.4, warmup_iterations=2, lr_decay="linear", num_minibatches=2)
    make_trainer(tmp_path, max_steps=4, callbacks=[rates]).fit(module, datamodule=Digits())
    # warm-up (i + 1) / 2 up to 1, times the decay 1 - i / 4
    assert rates.seen == pytest.approx([0.4 * 0.5, 0.4 * 0.75, 0.4 * 0.5, 0.4 * 0.25])


class Rates(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])


def test_anomalies_are_detected(tmp_path: Path) -> None:
    class Wrong(TinyGRPO):
        def loss(self, experience: Any, outputs: Any) -> dict[str, torch.Tensor]:
            result = super().loss(experience, outputs)
            return {"loss": result["loss"] + 0.0 * (outputs.logprobs - outputs.logprobs.detach()).sqrt()}

    with pytest.warns(UserWarning, match="Error detected in"):
        with pytest.raises(RuntimeError, match="returned nan values"):
            make_trainer(tmp_path, detect_anomaly=True).fit(Wrong(), datamodule=Digits())


# ---------------------------------------------------------------------- callbacks and loggers


def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, monitor="rollout/reward", mode="max", every_n_train_steps=2, save_last=True, filename="{step}"
    )
    logged = Logged("rollout/reward")
    trainer = make_trainer(tmp_path, max_steps=6, enable_checkpointing=True, callbacks=[checkpoint, logged])
    trainer.fit(TinyGRPO(), datamodule=Digits())
    best = max((reward, step) for step, reward in enumerate(logged.values, 1) if step % 2 == 0)
    assert checkpoint.best_model_score == pytest.approx(best[0])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", f"step={best[1]}.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 6


def test_the_default_checkpoint_has_a_last_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, enable_checkpointing=True).fit(TinyGRPO(), datamodule=Digits())
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"last.ckpt", "epoch=0-step=3.ckpt"}


def test_early_stopping_ends_the_run(tmp_path: Path) -> None:
    stop = EarlyStopping("val/reward", mode="max", stopping_threshold=-1.0)
    trainer = make_trainer(tmp_path, max_epochs=5, limit_val_batches=1.0, callbacks=[stop])
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert trainer.global_step == 3


def test_a_timer_and_a_learning_rate_monitor_run_along(tmp_path: Path) -> None:
    timer = Timer()
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(tmp_path, logger=logger, callbacks=[timer, LearningRateMonitor("step")])
    trainer.fit(TinyGRPO(lr=0.5), datamodule=Digits())
    assert timer.time_elapsed("train") > 0
    rows = list(csv.DictReader((Path(logger.log_dir) / "metrics.csv").read_text().splitlines()))
    assert [float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]] == [0.5] * 3
    assert [row["step"] for row in rows if row["rollout/reward"]] == ["0", "1", "2"]


def test_tensorboard_gets_every_iteration(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    make_trainer(tmp_path, logger=logger).fit(TinyGRPO(), datamodule=Digits())
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Scalars("policy/loss")] == [0, 1, 2]


def test_a_profiler_sees_the_phases(tmp_path: Path) -> None:
    profiler = SimpleProfiler()
    make_trainer(tmp_path, profiler=profiler).fit(TinyGRPO(), datamodule=Digits())
    for phase in ("rollout", "score", "update", "sync"):
        assert len(profiler.recorded_durations[f"rl/{phase}"]) == 3


# ---------------------------------------------------------------------- default callbacks and refusals


def test_default_callbacks_are_added_once(tmp_path: Path) -> None:
    given = StalenessControl(2)
    trainer = make_trainer(tmp_path, callbacks=given)
    found = {
        kind: [item for item in trainer.callbacks if isinstance(item, kind)]
        for kind in (StalenessControl, WeightSync, RolloutMetrics)
    }
    assert [len(items) for items in found.values()] == [1, 1, 1]
    assert found[StalenessControl] == [given]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"callbacks": [WeightSync(), WeightSync()]}, "A trainer takes one WeightSync callback, got 2"),
        ({"callbacks": [WeightSync(2)]}, r"every_n_iterations=2.*has max_staleness=0\. Increase"),
        (
            {"accumulate_grad_batches": 2},
            r"accumulate_grad_batches must be 1 .*got 2.*Set model\.microbatch_tokens",
        ),
        (
            {"callbacks": [GradientAccumulationScheduler({1: 2})]},
            "GradientAccumulationScheduler cannot be used with an RLModule: .*Set model.microbatch_tokens",
        ),
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder cannot be used .*several values of model.lr"),
        ({"callbacks": [BatchSizeFinder()]}, "BatchSizeFinder cannot be used .*`lightrl plan`"),
        ({"callbacks": [StochasticWeightAveraging(1e-3)]}, "StochasticWeightAveraging cannot be used .*exported"),
        ({"strategy": "ddp"}, "DDPStrategy cannot train an RLModule. .*FSDP2Strategy.*trainer.devices to 1"),
        ({"devices": 2}, "DDPStrategy cannot train an RLModule. .*FSDP2Strategy.*trainer.devices to 1"),
    ],
    ids=[
        "two of a kind",
        "sync rarer than staleness allows",
        "accumulation",
        "accumulation later",
        "learning rate finder",
        "batch size finder",
        "weight averaging",
        "ddp",
        "two devices",
    ],
)
def test_what_cannot_train_is_refused_before_anything_starts(
    flags: dict[str, Any], message: str, tmp_path: Path
) -> None:
    module = TinyGRPO()
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, **flags).fit(module, datamodule=Digits())
    assert not hasattr(module, "policy")


@pytest.mark.parametrize("method", ["lr_find", "scale_batch_size"])
def test_a_tuner_is_answered_with_what_to_do_instead(method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Finder cannot be used with an RLModule"):
        getattr(Tuner(make_trainer(tmp_path)), method)(TinyGRPO(), datamodule=Digits())


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    module = TinyGRPO()
    module.automatic_optimization = False
    with pytest.raises(ValueError, match="automatic_optimization must be True"):
        make_trainer(tmp_path).fit(module, datamodule=Digits())


def test_weights_may_be_synced_every_second_iteration(tmp_path: Path) -> None:
    module, engine = TinyGRPO(), lightrl.FakeEngine()
    trainer = make_trainer(tmp_path, engine=engine, callbacks=[WeightSync(2), StalenessControl(1)], max_steps=6)
    trainer.fit(module, datamodule=Digits())
    assert engine.loaded_versions == [0, 2, 4, 6]
    assert trainer.global_step == 6


def test_lightnings_own_trainer_says_which_one_is_needed(tmp_path: Path) -> None:
    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(RuntimeError, match=r"Use lightrl\.Trainer instead of lightning\.Trainer"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


# ---------------------------------------------------------------------- stages


def test_validate_test_and_predict_need_no_training(tmp_path: Path) -> None:
    module = TinyGRPO(validation_group_size=2, validation_sampling=Sampling(max_new_tokens=3))
    trainer = make_trainer(tmp_path, limit_val_batches=1.0)
    (validated,) = trainer.validate(module, datamodule=Digits(), verbose=False)
    (tested,) = trainer.test(module, datamodule=Digits(), verbose=False)
    assert {"val/reward", "val/accuracy_fraction", "val/pass_at_2_fraction"} <= validated.keys()
    assert tested["test/prompts"] == 4
    predicted = trainer.predict(module, datamodule=Digits())
    assert predicted is not None
    groups: list[Group] = [group for batch in predicted for group in batch]  # type: ignore[union-attr]
    assert [len(group.trajectories) for group in groups] == [2] * 4
    assert all(trajectory.reward is not None for group in groups for trajectory in group.trajectories)


def test_a_checkpoint_is_measured_as_the_run_that_saved_it(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, max_epochs=1)
    trainer.fit(TinyGRPO(lr=0.1), datamodule=Digits())
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


@pytest.mark.parametrize("engine", [None, lightrl.LocalEngine(), lightrl.FakeEngine()], ids=["default", "own", "fake"])
def test_one_trainer_does_one_stage_after_the_other(engine: Any, tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, engine=engine, limit_val_batches=1.0)
    trainer.fit(module, datamodule=Digits())
    assert trainer.validate(module, datamodule=Digits(), verbose=False)[0]["val/prompts"] == 4
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, datamodule=Digits())
    assert module.trained == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    assert trainer.test(module, datamodule=Digits(), verbose=False)[0]["test/prompts"] == 4


def test_two_fits_are_as_one(tmp_path: Path) -> None:
    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_steps=2)
    trainer.fit(module, datamodule=Digits())
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module, datamodule=Digits())
    whole = TinyGRPO()
    make_trainer(tmp_path, max_steps=4).fit(whole, datamodule=Digits())
    assert module.trained == whole.trained
    first_two = [seen.token_ids.tolist() for seen in whole.experiences[:2]]
    assert [seen.token_ids.tolist() for seen in module.experiences[:2]] == first_two


# ---------------------------------------------------------------------- other modules, other loaders


def test_a_plain_module_trains_as_with_lightnings_trainer(tmp_path: Path) -> None:
    final = []
    for kind in (L.Trainer, lightrl.Trainer):
        torch.manual_seed(0)
        module = BoringModel()
        trainer = kind(
            accelerator="cpu",
            max_epochs=1,
            limit_train_batches=5,
            limit_val_batches=1,
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            gradient_clip_val=0.5,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module)
        final.append((trainer.global_step, module.state_dict()))
    assert final[0][0] == final[1][0] == 3
    assert are_equal(final[0][1], final[1][1])


FIT = """
import warnings
warnings.simplefilter("always")
from lightning.pytorch.demos.boring_classes import BoringModel
from tiny_run import Digits, TinyGRPO, make_trainer
for module, data in ((TinyGRPO(), Digits()), (BoringModel(), None)):
    make_trainer(".", max_steps=1, limit_val_batches=0).fit(module, datamodule=data)
print("trained")
"""


@pytest.mark.parametrize("job", [None, "7"], ids=["outside a Slurm job", "in a Slurm job"])
def test_srun_on_the_path_is_mentioned_in_a_slurm_job_only(job: str | None, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    folders = [path for path in sys.path if path]
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(folders),
        **({} if job is None else {"SLURM_JOB_ID": job}),
    }
    command = [sys.executable, "-c", FIT]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.endswith("trained\n"), done.stderr
    assert ("srun" in done.stdout + done.stderr) is (job is not None)


QUESTIONS = ["0 1", "1 2", "2 3", "3 4", "4 5"]


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


def test_sft_trains_through_the_same_trainer(tmp_path: Path) -> None:
    rows = [{"question": QUESTIONS[index], "answer": str(index)} for index in range(4)]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(f'{{"question": "{row["question"]}", "answer": "{row["answer"]}"}}' for row in rows))
    module = lightrl.SFT(TinyGRPO().policy_spec, lr=0.05, lr_decay="constant")
    logged = Logged("sft/loss_nats")
    trainer = make_trainer(tmp_path, max_steps=10, callbacks=[logged])
    trainer.fit(module, datamodule=lightrl.SFTDataModule(str(file), batch_size=4))
    assert logged.values[-1] < logged.values[0] < 2 * math.log(8)


def test_prompts_that_are_prompts_need_no_data_module(tmp_path: Path) -> None:
    prompts = [Prompt(f"p{index}", token_ids=[2 + index]) for index in range(4)]
    module, trainer = TinyGRPO(), make_trainer(tmp_path, max_epochs=1, limit_val_batches=1.0, precision="bf16-true")
    loader = DataLoader(prompts, batch_size=BATCH_SIZE, collate_fn=list)  # type: ignore[arg-type]
    trainer.fit(module, loader, loader)
    assert trainer.callback_metrics["val/prompts"] == 4
