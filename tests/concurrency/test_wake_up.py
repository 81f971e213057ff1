"""Calls from other threads reach their loop in order, and what follows from the first need not wait for the last."""

from __future__ import annotations

import asyncio
import threading

from lightrl.concurrency.wake_up import WakeUps


def test_results_are_read_while_later_ones_arrive() -> None:
    seen: list[tuple[int, int]] = []

    async def wait_for(futures: list[asyncio.Future[int]], index: int) -> None:
        await futures[index]
        seen.append((index, sum(future.done() for future in futures)))

    async def main() -> None:
        futures = [asyncio.get_running_loop().create_future() for _ in range(500)]
        waits = [asyncio.ensure_future(wait_for(futures, index)) for index in range(500)]
        await asyncio.sleep(0)

        def settle() -> None:
            wake_ups = WakeUps()
            for index, future in enumerate(futures):
                wake_ups.settle(future, index)
            wake_ups.send()

        thread = threading.Thread(target=settle)
        thread.start()
        await asyncio.gather(*waits)
        thread.join()
        assert [future.result() for future in futures] == list(range(500))

    asyncio.run(main())
    assert [index for index, _ in seen] == list(range(500))
    assert seen[0][1] < 500
