"""SavedState: what a checkpoint has of the rollouts, taken at a token boundary of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightrl.engines.abilities import ContinuesCompletions
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.errors import EngineError
from lightrl.rollout.group_book import GroupBook
from lightrl.rollout.group_player import GroupPlayer
from lightrl.rollout.prompt_cursor import PromptCursor

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


log = logging.getLogger(__name__)


@dataclass(eq=False)
class SavedState:
    """Belongs to the controller's event loop."""

    engine: RolloutEngine
    book: GroupBook
    cursor: PromptCursor
    player: GroupPlayer
    wave: Wave

    async def take(self, run_seed: int, *, timeout_s: float) -> dict[str, Any]:
        """The state, in plain Python. Should the engine not stop in time, what it is writing will start again."""
        if not (self.book.running and self.player.workflow.continues):
            return self._state(run_seed, {})
        taking = asyncio.ensure_future(self._at_boundary(run_seed))
        await asyncio.wait({taking}, timeout=timeout_s)
        if taking.done() and taking.exception() is None:
            return taking.result()
        error = taking.exception() if taking.done() else "it did not answer in time"
        taking.cancel()
        if isinstance(error, BaseException) and not isinstance(error, EngineError):
            raise error
        log.warning("What the engine was writing is not in the checkpoint and will start again: %s", error)
        return self._state(run_seed, {})

    async def _at_boundary(self, run_seed: int) -> dict[str, Any]:
        engine = self.engine
        async with self.wave.begin():
            for _ in range(WAVE_TICKS):  # what has ended is reported
                await asyncio.sleep(0)
            unfinished = await engine.unfinished() if isinstance(engine, ContinuesCompletions) else {}
            await self.player.collect()
            return self._state(run_seed, unfinished)

    def _state(self, run_seed: int, unfinished: Mapping[int, Completion]) -> dict[str, Any]:
        cursor = self.cursor
        book = self.book.state_dict()
        return {
            "run_seed": run_seed,
            "next_position": cursor.next_position,
            "prompts": cursor.fingerprint,
            "stream": cursor.stream_state(min([cursor.next_position, *book["in_flight"]])),
            "curriculum": cursor.state_dict(),
            **book,
            **self.player.written.state_dict(self.player.workflow, unfinished),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Before anything starts."""
        self.book.load_state_dict(state)
        first = min([int(state["next_position"]), *state["in_flight"], *self.book.finished])  # these may be redrawn
        self.player.written.load_state_dict(state, goes_on=bool(self.book.begun), first=first)
        before, now = state["prompts"], self.cursor.fingerprint
        if before is not None and now is not None and before != now:
            log.warning(
                "The checkpoint was written with prompts %s, but this run has %s: some prompts will come twice, some "
                "never. Restore the files, seed and shuffle of the data module, or start a new run.",
                before,
                now,
            )
        self.cursor.next_position = int(state["next_position"])
        self.cursor.load_stream_state(state.get("stream"))
        self.cursor.load_state_dict(state["curriculum"])
