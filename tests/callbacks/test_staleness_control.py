"""StalenessControl warns of deadlines that contradict each other."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.callbacks.staleness import StalenessControl
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
