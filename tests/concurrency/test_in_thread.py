import asyncio
import contextlib
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from lightrl.concurrency import in_thread
from lightrl.concurrency.in_thread import CallTimeout, call_all, call_within, result_of, submit
from lightrl.errors import RolloutError


def test_threads_of_hung_calls_are_bounded_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_thread, "MAX_ABANDONED", 2)
    ends = threading.Event()

    def hangs() -> None:
        ends.wait(600)

    async def scenario() -> None:
        already_running = {*threading.enumerate()}
        for _ in range(2):
            with pytest.raises(CallTimeout):
                await call_within(hangs, timeout_s=0.01, name="step")
        before = threading.active_count()
        with pytest.raises(RolloutError, match=r"2 calls are still hanging .* 2 of .*hangs"):
            await call_within(hangs, timeout_s=0.01, name="step")
        assert threading.active_count() == before
        ends.set()
        for thread in {*threading.enumerate()} - already_running:
            thread.join(600)
        assert await call_within(lambda: 3, timeout_s=60, name="step") == 3

    asyncio.run(scenario())


def test_a_read_that_hangs_is_warned_of_and_ends_with_what_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(in_thread, "WARN_EVERY_S", 0.05)
    ends = threading.Event()
    future = submit(lambda: ends.wait(600), name="reader")
    with pytest.raises(TimeoutError, match=r"Batch 3 did not arrive within 1 s"):
        result_of(future, "Batch 3", timeout_s=1)
    assert "Batch 3 has not arrived for" in caplog.text
    ends.set()
    assert result_of(future, "Batch 3", timeout_s=60)


def test_a_deadline_between_two_warnings_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def pass_time(futures: list[Future[object]], seconds: float) -> SimpleNamespace:
        nonlocal now_s
        now_s += seconds
        return SimpleNamespace(done=set())

    monkeypatch.setattr(in_thread, "wait", pass_time)
    monkeypatch.setattr(in_thread, "time", SimpleNamespace(monotonic=lambda: now_s))
    with pytest.raises(TimeoutError, match="within 90 s"):
        result_of(Future(), "Batch 3", timeout_s=90.0)
    assert now_s == 90.0


def test_an_error_of_the_function_is_raised_where_its_result_is_asked_for() -> None:
    future = submit(lambda: int("x"), name="reader")
    with pytest.raises(ValueError, match="invalid literal"):
        result_of(future, "the number", timeout_s=60)


def test_all_steps_run_and_the_first_error_is_raised_during_the_one_that_led_here(
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[int] = []

    def step(number: int) -> None:
        called.append(number)
        if number > 1:
            raise ValueError(f"step {number}")

    def end() -> None:
        call_all(lambda: call_all(lambda: step(1), lambda: step(2), lambda: step(3)), lambda: step(4))

    def stage() -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(end)
            raise KeyError("the first cause")

    with pytest.raises(ValueError, match="step 2") as caught:
        stage()
    assert called == [1, 2, 3, 4]
    assert isinstance(caught.value.__context__, KeyError)
    assert [str(record.exc_info[1]) for record in caplog.records] == ["step 3", "step 4"]
