import asyncio
import threading

import pytest

from lightrl.concurrency import in_thread as module
from lightrl.concurrency.in_thread import CallTimeout, call_within
from lightrl.errors import RolloutError


def test_threads_of_hung_calls_are_bounded_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ABANDONED", 2)
    ends = threading.Event()

    def hangs() -> None:
        ends.wait(60)

    async def scenario() -> None:
        already_running = {*threading.enumerate()}
        for _ in range(2):
            with pytest.raises(CallTimeout):
                await call_within(hangs, timeout_s=0.01, name="step")
        before = threading.active_count()
        with pytest.raises(RolloutError, match=r"2 calls that missed their deadline still hang .* 2 of .*hangs"):
            await call_within(hangs, timeout_s=0.01, name="step")
        assert threading.active_count() == before
        ends.set()
        for thread in {*threading.enumerate()} - already_running:
            thread.join(60)
        assert await call_within(lambda: 3, timeout_s=60, name="step") == 3

    asyncio.run(scenario())
