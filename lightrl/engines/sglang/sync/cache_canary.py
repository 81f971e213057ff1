"""CacheCanary: a short prompt that shows whether a load has emptied a server's prefix cache.

Key-values of old weights must not be used with new ones. Each request carries a cache key of the run and the weight
version, so a new request shares none. A request that a load interrupts keeps its old key and computes its prefix anew;
only the flush of the cache protects it. So a canary is generated before a load, and again after it under the *old* key:
none of its tokens may be in the cache.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable

from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineError

log = logging.getLogger(__name__)

_SETTLE_S = 0.25  # for canaries that a busy server still queues when the load is about to begin
_FLUSH_S = 60.0  # for a busy server to be idle
_ABORT_S = 1.0


class CacheCanary:
    """One for an engine.

    Args:
        cache_key: of a weight version.
        page_tokens: the unit in which the server at an address caches.
        vocab_size: of the model.
        max_context: of the model; None is no limit.
        timeout_s: for a canary after a load: it waits behind other requests.
    """

    def __init__(
        self,
        cache_key: Callable[[int], str],
        page_tokens: Callable[[str], int],
        *,
        vocab_size: int,
        max_context: int | None = None,
        timeout_s: float = 3600.0,
    ) -> None:
        self._cache_key = cache_key
        self._page_tokens = page_tokens
        self._vocab_size = vocab_size
        self._max_context = max_context or 2**31
        self._timeout_s = timeout_s

    def plant(self, clients: Iterable[SGLangClient], weight_version: int) -> dict[str, asyncio.Task[int]]:
        """Starts a canary on each server, under the key of the version that it has; by address."""
        return {client.url: asyncio.ensure_future(self._generate(client, weight_version)) for client in clients}

    async def settle(self, planting: dict[str, asyncio.Task[int]]) -> list[str]:
        """Addresses where the canary is in the cache; those that a busy server still queues are aborted."""
        if planting:
            await asyncio.wait(planting.values(), timeout=_SETTLE_S)
        planted = [
            url for url, task in planting.items() if task.done() and not task.cancelled() and task.exception() is None
        ]
        for task in planting.values():
            task.cancel()
        await asyncio.gather(*planting.values(), return_exceptions=True)
        return planted

    async def check(self, client: SGLangClient, weight_version: int) -> str | None:
        """After a load: why the server must get no more requests, or None; `weight_version` is the one before.

        A cache that was not emptied is flushed as soon as the server is idle, and checked again.
        """
        try:
            num_cached = await self._generate(client, weight_version)
            if num_cached == 0:
                return None
            log.warning(
                "%s kept %d key-values of weight version %d during a load. Its cache is flushed now.",
                client.url,
                num_cached,
                weight_version,
            )
            await client.flush_cache(wait_s=_FLUSH_S)
            num_cached = await self._generate(client, weight_version)
        except EngineError as error:
            return f"its prefix cache could not be checked after a load: {error}"
        if num_cached == 0:
            return None
        return f"its prefix cache still has key-values of weight version {weight_version}, after a load and a flush"

    async def _generate(self, client: SGLangClient, weight_version: int) -> int:
        """Generates one token; the number of prompt tokens that the cache had."""
        length = min(2 * self._page_tokens(client.url) + 8, self._max_context - 1)
        rid = secrets.token_hex(16)
        body = {
            "rid": rid,
            "input_ids": [(7 * index + 3) % self._vocab_size for index in range(length)],
            # Drawn as most requests are: one greedy request in a batch makes SGLang draw other tokens for all of it.
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "extra_key": self._cache_key(weight_version),
        }
        try:
            answer = await client.generate(body, num_retries=0, timeout_s=self._timeout_s)
        except asyncio.CancelledError:
            with contextlib.suppress(EngineError, asyncio.TimeoutError):
                await asyncio.wait_for(client.abort(rid), _ABORT_S)
            raise
        return int(answer["meta_info"].get("cached_tokens") or 0)
