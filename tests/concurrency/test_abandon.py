"""Futures that are waited for together: their order, and what becomes of those that nobody needs any more."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest

from lightrl.concurrency import abandon as abandoning
from lightrl.concurrency.abandon import Tasks, abandon, each_when_done, is_abandoned
from lightrl.engines.servers import home_loop
from lightrl.engines.servers.home_loop import HomeLoop


async def cleans_up(ended: list[str], name: str) -> None:
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.01)  # another cancellation would end it here
        ended.append(name)


def tasks_of(**coroutines: Coroutine[Any, Any, Any]) -> dict[str, asyncio.Task[Any]]:
    return {name: asyncio.ensure_future(coroutine) for name, coroutine in coroutines.items()}


def test_each_comes_when_it_is_done_and_an_error_stays_its_own() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def scenario() -> list[tuple[str, bool]]:
        tasks = tasks_of(slow=asyncio.sleep(0.02), fails=fails(), fast=asyncio.sleep(0.01))
        return [(name, task.exception() is None) async for name, task in each_when_done(tasks)]

    assert asyncio.run(scenario()) == [("fails", False), ("fast", True), ("slow", True)]


def test_a_cancellation_lets_the_others_clean_up_and_waits_for_them() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        tasks = tasks_of(one=cleans_up(ended, "one"), two=cleans_up(ended, "two"))

        async def wait() -> None:
            async for _ in each_when_done(tasks):
                pass

        waiting = asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        abandon([waiting, *tasks.values()])  # the order of an end of everything: each is cancelled once
        await asyncio.wait([waiting])
        assert all(map(is_abandoned, tasks.values()))

    asyncio.run(scenario())
    assert sorted(ended) == ["one", "two"]


def test_who_leaves_early_does_not_wait_for_the_others() -> None:
    ended: list[str] = []

    async def scenario() -> None:
        tasks = tasks_of(fast=asyncio.sleep(0), slow=cleans_up(ended, "slow"))
        async with contextlib.aclosing(each_when_done(tasks)) as done:
            async for name, _ in done:
                assert name == "fast"
                break
        assert ended == []
        await asyncio.wait([tasks["slow"]])

    asyncio.run(scenario())
    assert ended == ["slow"]


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
    monkeypatch.setattr(abandoning, "_CANCEL_AGAIN_S", 0.05)
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
