"""The loop's thread ends what is left on the loop, so that nothing suspended outlives it."""

import asyncio
import concurrent.futures
import ctypes
import gc
import threading

import pytest

from lightrl.concurrency.loop_thread import LoopThread, settle_all
from lightrl.errors import RolloutError


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
        late[0].result(600)
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


def test_waiting_for_a_thread_that_dies_raises_what_ended_it() -> None:
    thread = LoopThread(loop_timeout_s=60, on_exit=print)
    thread.start()

    def die() -> None:
        if thread.ident is not None and not died:
            died.append(True)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(MemoryError))
            thread.loop.call_soon_threadsafe(lambda: None)

    died: list[bool] = []
    said = r"The rollout thread died: MemoryError\(\). Resume"
    with pytest.raises(RolloutError, match=said) as caught:
        thread.wait_for(asyncio.sleep(3600), on_answer=lambda: None, on_wait=die, who="The test")
    assert isinstance(caught.value.__cause__, MemoryError)
    with pytest.raises(RolloutError, match=said):
        thread.call(asyncio.sleep(0))
    thread.close(lambda: asyncio.sleep(0), 60)
    thread.loop.run_until_complete(_cancel_all(thread.loop))
    thread.loop.close()


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    tasks = asyncio.all_tasks(loop) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_results_are_read_while_later_ones_arrive() -> None:
    seen: list[tuple[int, int]] = []

    async def wait_for(futures: list[asyncio.Future[int]], index: int) -> None:
        await futures[index]
        seen.append((index, sum(future.done() for future in futures)))

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(500)]
        waits = [asyncio.ensure_future(wait_for(futures, index)) for index in range(500)]
        await asyncio.sleep(0)

        outcomes = [(future, index) for index, future in enumerate(futures)]
        thread = threading.Thread(target=settle_all, args=[outcomes])
        thread.start()
        await asyncio.gather(*waits)
        thread.join()
        assert [future.result() for future in futures] == list(range(500))

    asyncio.run(main())
    assert [index for index, _ in seen] == list(range(500))
    assert seen[0][1] < 500
