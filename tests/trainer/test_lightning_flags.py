"""What a Lightning user does by habit works with an RLModule: flags, callbacks, loggers, stages, loaders."""

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from habits import habit, refused, works
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_run import GROUP_SIZE, CountValidations, Digits, Logged, TinyGRPO, are_equal, make_trainer, train, weights

import lightrl
from lightrl.errors import LightRLError
from lightrl.trainer import set_device_defaults


@dataclass
class Run:
    """A run with one flag or more; `validations` are the iterations after which there was one."""

    trainer: lightrl.Trainer
    module: TinyGRPO
    validations: list[int]


class Stopping(Callback):
    """Asks for the end after each batch."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = True


def versions(run: Run) -> list[set[int]]:
    assert run.trainer.weight_version == run.trainer.global_step
    return [set(seen.weight_versions[seen.loss_mask].tolist()) for seen in run.module.experiences]


def epochs(run: Run) -> Any:
    positions = [position for batch in run.module.trained for position in batch]
    return run.trainer.current_epoch, run.trainer.rollout_loop.num_updates, positions


def limited(run: Run) -> Any:
    return run.module.trained, run.validations, float(run.trainer.callback_metrics["val/prompts"])


def prompts(run: Run) -> Any:
    return [seen.token_ids[::GROUP_SIZE, :3].tolist() for seen in run.module.experiences]


def ended_between_iterations(run: Run) -> bool:
    return run.trainer.global_step == len(run.module.trained) >= 1


def steps(run: Run) -> int:
    return run.trainer.global_step


def validations(run: Run) -> list[int]:
    return run.validations


STOPS: dict[str, Any] = {"max_steps": 9, "callbacks": [Stopping()]}
LIMITS = {"max_epochs": 2, "limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
VALIDATES: dict[str, Any] = {"limit_val_batches": 1.0, "check_val_every_n_epoch": None}
FLAGS = works("test_lightning_flags", [
    ("Trainer(max_steps=4)", "counts iterations; `global_step` is also the weight version",
     {"max_steps": 4}, versions, [{0}, {1}, {2}, {3}]),
    ("Trainer(max_epochs=2)", "", {"max_epochs": 2}, epochs, (2, 24, [*range(12)])),
    ('Trainer(max_time={"seconds": 1})', "", {"max_time": {"seconds": 1}}, ended_between_iterations, True),
    ("Trainer(limit_train_batches=2)", "", LIMITS, limited, ([[0, 1], [2, 3], [4, 5], [6, 7]], [0, 2, 4], 2.0)),
    ("Trainer(overfit_batches=1)", "", {"overfit_batches": 1, "max_epochs": 3}, prompts, [[[2, 2, 2], [3, 2, 2]]] * 3),
    ("Trainer(val_check_interval=2, check_val_every_n_epoch=None)",
     "an int counts iterations, a float is a fraction of an epoch",
     {**VALIDATES, "val_check_interval": 2, "max_steps": 6}, validations, [2, 4, 6]),
    ("Trainer(check_val_every_n_epoch=2)", "",
     {**VALIDATES, "check_val_every_n_epoch": 2, "max_epochs": 4}, validations, [6, 12]),
    ('Trainer(val_check_interval="00:00:10:00")', "",
     {**VALIDATES, "val_check_interval": timedelta(microseconds=1)}, validations, [1, 2, 3]),
    ("trainer.should_stop = True", "", STOPS, steps, 1),
    ("Trainer(min_steps=3)", "", {**STOPS, "min_steps": 3}, steps, 3),
    ("Trainer(min_epochs=2)", "", {**STOPS, "min_epochs": 2, "max_epochs": 3, "max_steps": -1}, steps, 6),
    ('Trainer(profiler="advanced")', "", {"profiler": "advanced"}, steps, 3),
])  # fmt: skip


@habit("Trainer(limit_val_batches=1)")
@habit("Trainer(num_sanity_val_steps=1)")
@pytest.mark.parametrize(("flags", "found", "expected"), FLAGS)
def test_a_flag_does_what_it_does_in_lightning(flags, found, expected, tmp_path):
    counts, module = CountValidations(), TinyGRPO(num_minibatches=2, update_epochs=2)
    trainer = make_trainer(tmp_path, **flags | {"callbacks": [counts, *flags.get("callbacks", [])]})
    trainer.fit(module, datamodule=Digits(validation_batch_size=2, shuffle=False))
    assert found(Run(trainer, module, counts.steps)) == expected


@habit(
    "Trainer(fast_dev_run=True)",
    "runs one iteration and one validation batch; writes nothing; saves the state of loops, callbacks, module and data "
    "module in memory, loads it with `weights_only=True` and compares",
)
def test_fast_dev_run_does_everything_once_and_checks_the_state(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="lightrl")
    module, counts = TinyGRPO(num_minibatches=2, update_epochs=2), CountValidations()
    trainer = train(tmp_path, module, fast_dev_run=True, limit_val_batches=1.0, callbacks=[counts])
    assert trainer.global_step == 1
    assert counts.steps == [1]
    assert trainer.callback_metrics["rollout/reward"] >= 0
    assert "module and data module survives a checkpoint" in caplog.text


class Counter(Callback):
    """A callback with state; a subclass saves what a checkpoint cannot keep."""

    def __init__(self) -> None:
        self.num: Any = 0

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.num += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num": self.num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num = state_dict["num"]


class Lossy:
    """Plain data of which a file keeps nothing."""

    num = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lossy) and self.num == other.num

    def __getstate__(self) -> None:
        return None


class Saves(Counter):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def state_dict(self) -> dict[str, Any]:
        saved = self.kind()
        saved.num = self.num
        return {"num": [saved]}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counter, r"because of checkpoint\['callbacks'\]\['Saves'\]\['num'\]\[0\].*Convert the state there"),
        (Lossy, r"checkpoint\['callbacks'\]\['Saves'\]\['num'\]\[0\] changes when it is saved and loaded"),
    ],
)
def test_fast_dev_run_fails_if_state_would_not_survive(kind: type, message: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, fast_dev_run=True, callbacks=[Saves(kind)])
    with torch.serialization.safe_globals([Lossy]), pytest.raises(LightRLError, match=f"(?s){message}"):
        trainer.fit(TinyGRPO(), datamodule=Digits())


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


@habit('Trainer(gradient_clip_algorithm="value")')
@habit("Trainer(gradient_clip_val=0.01)", "clips in each update; `policy/grad_norm` is the norm before clipping")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped(algorithm: Any, tmp_path: Path) -> None:
    seen, logged = GradientNorms(), Logged("policy/grad_norm")
    flags: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm, "max_steps": 4}
    make_trainer(tmp_path, callbacks=[seen, logged], **flags).fit(TinyGRPO(), datamodule=Digits())
    assert (seen.norms if algorithm == "norm" else seen.largest) == pytest.approx([0.01] * 3, rel=1e-3)
    assert min(logged.values) > 0.1  # of the gradient before clipping


@habit('Trainer(precision="bf16-mixed")')
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_every_precision_trains_validates_and_predicts(precision: Any, tmp_path: Path) -> None:
    module, before = TinyGRPO(), None
    flags: dict[str, Any] = {"limit_val_batches": 1.0, "limit_predict_batches": 1, "gradient_clip_val": 1.0}
    trainer = make_trainer(tmp_path, precision=precision, **flags)
    module.configure_model()
    before = weights(module)
    trainer.fit(module, datamodule=Digits())
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    after = weights(module)
    assert {value.dtype for value in after.values()} == {dtype}
    assert any(not torch.equal(before[name].to(dtype), after[name]) for name in after)
    assert 0 <= trainer.callback_metrics["val/reward"] <= 1
    assert trainer.engine.dtypes() == {"float32" if precision == "32-true" else "bfloat16"}
    assert trainer.callback_metrics["policy/kl_behavior_nats"] < (1e-9 if precision == "32-true" else 0.1)
    assert trainer.predict(module, datamodule=Digits())


def test_the_learning_rate_changes_per_iteration_not_per_update(tmp_path: Path) -> None:
    class Rates(Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates: list[float] = []
    module = TinyGRPO(lr=0.4, warmup_iterations=2, lr_decay="linear", num_minibatches=2)
    train(tmp_path, module, max_steps=4, callbacks=[Rates()])
    # warm-up (i + 1) / 2 up to 1, times the decay 1 - i / 4
    assert rates == pytest.approx([0.4 * 0.5, 0.4 * 0.75, 0.4 * 0.5, 0.4 * 0.25])


@habit("Trainer(detect_anomaly=True)")
def test_anomalies_are_detected(tmp_path: Path) -> None:
    class Wrong(TinyGRPO):
        def loss(self, experience: Any, outputs: Any) -> dict[str, torch.Tensor]:
            result = super().loss(experience, outputs)
            return {"loss": result["loss"] + 0.0 * (outputs.logprobs - outputs.logprobs.detach()).sqrt()}

    with pytest.warns(UserWarning, match="Error detected in"):
        with pytest.raises(RuntimeError, match="returned nan values"):
            make_trainer(tmp_path, detect_anomaly=True).fit(Wrong(), datamodule=Digits())


@habit("Trainer(limit_test_batches=1)")
@habit("Trainer(limit_predict_batches=1)")
def test_test_and_predict_may_be_shortened(tmp_path: Path) -> None:
    data = Digits(validation_batch_size=2)
    trainer = make_trainer(tmp_path, limit_test_batches=1, limit_predict_batches=1)
    (tested,) = trainer.test(TinyGRPO(), datamodule=data, verbose=False)
    assert tested["test/prompts"] == 2
    assert len(trainer.predict(TinyGRPO(), datamodule=data) or []) == 1


@habit("Trainer(log_every_n_steps=2)", "logs every second iteration; the default logs every iteration")
@habit("Trainer(default_root_dir=FOLDER)")
@habit("Trainer(logger=True)")
def test_the_default_logger_writes_into_the_root_folder(tmp_path: Path) -> None:
    train(tmp_path, logger=True, log_every_n_steps=2, max_steps=4)
    events = EventAccumulator(str(tmp_path / "lightning_logs" / "version_0")).Reload()
    assert [event.step for event in events.Scalars("policy/loss")] == [2, 4]


@habit("Trainer(logger=False)")
@habit("Trainer(enable_checkpointing=False)")
@habit("Trainer(enable_progress_bar=False)")
@habit("Trainer(enable_model_summary=False)")
def test_a_run_without_any_output_writes_and_prints_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path)  # these four flags
    trainer.fit(TinyGRPO(), datamodule=Digits())
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""
    assert trainer.callback_metrics["rollout/reward"] >= 0


class Hyperparameters(TinyGRPO):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()


@habit("Trainer(enable_autolog_hparams=False)")
@habit("self.save_hyperparameters()")
@pytest.mark.parametrize("is_on", [True, False])
def test_hyperparameters_reach_the_logger(is_on: bool, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    train(tmp_path, Hyperparameters(0.5), logger=logger, enable_autolog_hparams=is_on)
    assert logger.experiment.hparams == ({"lr": 0.5} if is_on else {})


@habit("Trainer(deterministic=True)")
@habit("Trainer(benchmark=False)")
@habit("Trainer(inference_mode=False)")
@habit("Trainer(use_distributed_sampler=False)")
@habit("Trainer(sync_batchnorm=True)")
@habit("Trainer(reload_dataloaders_every_n_epochs=1)")
@habit('Trainer(accelerator="cpu", devices=1, num_nodes=1)')
@habit('Trainer(model_registry="name")')
def test_these_flags_change_no_result(tmp_path: Path) -> None:
    flags = {
        "deterministic": True, "benchmark": False, "inference_mode": False, "use_distributed_sampler": False,
        "sync_batchnorm": True, "reload_dataloaders_every_n_epochs": 1, "num_nodes": 1, "devices": 1,
        "model_registry": "name",
    }  # fmt: skip
    results = []
    for given in ({}, flags):
        module, trainer = TinyGRPO(), make_trainer(tmp_path, max_epochs=2, limit_val_batches=1.0, **given)
        try:
            trainer.fit(module, datamodule=Digits())
        finally:
            torch.use_deterministic_algorithms(False)
        results.append((module.trained, weights(module)))
    assert results[0][0] == results[1][0]
    assert are_equal(results[0][1], results[1][1])


@habit("Trainer(plugins=[AsyncCheckpointIO()])")
def test_a_checkpoint_plugin_writes_checkpoints_that_resume(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, save_last=True)
    flags = {"enable_checkpointing": True, "callbacks": [saved], "plugins": [AsyncCheckpointIO()]}
    make_trainer(tmp_path, max_steps=2, **flags).fit(TinyGRPO(), datamodule=Digits())
    resumed, whole = TinyGRPO(), TinyGRPO()
    make_trainer(tmp_path, max_steps=4).fit(resumed, datamodule=Digits(), ckpt_path=tmp_path / "last.ckpt")
    make_trainer(tmp_path, max_steps=4).fit(whole, datamodule=Digits())
    assert are_equal(weights(resumed), weights(whole))


@habit("Trainer(barebones=True)")
def test_a_bare_run_trains(tmp_path: Path) -> None:
    module = TinyGRPO()
    trainer = lightrl.Trainer(accelerator="cpu", barebones=True, max_steps=2, default_root_dir=tmp_path)
    trainer.fit(module, datamodule=Digits())
    assert module.trained == [[0, 1], [2, 3]]
    assert list(tmp_path.iterdir()) == []


DDP = (
    "DDPStrategy cannot train an RLModule. Set trainer.strategy to FSDP2Strategy, which gives the same gradients (if "
    "num_replicas is the number of processes, each has a whole copy, as in DDP), or set trainer.devices to 1."
)
REFUSED = refused(
    "test_lightning_flags",
    [
        (
            "Trainer(accumulate_grad_batches=2)",
            lambda: {"accumulate_grad_batches": 2},
            "accumulate_grad_batches must be 1 with an RLModule, got 2: microbatches are split by tokens. Set "
            "model.microbatch_tokens instead.",
        ),
        ('Trainer(strategy="ddp")', lambda: {"strategy": "ddp"}, DDP),
    ],
)


@pytest.mark.parametrize(("flags", "sentence"), REFUSED)
def test_these_flags_are_refused_before_anything_starts(flags: Any, sentence: str, tmp_path: Path) -> None:
    module = TinyGRPO()
    with pytest.raises(ValueError) as error:  # noqa: PT011  # compared whole
        make_trainer(tmp_path, **flags()).fit(module, datamodule=Digits())
    assert str(error.value) == sentence
    assert not hasattr(module, "policy")


@pytest.mark.parametrize(
    ("flags", "precision"),
    [
        ({}, "bf16-mixed"),
        ({"accelerator": "gpu", "precision": None}, "bf16-mixed"),
        ({"precision": "32-true"}, "32-true"),
        ({"accelerator": "cpu"}, None),
        ({"plugins": ["its own precision"]}, None),
    ],
)
def test_a_run_on_a_cuda_gpu_is_bf16_mixed_unless_the_user_says_otherwise(
    flags: dict[str, Any], precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = torch.get_float32_matmul_precision()
    set_device_defaults(flags)
    has_tf32 = torch.get_float32_matmul_precision() == "high"
    torch.set_float32_matmul_precision(before)
    assert flags.get("precision") == precision
    assert has_tf32 is (precision == "bf16-mixed")


def test_mps_counts_as_a_cpu_unless_the_user_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for given, expected in ((None, "cpu"), ("auto", "cpu"), ("mps", "mps"), ("cpu", "cpu")):
        flags: dict[str, Any] = {"accelerator": given}
        set_device_defaults(flags)
        assert flags["accelerator"] == expected
