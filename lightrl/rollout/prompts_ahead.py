"""PromptsAhead: prompts that take time are made in a thread, before the controller needs them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from lightrl.concurrency.in_thread import in_thread
from lightrl.errors import RolloutError
from lightrl.rollout.prompt_cursor import PromptCursor
from lightrl.rollout.tasks import Tasks
from lightrl.trace import span


class PromptsAhead:
    """Belongs to the controller's event loop.

    Args:
        cursor: whose prompts are made.
        tasks: where an error of the stream ends the run.
        then: starts what may start, once prompts have been made.
    """

    def __init__(self, cursor: PromptCursor, tasks: Tasks, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._cursor = cursor
        self._tasks = tasks
        self._then = then
        self._making: asyncio.Task[None] | None = None

    def lacks(self, positions: Sequence[int], num: int, run_seed: int) -> bool:
        """Whether a prompt of these positions, or of the next `num` choices, is not made yet; then makes it.

        After an error of the stream it says False, for nothing will start.
        """
        try:
            missing = self._cursor.unprepared(positions, num, run_seed)
        except RolloutError as error:
            self._tasks.fail(error)
            return False
        if missing is not None:
            self._begin(missing)
        return missing is not None

    def refill(self) -> None:
        """Makes more prompts, if few are left."""
        if self._cursor.may_prepare:
            self._begin(self._cursor.next_position)

    def _begin(self, first: int) -> None:
        if self._making is None or self._making.done():
            self._making = self._tasks.spawn(self._make(first))

    async def _make(self, first: int) -> None:
        with span("make prompts", "data", "prompts", first=first):
            await in_thread(self._cursor.prepare, first)
        self._making = None
        await self._then()
