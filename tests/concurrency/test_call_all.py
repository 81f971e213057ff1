"""call_all: each step runs, and the errors of all are reported."""

from __future__ import annotations

import contextlib

import pytest

from lightrl.concurrency.in_thread import call_all


def test_all_steps_run_and_the_first_error_is_raised_during_the_one_that_led_here(caplog):
    called = []

    def step(number):
        called.append(number)
        if number > 1:
            raise ValueError(f"step {number}")

    def end():
        call_all(lambda: call_all(lambda: step(1), lambda: step(2), lambda: step(3)), lambda: step(4))

    def stage():
        with contextlib.ExitStack() as stack:
            stack.callback(end)
            raise KeyError("the first cause")

    with pytest.raises(ValueError, match="step 2") as caught:
        stage()
    assert called == [1, 2, 3, 4]
    assert isinstance(caught.value.__context__, KeyError)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["step 3", "step 4"]
