import logging
import time
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from scripted_run import ScriptedModule, ScriptedTrainer, batches

from lightrl.callbacks import RunCost
from lightrl.testing import make_groups

TOKENS = 2 * 2  # of an iteration: two trajectories, each of a token and the end token


class HalfAnHour(Callback):
    """An iteration takes half an hour by the clock that RunCost reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def on_train_batch_start(self, *_: Any) -> None:
        self.now += 1800


def fit(tmp_path: Any, cost: RunCost, clock: HalfAnHour, *, max_epochs: int = 1, ckpt_path: Any = None) -> Any:
    flags = {"default_root_dir": tmp_path, "callbacks": [clock, cost], "enable_progress_bar": False}
    trainer = ScriptedTrainer(max_epochs=max_epochs, **flags)
    module = ScriptedModule(lambda iteration: make_groups([[1.0, 0.0]]))
    trainer.fit(module, batches(2), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def test_hours_tokens_and_price_of_a_run_continue_when_it_resumes(tmp_path, monkeypatch, caplog):
    clock = HalfAnHour(monkeypatch)
    with caplog.at_level(logging.INFO):
        trainer = fit(tmp_path, RunCost(3.0, num_devices=8), clock)
    assert trainer.callback_metrics["cost/device_hours"] == 8  # two iterations
    assert trainer.callback_metrics["cost/trained_tokens"] == 2 * TOKENS
    assert trainer.callback_metrics["cost/price"] == 24
    assert float(trainer.callback_metrics["cost/price_per_million_tokens"]) == 24 / (2 * TOKENS) * 1e6
    assert "The run used 8 device hours for 8 trained tokens, price 24.00." in caplog.messages
    clock.now += 1e6  # the time after a run is not paid for
    trainer.save_checkpoint(tmp_path / "checkpoint")
    resumed = fit(tmp_path, RunCost(3.0, num_devices=8), clock, max_epochs=2, ckpt_path=tmp_path / "checkpoint")
    assert resumed.callback_metrics["cost/price"] == 48
    assert resumed.callback_metrics["cost/trained_tokens"] == 4 * TOKENS


def test_without_a_price_hours_and_tokens_are_logged_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    trainer = fit(tmp_path, RunCost(), HalfAnHour(monkeypatch))
    costs = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("cost/")}
    assert costs == {"cost/device_hours": 4.0, "cost/trained_tokens": 2 * TOKENS}


def test_negative_prices_and_no_devices_are_refused():
    with pytest.raises(ValueError, match="price_per_device_hour must be >= 0, got -1"):
        RunCost(-1)
    with pytest.raises(ValueError, match="num_devices must be >= 1, got 0"):
        RunCost(num_devices=0)
