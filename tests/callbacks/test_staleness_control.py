"""StalenessControl warns of deadlines that contradict each other."""

import itertools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.callbacks.lag_probe import STEP
from lightrl.callbacks.staleness import ESS, GRAD_NORM, KL, StalenessControl
from lightrl.rollout import RolloutSettings


@pytest.mark.parametrize(("reward_timeout_s", "num_warnings"), [(1800, 0), (1801, 1)], ids=["as long", "longer"])
def test_a_reward_that_may_take_longer_than_a_batch_is_waited_for_is_warned_of(
    reward_timeout_s: float, num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True)
    module: Any = SimpleNamespace(reward_timeout_s=reward_timeout_s)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        StalenessControl().configure_rollout(trainer, module, RolloutSettings())
    assert len(caplog.messages) == num_warnings
    assert all("Increase StalenessControl.rollout_timeout_s" in message for message in caplog.messages)


def log_values(control, values, *, name=ESS, is_main=True, first=1000, grad_norms=()):
    """Iterations from `first` on, counted from 1, with these values of one metric, and of the gradient norm."""
    module: Any = None
    for number, (value, grad_norm) in enumerate(itertools.zip_longest(values, grad_norms), first):
        metrics = {name: torch.tensor(value)}
        if grad_norm is not None:
            metrics[GRAD_NORM] = torch.tensor(grad_norm)
        trainer: Any = SimpleNamespace(callback_metrics=metrics, is_global_zero=is_main, global_step=number)
        control.on_train_batch_end(trainer, module, None, None, 0)


ESS_LOW = "policy/ess_fraction was 0.1, below 0.15, in the mean of the last 10 iterations: "
KL_HIGH = "policy/kl_behavior_nats was 2.81, above 2.8, in the mean of the last 10 iterations: "
STEP_HIGH = "policy/step_k3_nats was 0.0147, above 0.014 = 0.014 · √policy/grad_norm, in the geometric mean of "
LARGER = "policy/step_k3_nats was 0.0172, above 0.0171"
ONE_LARGE = [1.0] * 29 + [16.0]  # mean 1.5, so a bound of 0.014 · √1.5 = 0.0171


@pytest.mark.parametrize(
    ("name", "values", "settings", "starts"),
    [
        pytest.param(ESS, [0.1] * 9, {}, [], id="too few iterations to tell"),
        pytest.param(ESS, [0.1] * 29, {}, [ESS_LOW], id="few tokens with all the weight"),
        pytest.param(ESS, [0.1] * 29 + [0.9] * 10 + [0.1] * 20, {}, [ESS_LOW] * 2, id="again after it recovered"),
        pytest.param(ESS, [1.0] * 10 + [0.01] + [1.0] * 10 + [0.16] * 30, {}, [], id="one low, then moderate"),
        pytest.param(ESS, [0.1] * 30, {"is_main": False}, [], id="on another rank"),
        # (20 + 2 · 2.5 + 7 · 0.1) / 10 = 2.57; with 3 of 2.5 it is 2.81
        pytest.param(KL, [0.1] * 10 + [20.0] + [2.5] * 2, {}, [], id="one far away"),
        pytest.param(KL, [0.1] * 10 + [20.0] + [2.5] * 8 + [2.75] * 30, {}, [KL_HIGH], id="far away, weights even"),
        # 0.001^(15/30) · 100^(1/30) · 0.1^(14/30) = 0.0126; with one of 0.1 more it is 0.0147
        pytest.param(STEP, [0.001] * 29 + [100.0] + [0.1] * 14, {}, [], id="one large step"),
        pytest.param(STEP, [0.001] * 29 + [100.0] + [0.1] * 24, {}, [STEP_HIGH], id="large steps"),
        pytest.param(STEP, [0.05] * 29 + [0.0] + [0.05] * 29, {}, [], id="one that is not known"),
        pytest.param(STEP, [1.0] * 20 + [0.0125] * 30, {"first": 1}, [], id="the first 20 do not count"),
        pytest.param(STEP, [0.0171] * 30, {"grad_norms": ONE_LARGE}, [], id="a step of a large gradient"),
        pytest.param(STEP, [0.0172] * 30, {"grad_norms": ONE_LARGE}, [LARGER], id="larger"),
        pytest.param(STEP, [0.0001] * 40, {"grad_norms": [0.0] * 40}, [], id="nothing to learn from"),
    ],
)
def test_a_warning_names_what_has_gone_too_far_once_until_it_recovers(name, values, settings, starts, caplog):
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        log_values(StalenessControl(8), values, name=name, **settings)
    assert len(caplog.messages) == len(starts)
    assert all(message.startswith(start) for message, start in zip(caplog.messages, starts, strict=True))
    assert name != ESS or all("Lower lr or max_staleness" in message for message in caplog.messages)


def test_a_resumed_run_warns_when_it_would_have_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    first, resumed, warned = StalenessControl(8), StalenessControl(8), StalenessControl(8)
    log_values(first, [0.1] * 9)
    resumed.load_state_dict(first.state_dict())
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        log_values(resumed, [0.1])
        assert len(caplog.messages) == 1
        warned.load_state_dict(resumed.state_dict())
        log_values(warned, [0.1] * 20)
    assert len(caplog.messages) == 1
