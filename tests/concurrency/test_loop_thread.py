"""The loop's thread ends what is left on the loop, so that nothing suspended outlives it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc

import pytest

from lightrl.concurrency.loop_thread import LoopThread


def test_a_task_that_begins_after_the_last_step_is_cancelled_and_cleans_up() -> None:
    """As a server that is back is given its weights while the engine closes."""
    cleaned = []

    async def load() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.shield(asyncio.sleep(0))  # on a loop that has ended this raises, whenever it is collected
            cleaned.append("resumed")

    late: list[concurrent.futures.Future[None]] = []

    async def last() -> None:
        late.append(asyncio.run_coroutine_threadsafe(load(), thread.loop))
        await asyncio.sleep(0)

    thread = LoopThread(loop_timeout_s=60, on_exit=print)
    thread.start()
    thread.close(last, 60)
    with pytest.raises(concurrent.futures.CancelledError):
        late[0].result(60)
    assert cleaned == ["resumed"]
    gc.collect()


def test_a_task_that_exits_when_it_is_cancelled_is_reported() -> None:
    exits: list[BaseException] = []

    async def leave() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise SystemExit(3)

    async def last() -> None:
        asyncio.get_running_loop().create_task(leave())
        await asyncio.sleep(0)

    thread = LoopThread(loop_timeout_s=60, on_exit=exits.append)
    thread.start()
    thread.close(last, 60)
    assert not thread.is_alive()
    assert thread.loop.is_closed()
    assert [type(error) for error in exits] == [SystemExit]
