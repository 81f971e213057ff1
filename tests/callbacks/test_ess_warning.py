from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightrl.callbacks.lag_probe import STEP
from lightrl.callbacks.staleness import ESS, GRAD_NORM, KL, StalenessControl


def play(
    control: StalenessControl,
    values: list[float],
    *,
    name: str = ESS,
    is_main: bool = True,
    first: int = 1000,
    grad_norms: Sequence[float] = (),
) -> None:
    """Iterations from `first` on, counted from 1, with these values of one metric, and of the gradient norm."""
    module: Any = None
    for number, (value, grad_norm) in enumerate(itertools.zip_longest(values, grad_norms), first):
        metrics = {name: torch.tensor(value)}
        if grad_norm is not None:
            metrics[GRAD_NORM] = torch.tensor(grad_norm)
        trainer: Any = SimpleNamespace(callback_metrics=metrics, is_global_zero=is_main, global_step=number)
        control.on_train_batch_end(trainer, module, None, None, 0)


def test_few_tokens_with_all_the_weight_warn_once_until_it_recovers(caplog: pytest.LogCaptureFixture) -> None:
    control = StalenessControl(8)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        play(control, [0.1] * 9)
        assert not caplog.messages  # too few iterations to tell
        play(control, [0.1] * 20)
        assert len(caplog.messages) == 1
        start = "policy/ess_fraction was 0.1, below 0.15, in the mean of the last 10 iterations: "
        assert caplog.messages[0].startswith(start)
        assert "Lower lr or max_staleness" in caplog.messages[0]
        play(control, [0.9] * 10 + [0.1] * 20)
        assert len(caplog.messages) == 2


def test_a_policy_that_has_left_what_it_learns_from_warns_though_weights_are_even(
    caplog: pytest.LogCaptureFixture,
) -> None:
    control = StalenessControl(8)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        play(control, [0.1] * 10 + [20.0] + [2.5] * 2, name=KL)
        assert not caplog.messages  # (20 + 2 · 2.5 + 7 · 0.1) / 10 = 2.57
        play(control, [2.5] * 6, name=KL)
        assert len(caplog.messages) == 1  # with 3 of 2.5 it is 2.81
        start = "policy/kl_behavior_nats was 2.81, above 2.8, in the mean of the last 10 iterations: "
        assert caplog.messages[0].startswith(start)
        play(control, [2.75] * 30, name=KL)
    assert len(caplog.messages) == 1


def test_large_steps_warn_by_their_geometric_mean(caplog: pytest.LogCaptureFixture) -> None:
    control = StalenessControl(8)
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        play(control, [0.001] * 29 + [100.0], name=STEP)  # 0.001 · 100,000^(1/30) = 0.0015
        play(control, [0.1] * 14, name=STEP)  # 0.001^(15/30) · 100^(1/30) · 0.1^(14/30) = 0.0126
        assert not caplog.messages
        play(control, [0.1] * 10, name=STEP)
        assert len(caplog.messages) == 1  # with one of 0.1 more it is 0.0147
        start = "policy/step_k3_nats was 0.0147, above 0.014 = 0.014 · √policy/grad_norm, in the geometric mean of "
        assert caplog.messages[0].startswith(start + "the last 30 iterations: ")
        play(control, [0.012] * 30, name=STEP)
        play(StalenessControl(8), [0.05] * 29 + [0.0] + [0.05] * 29, name=STEP)  # one that is not known
        play(StalenessControl(8), [1.0] * 20 + [0.0125] * 30, name=STEP, first=1)  # the first 20 do not count
        assert len(caplog.messages) == 1
        play(StalenessControl(8), [1.0] * 21 + [0.0125] * 29, name=STEP, first=1)
    assert len(caplog.messages) == 2


def test_a_step_is_large_for_the_gradient_that_made_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        # Means of 1 · 29 and 16 are 1.5, of 0.25 are 0.25: bounds are 0.014 · √1.5 = 0.0171 and 0.014 · 0.5 = 0.007.
        play(StalenessControl(8), [0.0171] * 30, name=STEP, grad_norms=[1.0] * 29 + [16.0])
        play(StalenessControl(8), [0.0069] * 30, name=STEP, grad_norms=[0.25] * 30)
        play(StalenessControl(8), [0.0001] * 40, name=STEP, grad_norms=[0.0] * 40)  # nothing to learn from
        assert not caplog.messages
        play(StalenessControl(8), [0.0172] * 30, name=STEP, grad_norms=[1.0] * 29 + [16.0])
        play(StalenessControl(8), [0.0071] * 30, name=STEP, grad_norms=[0.25] * 30)
    starts = ["policy/step_k3_nats was 0.0172, above 0.0171", "policy/step_k3_nats was 0.0071, above 0.007 "]
    assert len(caplog.messages) == 2
    assert all(message.startswith(start) for message, start in zip(caplog.messages, starts, strict=True))


def test_a_single_low_iteration_and_a_moderate_fraction_do_not_warn(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        play(StalenessControl(8), [1.0] * 10 + [0.01] + [1.0] * 10 + [0.16] * 30)
        play(StalenessControl(8), [0.1] * 30, is_main=False)
        module: Any = None
        trainer: Any = SimpleNamespace(callback_metrics={}, is_global_zero=True, global_step=30)  # a LightningModule
        StalenessControl(8).on_train_batch_end(trainer, module, None, None, 0)
    assert not caplog.messages


def test_a_resumed_run_warns_when_it_would_have_and_not_again(caplog: pytest.LogCaptureFixture) -> None:
    first, resumed, warned = StalenessControl(8), StalenessControl(8), StalenessControl(8)
    play(first, [0.1] * 9)
    resumed.load_state_dict(first.state_dict())
    old, older = StalenessControl(8), StalenessControl(8)
    old.load_state_dict({"last_lags": [[0.1, 0.0, 0.001]] * 9})  # of a release that did not keep gradient norms
    older.load_state_dict({"last_lags": [[0.1, 0.0]] * 9})  # nor steps
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        play(resumed, [0.1])
        play(old, [0.1])
        play(older, [0.1])
        assert len(caplog.messages) == 3
        warned.load_state_dict(resumed.state_dict())
        play(warned, [0.1] * 20)
    assert len(caplog.messages) == 3
