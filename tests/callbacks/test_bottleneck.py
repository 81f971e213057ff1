import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest

from lightrl.callbacks.bottleneck import Bottleneck
from lightrl.callbacks.trace import Trace
from lightrl.trace import record, span


class Clock:
    """Nanoseconds that pass only in `wait`."""

    def __init__(self) -> None:
        self.now_ns = 0

    def wait(self, seconds: float) -> int:
        """Returns when the wait began."""
        before, self.now_ns = self.now_ns, self.now_ns + round(seconds * 1e9)
        return before


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter_ns", lambda: made.now_ns)
    return made


def run(
    clock: Clock, *, generate_s: float = 1.0, reward_s: float = 1.0, update_s: float = 1.0, callbacks: Any = ()
) -> None:
    """Five iterations; the first one takes a minute more, as a warm-up does."""
    bottleneck, module = Bottleneck(), SimpleNamespace(reward_workers=1)
    rollout = SimpleNamespace(settings=SimpleNamespace(max_staleness=0))
    trainer: Any = SimpleNamespace(is_global_zero=True, open_rollout=rollout, callbacks=[bottleneck, *callbacks])
    bottleneck.on_train_start(trainer, module)  # type: ignore[arg-type]
    for index in range(5):
        with span("rollout", "phase"):
            record("generate", "generate", "generations", clock.wait(generate_s))
            record("reward", "reward", "rewards", clock.wait(reward_s))
        with span("update", "phase"):
            clock.wait(update_s + 60 * (index == 0))
        bottleneck.on_train_batch_end(trainer, module)
    bottleneck.teardown()


@pytest.mark.parametrize(
    ("seconds", "level", "text"),
    [
        ({"reward_s": 18.0}, logging.WARNING, "90% of iterations 2 to 3 of this fit was the wait for rewards "
         "(model.reward_workers is 1). Increase model.reward_workers or make the reward faster"),
        ({"update_s": 8.0}, logging.INFO, "80% of iterations 2 to 3 of this fit was the update. Increase model.microb"),
        ({"generate_s": 3.0}, logging.INFO, "60% of iterations 2 to 3 of this fit was the wait for completions. "
         "Rollouts during the update (StalenessControl(max_staleness=1)) give at most 1.67x."),
    ],
)  # fmt: skip
def test_what_takes_most_of_an_iteration_is_named_once_with_its_setting(clock, caplog, seconds, level, text) -> None:
    with caplog.at_level(logging.INFO, logger="lightrl"):
        run(clock, **seconds)
    (one,) = caplog.records
    assert (one.levelno, one.getMessage()[: len(text)]) == (level, text)


def test_nothing_is_said_of_a_balanced_run_or_beside_a_trace(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="lightrl"):
        run(clock)
        run(clock, reward_s=18.0, callbacks=[Trace()])
    assert caplog.records == []
