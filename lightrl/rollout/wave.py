"""Wave: requests that are started together and admitted by the engine in the order in which they were started."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from lightrl.engines.engine import RolloutEngine

# Ticks of the event loop after which every new trajectory task has reached its first `generate`: one starts the task,
# the others leave room for a workflow that awaits something ready first.
WAVE_TICKS = 4


class Wave:
    """`async with wave.begin():` what is started inside reaches the engine while it is paused."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        self.resuming: set[asyncio.Task[None]] = set()  # must not be cancelled

    @contextlib.asynccontextmanager
    async def begin(self) -> AsyncIterator[None]:
        """Waits for the previous wave and for the engine's pause.

        On cancellation the engine is resumed. The resume itself is never cancelled, or the engine would stay paused.
        """
        async with self._lock:
            try:
                await self._engine.pause()
                yield
                for _ in range(WAVE_TICKS):
                    await asyncio.sleep(0)
            finally:
                resuming = asyncio.get_running_loop().create_task(self._engine.resume())
                self.resuming.add(resuming)
                resuming.add_done_callback(self.resuming.discard)
                try:
                    await asyncio.shield(resuming)
                except asyncio.CancelledError:
                    await asyncio.wait({resuming})
                    raise
