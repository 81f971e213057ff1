"""StalenessControl measures the bias of resampling stragglers."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.callbacks.staleness import StalenessControl
from lightrl.rollout import RolloutSettings
from lightrl.testing import make_groups


@pytest.mark.parametrize(
    ("resampled_by_iteration", "fractions", "num_warnings"),
    [
        pytest.param([0, 0, 0], [0.0, 0.0, 0.0], 0, id="none was resampled"),
        pytest.param([0, 1, 1], [0.0, 1 / 121, 1 / 181], 0, id="hardly any"),
        pytest.param([1, 10, 20], [1 / 61, 10 / 130, 20 / 200], 1, id="too many, which is said once"),
    ],
)
def test_the_fraction_of_resampled_groups_is_logged_and_a_warning_names_it(
    resampled_by_iteration: list[int], fractions: list[float], num_warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    control = StalenessControl(1)
    num_resampled = iter(resampled_by_iteration)
    rollout = SimpleNamespace(
        is_recorded=False,
        settings=RolloutSettings(resample_stragglers=True),
        progress=lambda: {"resampled_groups": next(num_resampled)},
    )
    trainer: Any = SimpleNamespace(rollout=rollout, is_global_zero=True)
    logged: list[tuple[str, float]] = []
    module: Any = SimpleNamespace(log=lambda name, value, **kwargs: logged.append((name, value)))
    with caplog.at_level(logging.WARNING, logger="lightrl"):
        for _ in resampled_by_iteration:
            control.on_rollout_end(trainer, module, make_groups([[1.0]] * 60))
    assert logged == [("staleness/resampled_fraction", pytest.approx(value)) for value in fractions]
    assert len(caplog.messages) == num_warnings
    assert all("7.7 % of the groups sampled so far" in message for message in caplog.messages)


def test_without_resampling_nothing_is_logged() -> None:
    trainer: Any = SimpleNamespace(rollout=SimpleNamespace(is_recorded=False, settings=RolloutSettings()))
    StalenessControl(1).on_rollout_end(trainer, SimpleNamespace(), [])  # type: ignore[arg-type]


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
