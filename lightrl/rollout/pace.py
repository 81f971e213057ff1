"""Pace: draws each token of a recorded completion under the weight version that drew it then."""

from __future__ import annotations

import asyncio
import collections
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lightrl.engines.abilities import ContinuesCompletions
from lightrl.engines.engine import Completion
from lightrl.errors import EngineTimeout
from lightrl.trajectory import Sampling


class Pace:
    """For engines whose tokens depend on seed, position and weights alone. A completion is requested in parts, one for
    each version; a load waits until all parts of the versions before it are written.

    Args:
        engine: continues completions.
        timeout_s: how long a load waits while no part is done.
    """

    def __init__(self, engine: ContinuesCompletions, *, timeout_s: float) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._runs: dict[int, list[tuple[int, int]]] = {}  # by seed: (version, number of tokens)
        self._condition = threading.Condition()  # guards the next two
        self._tokens_left: collections.Counter[int] = collections.Counter()  # by version, in recorded completions
        self._loaded = asyncio.Event()  # on the event loop: set when weights have been loaded

    def expect(self, num_tokens: Mapping[int, int]) -> None:
        """So many recorded tokens of each version will be written."""
        self._tokens_left.update(num_tokens)

    def plan(self, seed: int, runs: list[tuple[int, int]]) -> None:
        """The completion of this seed had these versions."""
        self._runs[seed] = runs

    def wait_to_load(self, weight_version: int) -> None:
        """Called from another thread than the event loop's, before a load; the first one waits for nothing."""
        if self._engine.weight_version < 0:  # a checkpoint has what was written before
            return
        with self._condition:
            while any(num > 0 for version, num in self._tokens_left.items() if version < weight_version):
                before = self._tokens_left.total()
                if not self._condition.wait(self._timeout_s) and self._tokens_left.total() == before:
                    left = {version: num for version, num in self._tokens_left.items() if num > 0}
                    raise EngineTimeout(
                        f"The load of version {weight_version} waited {self._timeout_s:g} s for tokens of the versions "
                        f"before it, which the schedule has: {left}. Increase StalenessControl.rollout_timeout_s."
                    )

    def look(self) -> None:
        """On the event loop, after a load: completions look at the version."""
        self._loaded.set()
        self._loaded.clear()

    async def write(
        self, token_ids: list[int], sampling: Sampling, written: Completion | None, *, session: str, **images: Any
    ) -> Completion:
        """The completion; those that the schedule does not know are written as they come."""
        completion = written

        async def write_to(sampling: Sampling) -> Completion:
            (longer,) = await self._engine.generate(token_ids, sampling, session=session, written=completion, **images)
            return longer

        end = 0
        for version, num in self._runs.pop(sampling.seed, []):
            end += num
            if completion is None or len(completion.token_ids) < end:
                while self._engine.weight_version < version:
                    await self._loaded.wait()
                completion = await write_to(_cut(sampling, end))
            with self._condition:
                self._tokens_left[version] -= num
                self._condition.notify_all()
        is_over = completion is not None and (
            completion.finish_reason == "stop" or len(completion.token_ids) >= sampling.max_new_tokens
        )
        return completion if completion is not None and is_over else await write_to(sampling)


def _cut(sampling: Sampling, num_tokens: int) -> Sampling:
    longest = min(num_tokens, sampling.max_new_tokens)
    return replace(sampling, max_new_tokens=longest, min_new_tokens=min(sampling.min_new_tokens, longest))
