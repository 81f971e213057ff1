"""EngineMemory: which parts of a colocated server's memory are released, so that each resume matches a release.

    update on the GPU      servers paused, all parts released
    resume weights   ─►    new weights are pushed (released ones are not kept)
    resume the rest  ─►    servers continue

A server dies when it is told to resume what it has not released (SGLang 0.5.23), hence the bookkeeping.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Literal, Protocol

Part = Literal["kv_cache", "weights", "cuda_graph"]
PARTS: tuple[Part, ...] = ("kv_cache", "weights", "cuda_graph")
RESUME_ORDER: tuple[Part, ...] = ("weights", "cuda_graph", "kv_cache")  # the cache takes what is left


class _Server(Protocol):
    url: str

    async def release_memory(self, tags: Sequence[str] | None = None) -> None: ...

    async def resume_memory(self, tags: Sequence[str] | None = None) -> None: ...


Ask = Callable[[Callable[[Any], Awaitable[None]]], Awaitable[dict[str, None]]]


class EngineMemory:
    """What each server has released; decisions are pure, `release` and `resume` carry them out.

    The state changes before the server is told: one that fails in between is lost anyway and restarts (`forget`).
    """

    def __init__(self) -> None:
        self._released: dict[str, set[Part]] = {}

    def released(self, url: str) -> set[Part]:
        return set(self._released.get(url, ()))

    def to_release(self, url: str, parts: Collection[Part] | None = None) -> list[Part]:
        """Those of `parts` (all if None) that the server still holds."""
        chosen = PARTS if parts is None else parts
        return [part for part in PARTS if part in chosen and part not in self.released(url)]

    def to_resume(self, url: str, parts: Collection[Part] | None = None) -> list[Part]:
        """Those of `parts` (all if None) that the server has released, in the order in which to resume them."""
        chosen = PARTS if parts is None else parts
        return [part for part in RESUME_ORDER if part in chosen and part in self.released(url)]

    def forget(self, url: str) -> None:
        """The server is gone or restarted: it holds all its memory."""
        self._released.pop(url, None)

    async def release(self, servers: Collection[_Server], parts: Collection[Part] | None, ask: Ask) -> None:
        """Paused servers release those parts that they still hold."""

        async def tell(server: _Server) -> None:
            tags = self.to_release(server.url, parts)
            self._released.setdefault(server.url, set()).update(tags)
            if tags:
                await server.release_memory(tags)

        if servers:
            await ask(tell)

    async def resume(self, servers: Collection[_Server], parts: Collection[Part] | None, ask: Ask) -> None:
        """Servers take back the parts that they have released, one after the other."""

        async def tell(server: _Server) -> None:
            for part in self.to_resume(server.url, parts):
                self._released[server.url].discard(part)
                await server.resume_memory([part])

        if servers:
            await ask(tell)
