"""What a Lightning user does by habit works with an RLModule: flags, callbacks, loggers, stages, loaders."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from habits import habit, refused
from lightning.pytorch import callbacks as ready
from lightning.pytorch.callbacks import Callback, LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from tiny_run import Digits, Logged, TinyGRPO, are_equal, make_trainer, train, weights

import lightrl
from lightrl import RolloutMetrics, StalenessControl, WeightSync


@habit('ModelCheckpoint(monitor="rollout/reward", mode="max", every_n_train_steps=2)')
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(
        tmp_path, monitor="rollout/reward", mode="max", every_n_train_steps=2, save_last=True, filename="{step}"
    )
    logged = Logged("rollout/reward")
    train(tmp_path, max_steps=6, enable_checkpointing=True, callbacks=[checkpoint, logged])
    best = max((reward, step) for step, reward in enumerate(logged.values, 1) if step % 2 == 0)
    assert checkpoint.best_model_score == pytest.approx(best[0])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["last.ckpt", f"step={best[1]}.ckpt"]
    assert torch.load(tmp_path / "last.ckpt")["global_step"] == 6


@pytest.mark.parametrize(
    ("filename", "settings", "name"),
    [
        ("{step}-{val/reward:.2f}", {}, r"step=3-val_reward=-?\d\.\d\d\.ckpt"),
        ("{val/reward}-{val/length_tokens}", {}, r"val_reward=-?[\d.]+-val_length_tokens=[\d.]+\.ckpt"),
        ("best-{val/reward:.1f}", {"auto_insert_metric_name": False}, r"best--?\d\.\d\.ckpt"),
        ("step={step:03d}", {}, r"step=step=003\.ckpt"),  # Lightning's own insertion
    ],
)
def test_a_slash_in_a_metrics_name_makes_no_folder(
    filename: str, settings: dict[str, Any], name: str, tmp_path: Path
) -> None:
    best = ModelCheckpoint(
        tmp_path / "saved", filename, monitor="val/reward", save_on_train_epoch_end=False, **settings
    )
    best.CHECKPOINT_NAME_LAST = "last-{val/reward:.2f}"
    best.save_last = True
    train(tmp_path, enable_checkpointing=True, callbacks=[best], limit_val_batches=1.0)
    names = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert all(path.is_file() for path in (tmp_path / "saved").iterdir())
    assert [item for item in names if re.fullmatch(name, item)]
    assert [item for item in names if item.startswith("last-")]


@habit(
    "Trainer(enable_checkpointing=True)",
    "the default ModelCheckpoint also writes `last.ckpt`, including on Ctrl-C; with any ModelCheckpoint, "
    "`last-timed.ckpt` is saved every 10 minutes",
)
def test_the_default_checkpoint_has_a_last_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, enable_checkpointing=True).fit(TinyGRPO(), datamodule=Digits())
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"last.ckpt", "epoch=0-step=3.ckpt"}


@habit('EarlyStopping("val/reward", mode="max")', "checks after a validation; see [above](#monitored-metrics)")
def test_early_stopping_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = ready.EarlyStopping("val/reward", mode="max", patience=1, min_delta=9.0)
    with caplog.at_level("INFO", logger="lightrl"):
        trainer = train(tmp_path, max_epochs=5, limit_val_batches=1.0, callbacks=[stop])
    assert trainer.global_step == 6
    text = r"EarlyStopping after iteration 6: Monitored metric val/reward did not improve in the last 1 records. Best"
    assert text in caplog.text


@habit(
    "LambdaCallback(on_train_batch_end=...)",
    "all of Lightning's hooks work; `outputs[\"loss\"]` is the iteration's mean",
)
@habit("DeviceStatsMonitor()")
@habit('Trainer(profiler="simple")', "also times the phases: `rl/rollout`, `rl/score`, `rl/update`, `rl/sync`")
@habit('TensorBoardLogger("runs")')
@habit("Timer()")
@habit('LearningRateMonitor("step")')
@habit('CSVLogger("runs")')
def test_callbacks_loggers_and_a_profiler_run_along(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    timer, profiler, losses, logged = ready.Timer(), SimpleProfiler(), [], Logged("policy/loss")
    own = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(float(outputs["loss"])))
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    callbacks = [timer, ready.LearningRateMonitor("step"), ready.DeviceStatsMonitor(cpu_stats=True), own, logged]
    train(tmp_path, TinyGRPO(lr=0.5), logger=loggers, callbacks=callbacks, profiler=profiler)
    assert timer.time_elapsed("train") > 0
    assert losses == logged.values
    for phase in ("rollout", "score", "update", "sync"):
        assert len(profiler.recorded_durations[f"rl/{phase}"]) == 3
    rows = list(csv.DictReader((Path(loggers[0].log_dir) / "metrics.csv").read_text().splitlines()))
    assert [float(row["lr-AdamW"]) for row in rows if row["lr-AdamW"]] == [0.5] * 3
    assert [row["step"] for row in rows if row["rollout/reward"]] == ["1", "2", "3"]
    assert "DeviceStatsMonitor.on_train_batch_end/cpu_percent" in rows[0]
    events = EventAccumulator(loggers[1].log_dir).Reload()
    assert [event.step for event in events.Scalars("policy/loss")] == [1, 2, 3]


@habit(
    'Trainer(profiler="pytorch")',
    "records the third to fifth iteration, with the phases, or the whole run if an epoch or a validation has "
    "fewer than five batches, as in Lightning",
)
@pytest.mark.parametrize("num_iterations", [5, 7])
def test_the_pytorch_profiler_records_three_iterations_of_any_run(num_iterations: int, tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    train(tmp_path, TinyGRPO(), Digits(num_prompts=12), max_steps=num_iterations, profiler=profiler)
    assert "rl/update" in (tmp_path / "fit-profile.txt").read_text()
    (trace,) = tmp_path.glob("*.pt.trace.json")
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event.get("ph") == "X"]
    for phase in ("rollout", "score", "update", "sync"):
        assert names.count(f"[pl][profile]rl/{phase}") == 3


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule will be overridden:UserWarning")
def test_the_pytorch_profiler_records_the_whole_of_a_short_run(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(dirpath=tmp_path, filename="profile")
    make_trainer(tmp_path, max_steps=4, profiler=profiler).fit(TinyGRPO(), datamodule=Digits())  # 3 in an epoch
    (trace,) = tmp_path.glob("*.pt.trace.json")
    assert json.loads(trace.read_text())["traceEvents"]
    assert "rl/update" in (tmp_path / "fit-profile.txt").read_text()


def test_default_callbacks_are_added_once(tmp_path: Path) -> None:
    given = StalenessControl(2)
    trainer = make_trainer(tmp_path, callbacks=given)
    found = {
        kind: [item for item in trainer.callbacks if isinstance(item, kind)]
        for kind in (StalenessControl, WeightSync, RolloutMetrics)
    }
    assert [len(items) for items in found.values()] == [1, 1, 1]
    assert found[StalenessControl] == [given]


CANNOT = "{} cannot be used with an RLModule: "
FASTEST = (
    "it searches for the steepest drop in the loss, but a policy's loss does not measure progress. Compare short runs "
    "with several values of model.lr."
)
MEMORY = (
    "it grows the batch until memory runs out, but microbatches are split by tokens. Set model.microbatch_tokens; "
    "`lightrl plan` estimates the memory."
)
AVERAGES = (
    "it puts averaged weights into the policy when training ends, after the last sync with the engine and the last "
    "validation. Average checkpoints instead: lightrl export 1.ckpt 2.ckpt --to FOLDER."
)
FREEZES = (
    "it freezes layers before the models are loaded. In configure_model, call super().configure_model(), then "
    "requires_grad_(False) on the layers to freeze."
)


def callback(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()]}


REFUSED = refused("test_lightning_callbacks", [
    ("LearningRateFinder()", callback(ready.LearningRateFinder), CANNOT.format("LearningRateFinder") + FASTEST),
    ("BatchSizeFinder()", callback(ready.BatchSizeFinder), CANNOT.format("BatchSizeFinder") + MEMORY),
    ("GradientAccumulationScheduler({1: 2})", callback(lambda: ready.GradientAccumulationScheduler({1: 2})),
     CANNOT.format("GradientAccumulationScheduler") + "an update accumulates its microbatches' gradients already. Set "
     "model.microbatch_tokens, and model.num_minibatches for updates per iteration."),
    ("StochasticWeightAveraging(1e-3)", callback(lambda: ready.StochasticWeightAveraging(1e-3)),
     CANNOT.format("StochasticWeightAveraging") + AVERAGES),
    ("WeightAveraging()", callback(ready.WeightAveraging), CANNOT.format("WeightAveraging") + AVERAGES),
    ("EMAWeightAveraging()", callback(ready.EMAWeightAveraging), CANNOT.format("EMAWeightAveraging") + AVERAGES),
    ("ThroughputMonitor(len)", callback(lambda: ready.ThroughputMonitor(len)),
     CANNOT.format("ThroughputMonitor") + "it counts the samples in a batch, but an iteration's batch has none. "
     "`rollout/tokens_per_s` and `update/tokens_per_s` are logged anyway."),
    ("SpikeDetection()", callback(ready.SpikeDetection),
     CANNOT.format("SpikeDetection") + "it compares the loss with earlier ones, but a policy's loss has no typical "
     "level. Set trainer.gradient_clip_val; an update without a finite gradient is skipped anyway."),
    ('ModelPruning("l1_unstructured")', callback(lambda: ready.ModelPruning("l1_unstructured")),
     CANNOT.format("ModelPruning") + "it renames the parameters, so the engine would not find them. Prune the exported "
     "model instead."),
    ("RichProgressBar()", lambda: {"callbacks": [ready.RichProgressBar()], "enable_progress_bar": True},
     CANNOT.format("RichProgressBar") + "its line is too short for an iteration's numbers and wraps. Leave it out to "
     "get RolloutProgressBar, which also shows the phases, or use TQDMProgressBar."),
    ("BackboneFinetuning()", callback(ready.BackboneFinetuning), CANNOT.format("BackboneFinetuning") + FREEZES),
    ("Tuner(trainer).lr_find(module)", lambda: {"tunes": "lr_find"}, CANNOT.format("LearningRateFinder") + FASTEST),
    ("Tuner(trainer).scale_batch_size(module)", lambda: {"tunes": "scale_batch_size"},
     CANNOT.format("BatchSizeFinder") + MEMORY),
    ("WeightSync(2) and max_staleness=0", callback(lambda: WeightSync(2)),
     "WeightSync(every_n_iterations=2) lets the staleness reach 1, but StalenessControl has max_staleness=0. Increase "
     "it to 1, or sync more often."),
    ("[WeightSync(), WeightSync()]", lambda: {"callbacks": [WeightSync(), WeightSync()]},
     "A trainer takes one WeightSync callback, got 2."),
])  # fmt: skip


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_what_cannot_train_is_refused_before_anything_starts(flags: Any, sentence: str, tmp_path: Path) -> None:
    module, given = TinyGRPO(), flags()
    tunes = given.pop("tunes", None)
    trainer = make_trainer(tmp_path, **given)
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared whole
        (getattr(Tuner(trainer), tunes) if tunes else trainer.fit)(module, datamodule=Digits())
    assert str(error.value) == sentence
    assert not hasattr(module, "policy")


def test_weights_may_be_synced_every_second_iteration(tmp_path: Path) -> None:
    module, engine = TinyGRPO(), lightrl.FakeEngine()
    trainer = train(tmp_path, module, engine=engine, callbacks=[WeightSync(2), StalenessControl(1)], max_steps=6)
    assert engine.loaded_versions == [0, 2, 4, 6]
    assert trainer.global_step == 6


@habit("ModelSummary(max_depth=2)")
@habit("RichModelSummary()")
@pytest.mark.parametrize("make", [lambda: ready.ModelSummary(max_depth=2), lambda: ready.RichModelSummary(max_depth=2)])
def test_a_summary_has_the_policy(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make_trainer(tmp_path, enable_model_summary=True, callbacks=[make()]).fit(TinyGRPO(), datamodule=Digits())
    assert "policy.model" in capsys.readouterr().out + caplog.text


@habit("TQDMProgressBar()", "shows one line; the default `RolloutProgressBar` also shows the phases")
def test_lightnings_progress_bar_shows_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, enable_progress_bar=True, callbacks=[ready.TQDMProgressBar()])
    shown = capsys.readouterr()
    assert "reward" in shown.out + shown.err


class Writer(ready.BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.batches.append(prediction)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.epoch = predictions


@habit("BasePredictionWriter", "gets the groups of each batch, with their rewards")
def test_a_prediction_writer_gets_the_groups(tmp_path: Path) -> None:
    writer = Writer()
    make_trainer(tmp_path, callbacks=[writer]).predict(TinyGRPO(), datamodule=Digits(validation_batch_size=2))
    assert [len(groups) for groups in writer.batches] == [2, 2]
    assert writer.epoch == writer.batches
    assert all(item.reward is not None for groups in writer.batches for group in groups for item in group.trajectories)


class Fails(Callback):
    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            raise RuntimeError("on request")


@habit(
    "OnExceptionCheckpoint(FOLDER)",
    "saves between iterations; within one it saves nothing, since a resume would repeat or skip groups",
)
@pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=")
def test_an_exception_leaves_a_checkpoint_that_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnExceptionCheckpoint, "teardown", Callback.teardown)  # which removes it after a good end
    callbacks = [OnExceptionCheckpoint(tmp_path), Fails()]
    with pytest.raises(RuntimeError, match="on request"):
        make_trainer(tmp_path, callbacks=callbacks, enable_checkpointing=True).fit(TinyGRPO(), datamodule=Digits())
    resumed, whole = TinyGRPO(), TinyGRPO()
    make_trainer(tmp_path).fit(resumed, datamodule=Digits(), ckpt_path=tmp_path / "on_exception.ckpt")
    make_trainer(tmp_path).fit(whole, datamodule=Digits())
    assert resumed.trained == [[4, 5]]
    assert are_equal(weights(resumed), weights(whole))


@pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=")
def test_an_exception_before_the_models_are_there_is_not_hidden_by_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FailsToLoad(TinyGRPO):
        def configure_model(self) -> None:
            raise OSError("no such model")

    saves = OnExceptionCheckpoint(tmp_path)
    with pytest.raises(OSError, match="no such model"):
        make_trainer(tmp_path, callbacks=[saves], enable_checkpointing=True).fit(FailsToLoad(), datamodule=Digits())
    assert "No checkpoint was saved at" in caplog.text
