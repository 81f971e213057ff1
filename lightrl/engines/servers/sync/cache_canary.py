"""CacheCanary: a short prompt that shows whether a load has emptied a server's prefix cache.

KV cache entries from old weights must not be used with new weights. Each request has a cache key made from the run and
the weight version, so a new request reuses none. But a request that a load interrupts keeps its old key when it
recomputes its prefix, so only the cache flush protects it. The canary is generated before a load, and again after it
under the *old* key. At that point, none of its tokens may be in the cache.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from lightrl.engines.servers.client import abort_at
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server
from lightrl.errors import EngineError

log = logging.getLogger(__name__)

_SETTLE_S = 0.25  # how long to wait for canaries that are still queued when the load is about to begin
_FLUSH_S = 60.0  # how long to wait for a busy server to become idle


@dataclass(frozen=True)
class CacheCanary:
    """Generates canaries on an engine's servers, and checks that loads remove them from the caches."""

    fleet: ServerFleet  # makes the cache keys
    vocab_size: int
    max_context: int | None = None  # tokens; None for no limit
    timeout_s: float = 3600.0  # limit for a canary after a load, which may queue behind other requests

    def start(self, servers: Iterable[Server], weight_version: int) -> dict[str, asyncio.Task[int]]:
        """Starts a canary on each server, under this version's key; returns the tasks by address."""
        return {server.url: asyncio.ensure_future(self._generate(server, weight_version)) for server in servers}

    async def settle(self, starting: dict[str, asyncio.Task[int]]) -> list[str]:
        """Returns the addresses of servers that have cached the canary; aborts canaries that are still queued."""
        if starting:
            await asyncio.wait(starting.values(), timeout=_SETTLE_S)
        cached = [
            url for url, task in starting.items() if task.done() and not task.cancelled() and task.exception() is None
        ]
        for task in starting.values():
            task.cancel()
        await asyncio.gather(*starting.values(), return_exceptions=True)
        return cached

    async def check(self, server: Server, weight_version: int) -> str | None:
        """Returns None if a load has emptied the server's cache, otherwise why the server must get no more requests.

        If the cache was not emptied, it is flushed once the server is idle, and checked again. `weight_version` is the
        version before the load.
        """
        try:
            num_cached = await self._generate(server, weight_version)
            if num_cached == 0:
                return None
            log.warning(
                "%s kept %d cached tokens from weight version %d during a load. Flushing its cache now.",
                server.url,
                num_cached,
                weight_version,
            )
            await server.client.flush_cache(wait_s=_FLUSH_S)
            num_cached = await self._generate(server, weight_version)
        except EngineError as error:
            return f"its prefix cache could not be checked after a load: {error}"
        if num_cached == 0:
            return None
        return f"its prefix cache still has tokens from weight version {weight_version} after a load and a flush"

    async def _generate(self, server: Server, weight_version: int) -> int:
        """Generates one token; returns how many prompt tokens were in the cache."""
        page_tokens = server.info.page_tokens if server.info is not None else 1
        length = min(2 * page_tokens + 8, (self.max_context or 2**31) - 1)
        rid = secrets.token_hex(16)
        token_ids = [(7 * index + 3) % self.vocab_size for index in range(length)]
        key = self.fleet.cache_key(weight_version)
        try:
            return await server.client.num_cached(token_ids, rid, key, timeout_s=self.timeout_s)
        except asyncio.CancelledError:
            await abort_at([server.client], rid)
            raise
