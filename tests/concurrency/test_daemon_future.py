import threading

import pytest

from lightrl.concurrency import daemon_future
from lightrl.concurrency.daemon_future import result_of, submit


def test_a_read_that_hangs_is_warned_of_and_ends_with_what_was_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(daemon_future, "WARN_EVERY_S", 0.05)
    ends = threading.Event()
    future = submit(lambda: ends.wait(60), name="reader")
    with pytest.raises(TimeoutError, match=r"Batch 3 did not come within 0.2 s"):
        result_of(future, "Batch 3", timeout_s=0.2)
    assert "Batch 3 has not come for" in caplog.text
    ends.set()
    assert result_of(future, "Batch 3", timeout_s=60)


def test_an_error_of_the_function_is_raised_where_its_result_is_asked_for() -> None:
    future = submit(lambda: int("x"), name="reader")
    with pytest.raises(ValueError, match="invalid literal"):
        result_of(future, "the number", timeout_s=60)
