"""A monitored metric that is not logged or never checked is named early, with what was meant."""

import re
from pathlib import Path
from typing import Any

import pytest
from digit_reward import token_reward
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from tiny_run import POLICY, Digits, TinyGRPO, make_trainer, train

from lightrl import GRPO, Sampling
from lightrl.callbacks.monitors import ALWAYS_LOGGED


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
    assert not [message for message in caplog.messages if "monitors" in message or "never checks" in message]


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


def built_in(reward: Any = token_reward) -> GRPO:
    return GRPO(POLICY, reward=reward, group_size=4, sampling=Sampling(max_new_tokens=6), lr=1e-2)


@pytest.mark.parametrize(
    ("monitor", "near"),
    [("rollout/rewrad", "rollout/reward"), ("val_reward", "val/reward"), ("valid/reward", "val/reward")],
)
def test_a_monitor_with_a_wrong_prefix_is_found_after_one_iteration(monitor: str, near: str, tmp_path: Path) -> None:
    stop = EarlyStopping(monitor, mode="max")
    trainer = make_trainer(tmp_path, limit_val_batches=1.0, callbacks=[stop])
    with pytest.raises(ValueError, match=rf"EarlyStopping monitors {monitor}, which is not logged\..*{near}") as error:
        trainer.fit(built_in(), datamodule=Digits())
    shown = re.search(
        r"The closest of (\d+) logged metrics: (.*?)\. docs/reference/metrics.md has all", str(error.value)
    )
    assert len(shown[2].split(", ")) == 8 < int(shown[1])
    assert trainer.global_step == 1


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


VALIDATED: dict[str, Any] = {"limit_val_batches": 1.0}
LATE: dict[str, Any] = {**VALIDATED, "val_check_interval": 4, "check_val_every_n_epoch": None}


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key:UserWarning")  # what the message prevents
@pytest.mark.parametrize(
    ("make", "flags", "message"),
    [
        (lambda: EarlyStopping("val/reward", check_on_train_epoch_end=False), {}, "the run has no validation."),
        (lambda: ModelCheckpoint(monitor="val/reward"), {}, "the run has no validation."),
        (lambda: EarlyStopping("val/reward"), LATE, "the run ends after iteration 3, before a validation."),
        (lambda: EarlyStopping("val/reward"), {**VALIDATED, "check_val_every_n_epoch": 2}, "the run ends after iter"),
        (
            lambda: EarlyStopping("val/reward", check_on_train_epoch_end=True),
            VALIDATED,
            "it checks only after an epoch",
        ),
        (lambda: ModelCheckpoint(monitor="val/reward", every_n_train_steps=4), VALIDATED, "every_n_train_steps=4, but"),
    ],
    ids=["no validation", "no validation, checkpoint", "interval", "epochs", "one epoch", "saves"],
)
def test_a_monitor_that_is_never_checked_is_named_at_the_start(
    make: Any, flags: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    item = make()
    make_trainer(tmp_path, enable_checkpointing=True, callbacks=[item], **flags).fit(TinyGRPO(), datamodule=Digits())
    start = f"{type(item).__name__} never checks val/reward: {message}"
    assert next(text for text in caplog.messages if "never checks" in text).startswith(start)


def test_an_early_stop_is_named_whatever_the_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Model(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", 1.0)

    flags: dict[str, Any] = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 9}
    trainer = make_trainer(tmp_path, callbacks=[EarlyStopping("val/loss", patience=2)], **flags)
    with caplog.at_level("INFO", logger="lightrl"):
        trainer.fit(Model(), datamodule=BoringDataModule())
    text = "EarlyStopping after iteration 6: Monitored metric val/loss did not improve in the last 2 records. Best"
    assert [message for message in caplog.messages if message.startswith(text)]


def test_a_monitor_that_need_not_be_there_is_left_alone(tmp_path: Path) -> None:
    stop = EarlyStopping("val/sometimes", mode="max", strict=False)
    trainer = train(tmp_path, limit_val_batches=1.0, num_sanity_val_steps=1, callbacks=[stop])
    assert trainer.global_step == 3


def test_steps_of_several_batches_are_not_taken_for_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Model(BoringModel):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/loss", self.step(batch))

    saving = ModelCheckpoint(monitor="val/loss")
    flags: dict[str, Any] = {"limit_train_batches": 4, "limit_val_batches": 1, "accumulate_grad_batches": 4}
    trainer = make_trainer(tmp_path, enable_checkpointing=True, callbacks=[saving], max_steps=1, **flags)
    trainer.fit(Model(), datamodule=BoringDataModule())
    assert saving.best_model_path
    assert "never checks" not in caplog.text
