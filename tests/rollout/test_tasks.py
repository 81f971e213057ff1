"""The end of an event loop's tasks, also of those that continue after a cancellation."""

import asyncio

import pytest

from lightrl.engines.servers import home_loop
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.rollout import tasks
from lightrl.rollout.tasks import Tasks


async def keep_running(ended: list[str]) -> None:
    """Swallows its first cancellation, as aiohttp does with one that arrives as a timeout expires."""
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        ended.append("first")
    try:
        await asyncio.sleep(600)
    finally:
        ended.append("second")


def test_a_task_that_swallows_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "_CANCEL_AGAIN_S", 0.05)
    ended: list[str] = []

    async def scenario() -> None:
        spawned = Tasks()
        spawned.spawn(keep_running(ended))
        await asyncio.sleep(0)
        await spawned.abandon_all(but=[])
        assert spawned.failure is None

    asyncio.run(scenario())
    assert ended == ["first", "second"]


def test_so_is_one_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_loop, "_CANCEL_AGAIN_S", 0.05)
    ended: list[str] = []
    home = HomeLoop(lambda: "")

    async def begin() -> None:
        home.spawn(keep_running(ended))
        await asyncio.sleep(0)

    asyncio.run_coroutine_threadsafe(begin(), home.loop).result(600)
    home.close(home.end_tasks)
    assert ended == ["first", "second"]
