"""What a Lightning user does by habit works with an RLModule: flags, callbacks, loggers, stages, loaders."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from digit_reward import token_reward
from habits import habit, refused
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BasePredictionWriter,
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    ModelSummary,
    OnExceptionCheckpoint,
    RichModelSummary,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    Timer,
    TQDMProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from lightning.pytorch.tuner import Tuner
from tiny_run import POLICY, Digits, Logged, TinyGRPO, are_equal, make_trainer, train, weights

import lightrl
from lightrl import GRPO, RolloutMetrics, Sampling, StalenessControl, WeightSync
from lightrl.callbacks.monitors import ALWAYS_LOGGED


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
    "the default ModelCheckpoint also writes `last.ckpt`, on Ctrl-C too; beside any ModelCheckpoint, `last-timed.ckpt` "
    "is saved every 10 minutes",
)
def test_the_default_checkpoint_has_a_last_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, enable_checkpointing=True).fit(TinyGRPO(), datamodule=Digits())
    assert {path.name for path in tmp_path.rglob("*.ckpt")} == {"last.ckpt", "epoch=0-step=3.ckpt"}


@habit(
    'EarlyStopping("val/reward", mode="max")',
    "checks after a validation; a name that looks mistyped causes a warning before models are loaded; a metric that "
    "is not logged ends the run after the sanity check or one iteration, with the names of those that are",
)
def test_early_stopping_ends_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = EarlyStopping("val/reward", mode="max", patience=1, min_delta=9.0)
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

    timer, profiler, losses, logged = Timer(), SimpleProfiler(), [], Logged("policy/loss")
    own = LambdaCallback(on_train_batch_end=lambda trainer, module, outputs, *_: losses.append(float(outputs["loss"])))
    loggers = [CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]
    callbacks = [timer, LearningRateMonitor("step"), DeviceStatsMonitor(cpu_stats=True), own, logged]
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
    "it searches for the steepest drop of the loss, but a policy's loss does not measure progress. Compare short runs "
    "with several values of model.lr."
)
MEMORY = (
    "it grows the batch until memory runs out, but microbatches are cut by tokens. Set model.microbatch_tokens; "
    "`lightrl plan` estimates the memory."
)
AVERAGES = (
    "it puts averaged weights into the policy when training ends, after the last sync with the engine and the last "
    "validation. Average checkpoints instead: lightrl export 1.ckpt 2.ckpt --to FOLDER."
)
FREEZES = (
    "it freezes layers before the models are loaded. In configure_model, call super().configure_model(), then "
    "requires_grad_(False) on what to freeze."
)


def callback(make: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {"callbacks": [make()]}


REFUSED = refused("test_lightning_callbacks", [
    ("LearningRateFinder()", callback(LearningRateFinder), CANNOT.format("LearningRateFinder") + FASTEST),
    ("BatchSizeFinder()", callback(BatchSizeFinder), CANNOT.format("BatchSizeFinder") + MEMORY),
    ("GradientAccumulationScheduler({1: 2})", callback(lambda: GradientAccumulationScheduler({1: 2})),
     CANNOT.format("GradientAccumulationScheduler") + "an update accumulates its microbatches' gradients already. Set "
     "model.microbatch_tokens, and model.num_minibatches for updates per iteration."),
    ("StochasticWeightAveraging(1e-3)", callback(lambda: StochasticWeightAveraging(1e-3)),
     CANNOT.format("StochasticWeightAveraging") + AVERAGES),
    ("WeightAveraging()", callback(WeightAveraging), CANNOT.format("WeightAveraging") + AVERAGES),
    ("EMAWeightAveraging()", callback(EMAWeightAveraging), CANNOT.format("EMAWeightAveraging") + AVERAGES),
    ("ThroughputMonitor(len)", callback(lambda: ThroughputMonitor(len)),
     CANNOT.format("ThroughputMonitor") + "it counts the samples of a batch, but an iteration's batch has none. "
     "`rollout/tokens_per_s` and `update/tokens_per_s` are logged anyway."),
    ("SpikeDetection()", callback(SpikeDetection),
     CANNOT.format("SpikeDetection") + "it compares the loss with earlier ones, but a policy's loss has no typical "
     "level. Set trainer.gradient_clip_val; an update without a finite gradient is skipped anyway."),
    ('ModelPruning("l1_unstructured")', callback(lambda: ModelPruning("l1_unstructured")),
     CANNOT.format("ModelPruning") + "it renames the parameters, so the engine would not find them. Prune the exported "
     "model instead."),
    ("RichProgressBar()", lambda: {"callbacks": [RichProgressBar()], "enable_progress_bar": True},
     CANNOT.format("RichProgressBar") + "its line is too short for an iteration's numbers and wraps. Leave it out to "
     "get RolloutProgressBar, which also shows the phases, or use TQDMProgressBar."),
    ("BackboneFinetuning()", callback(BackboneFinetuning), CANNOT.format("BackboneFinetuning") + FREEZES),
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


@pytest.mark.parametrize(
    "make", [lambda: EarlyStopping("val/rewrad", mode="max"), lambda: ModelCheckpoint(monitor="val/rewrad", mode="max")]
)
def test_a_mistyped_monitor_is_found_before_training(make: Any, tmp_path: Path) -> None:
    module, given = TinyGRPO(), make()
    trainer = make_trainer(
        tmp_path, limit_val_batches=1.0, num_sanity_val_steps=1, enable_checkpointing=True, callbacks=[given]
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared whole
        trainer.fit(module, datamodule=Digits())
    name = type(given).__name__
    assert str(error.value).startswith(
        f"{name} monitors val/rewrad, which is not logged. Did you mean val/reward? Logged metrics: val/"
    )
    assert module.trained == []


def test_a_monitor_that_looks_mistyped_is_named_before_models_are_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monitor, near = "policy/los", "policy/loss"

    class FailsToLoad(TinyGRPO):
        def configure_model(self) -> None:
            raise OSError("no such model")

    trainer = make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[EarlyStopping(monitor, mode="max")])
    with pytest.raises(OSError, match="no such model"):
        trainer.fit(FailsToLoad(), datamodule=Digits())
    (message,) = [message for message in caplog.messages if "monitors" in message]
    assert message == (
        f"EarlyStopping monitors {monitor}, which is logged only if your reward, module or a callback logs it. Did you "
        f"mean {near}?"
    )


def test_a_run_logs_what_every_run_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stops = [EarlyStopping(name, mode="max", patience=9) for name in sorted(ALWAYS_LOGGED)]
    trainer = train(tmp_path, limit_val_batches=1.0, max_epochs=2, callbacks=stops)
    assert trainer.callback_metrics.keys() >= ALWAYS_LOGGED
    assert not [message for message in caplog.messages if "monitors" in message]


def test_without_a_sanity_check_a_mistyped_monitor_is_found_by_the_first_rewards(tmp_path: Path) -> None:
    trained: list[int] = []
    counts = LambdaCallback(on_train_batch_end=lambda trainer, *_: trained.append(trainer.global_step))
    settings: dict[str, Any] = {"group_size": 4, "sampling": Sampling(max_new_tokens=6), "lr": 1e-2}
    module = GRPO(POLICY, reward=lambda item: {"reward": token_reward(item), "style": 0.5}, **settings)
    stop = EarlyStopping("val/stile", mode="max", patience=9)
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[stop, counts])
    with pytest.raises(ValueError, match=r"monitors val/stile, which is not logged\. Did you mean val/style\?"):
        trainer.fit(module, datamodule=Digits())
    assert trained == [1]


def test_a_mistyped_monitor_of_training_is_found_after_one_iteration(tmp_path: Path) -> None:
    module = TinyGRPO()
    trainer = make_trainer(tmp_path, callbacks=[EarlyStopping("rollout/rewrad", mode="max")])
    with pytest.raises(
        ValueError, match=r"monitors rollout/rewrad, which is not logged\. Did you mean rollout/reward\?"
    ):
        trainer.fit(module, datamodule=Digits())
    assert module.trained == [[0, 1]]


def built_in(reward: Any = token_reward) -> GRPO:
    return GRPO(POLICY, reward=reward, group_size=4, sampling=Sampling(max_new_tokens=6), lr=1e-2)


@pytest.mark.parametrize(
    ("monitor", "near"),
    [("val_reward", "val/reward"), ("rewrad", "val/reward"), ("valid/reward", "val/reward"), ("polcy/loss", "policy")],
)
def test_a_monitor_with_a_wrong_prefix_is_found_after_one_iteration(monitor: str, near: str, tmp_path: Path) -> None:
    stop, stages = EarlyStopping(monitor, mode="max"), Logged("rollout/reward")
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[stop])
    with pytest.raises(ValueError, match=rf"EarlyStopping monitors {monitor}, which is not logged\..*{near}"):
        trainer.fit(built_in(), datamodule=Digits())
    assert trainer.global_step == 1
    assert not stages.values


@pytest.mark.parametrize("monitor", ["step", "val/reward/a_label", "val/reward", "sync/probe_abs_dlogp_nats"])
def test_a_monitor_that_may_be_logged_later_is_left_alone(monitor: str, tmp_path: Path) -> None:
    stop = EarlyStopping(monitor, mode="max", check_on_train_epoch_end=False)
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[stop], max_steps=2)  # before a validation
    trainer.fit(built_in(), datamodule=Digits())
    assert trainer.global_step == 2


@pytest.mark.parametrize(
    "make", [lambda: EarlyStopping("style", mode="max"), lambda: ModelCheckpoint(monitor="style", mode="max")]
)
def test_a_monitor_that_users_code_might_log_is_an_error_where_it_is_missing(make: Any, tmp_path: Path) -> None:
    given, flags = make(), {"limit_val_batches": 1.0, "enable_checkpointing": True, "val_check_interval": 1}
    trainer = make_trainer(tmp_path, callbacks=[given], **flags)
    with pytest.raises(ValueError, match=f"{type(given).__name__} monitors style, which is not logged"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key:UserWarning")  # what the message prevents
@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        pytest.param(
            lambda: EarlyStopping("val/reward", check_on_train_epoch_end=False),
            {},
            "EarlyStopping never checks val/reward: the run has no validation.",
            id="no validation",
        ),
        pytest.param(
            lambda: ModelCheckpoint(monitor="val/reward"),
            {},
            "ModelCheckpoint never checks val/reward: the run has no validation.",
            id="no validation, checkpoint",
        ),
        pytest.param(
            lambda: EarlyStopping("val/reward"),
            {"limit_val_batches": 1.0, "val_check_interval": 4, "check_val_every_n_epoch": None},
            "EarlyStopping never checks val/reward: the run ends after iteration 3, before a validation.",
            id="interval",
        ),
        pytest.param(
            lambda: EarlyStopping("val/reward"),
            {"limit_val_batches": 1.0, "check_val_every_n_epoch": 2},
            "EarlyStopping never checks val/reward: the run ends after iteration 3, before a validation.",
            id="epochs",
        ),
        pytest.param(
            lambda: EarlyStopping("rollout/reward", check_on_train_epoch_end=True),
            {},
            "EarlyStopping never checks rollout/reward: it checks at the end of an epoch, and the run ends with",
            id="one epoch",
        ),
        pytest.param(
            lambda: ModelCheckpoint(monitor="rollout/reward", every_n_train_steps=4),
            {},
            "ModelCheckpoint never checks rollout/reward: every_n_train_steps=4, but the run ends after iteration 3.",
            id="saves",
        ),
    ],
)
def test_a_monitor_that_is_never_checked_is_named_at_the_start(
    make: Any, flags: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[make()], **flags).fit(TinyGRPO(), datamodule=Digits())
    assert next(text for text in caplog.messages if "never checks" in text).startswith(message)


@pytest.mark.parametrize(
    ("make", "flags"),
    [
        (lambda: EarlyStopping("val/reward", mode="max"), {"limit_val_batches": 1.0, "max_steps": 6}),
        (lambda: EarlyStopping("rollout/reward", mode="max"), {"max_epochs": 2}),
        (
            lambda: EarlyStopping("val/reward", mode="max", patience=9),
            {"limit_val_batches": 1.0, "val_check_interval": 3, "check_val_every_n_epoch": None},
        ),
        (lambda: ModelCheckpoint(monitor="rollout/reward", every_n_train_steps=3), {}),
        (lambda: ModelCheckpoint(every_n_train_steps=9), {}),
    ],
)
def test_a_monitor_that_is_checked_is_not_named(
    make: Any, flags: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[make()], **flags).fit(TinyGRPO(), datamodule=Digits())
    assert not [text for text in caplog.messages if "never checks" in text]


def test_a_monitor_that_need_not_be_there_is_left_alone(tmp_path: Path) -> None:
    stop = EarlyStopping("val/sometimes", mode="max", strict=False)
    trainer = train(tmp_path, limit_val_batches=1.0, num_sanity_val_steps=1, callbacks=[stop])
    assert trainer.global_step == 3


@habit("ModelSummary(max_depth=2)")
@habit("RichModelSummary()")
@pytest.mark.parametrize("make", [lambda: ModelSummary(max_depth=2), lambda: RichModelSummary(max_depth=2)])
def test_a_summary_has_the_policy(
    make: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    make_trainer(tmp_path, enable_model_summary=True, callbacks=[make()]).fit(TinyGRPO(), datamodule=Digits())
    assert "policy.model" in capsys.readouterr().out + caplog.text


@habit("TQDMProgressBar()", "shows one line; the default `RolloutProgressBar` also shows the phases")
def test_lightnings_progress_bar_shows_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, enable_progress_bar=True, callbacks=[TQDMProgressBar()])
    shown = capsys.readouterr()
    assert "reward" in shown.out + shown.err


class Writer(BasePredictionWriter):
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
