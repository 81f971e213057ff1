"""Members: the servers of an engine, each with its client: who joins, who is lost, who comes back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightrl.engines.sglang.client import ServerRefused, SGLangClient
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.pool import ServerPool
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

if TYPE_CHECKING:
    from lightrl.engines.sglang.fleet import ServerFleet

log = logging.getLogger(__name__)

MAX_REJOINS = 3  # of a server given by address, in a row
_SERVER_ERROR = 500
_SHORT_S = 5.0
_SAY_AFTER_S = 3.0  # an address that is wrong looks like a server that starts


class Members:
    """Keeps `pool` and `clients` as the servers are; both belong to the home loop.

    Servers that were started here are watched by their `fleet`, which starts them again. Those given by address are
    watched by a task each, which lets them in again when they come back.

    Args:
        home: the loop.
        make_client: for an address.
        give_weights: called in a thread with the address of a server that is back; admits it if it has the weights.
        request_timeout_s: of a look at a server.
        startup_timeout_s: until a server answers.
        probe_interval_s: between two looks.
        hang_timeout_s: a server that does not answer for so long is lost.
    """

    def __init__(
        self,
        home: HomeLoop,
        make_client: Callable[[str], SGLangClient],
        give_weights: Callable[[str], None],
        *,
        request_timeout_s: float = 60.0,
        startup_timeout_s: float = 900.0,
        probe_interval_s: float = 2.0,
        hang_timeout_s: float = 30.0,
    ) -> None:
        self.pool = ServerPool()
        self.clients: dict[str, SGLangClient] = {}
        self.fleet: ServerFleet | None = None
        self._home = home
        self._make_client = make_client
        self._give_weights = give_weights
        self._look_timeout_s = min(hang_timeout_s, request_timeout_s)
        self._request_timeout_s = request_timeout_s
        self._startup_timeout_s = startup_timeout_s
        self._probe_interval_s = probe_interval_s
        self._hang_timeout_s = hang_timeout_s
        self._rejoins: dict[str, int] = {}

    # ------------------------------------------------------------------ on the loop

    async def join(self, url: str) -> None:
        """A server that is up, its weights not yet ours."""
        old = self.clients.get(url)
        if old is not None:
            await old.close()
        self.clients[url] = self._make_client(url)
        self.pool.join(url)
        if self.fleet is None:
            self._home.spawn(self._watch(url))

    async def forget(self, url: str) -> None:
        """Its address is of no more use."""
        self.pool.forget(url)
        await self.clients.pop(url).close()

    async def reach(self) -> None:
        """Waits until every server answers, `startup_timeout_s` at most."""
        await asyncio.gather(*(self._reach(client) for client in self.clients.values()))

    def lose(self, url: str, reason: str) -> None:
        """Its requests fail at once and go elsewhere."""
        if self.pool.lose(url, reason, comes_back=self.fleet is not None):
            log.warning("The server at %s is lost: %s", url, reason)
            if self.fleet is not None:
                self.fleet.report(url, reason)
            self._home.spawn(self.clients[url].close())
        self._home.wake()

    async def look(self, url: str) -> None:
        """A request to it failed: is it gone?"""
        client = self.clients.get(url)
        if client is None or self.pool.servers[url].state not in ("routable", "syncing"):
            return
        try:
            await client.model_info(timeout_s=self._look_timeout_s, num_retries=1)
        except EngineError as error:
            is_busy = isinstance(error, EngineTimeout) and self.silent_s(url) < self._hang_timeout_s
            if self.clients.get(url) is client and not is_busy:
                self.lose(url, str(error))

    def silent_s(self, url: str) -> float:
        """Seconds since it last answered anything. A busy server keeps a question waiting and yet answers others."""
        client = self.clients.get(url)
        last = client.last_answer_at if client is not None else None
        return float("inf") if last is None else time.monotonic() - last

    async def disconnect(self) -> None:
        """Ends the connections; they are made anew when they are needed, also on another loop."""
        for client in self.clients.values():
            await client.close()

    def watch_all(self) -> None:
        """There is a new loop: those who were given by address are watched there. From any thread."""
        if self.fleet is None:
            for url in self.clients:
                self._home.soon(lambda url=url: self._home.spawn(self._watch(url)))  # type: ignore[misc]

    async def _reach(self, client: SGLangClient) -> None:
        start = time.monotonic()
        deadline = start + self._startup_timeout_s
        has_said = False
        while True:
            try:
                await client.model_info(timeout_s=min(_SHORT_S, self._request_timeout_s), num_retries=0)
                return
            except EngineError as error:
                if isinstance(error, ServerRefused) and error.status < _SERVER_ERROR:
                    raise
                if time.monotonic() > deadline:
                    raise
                if self.fleet is None and not has_said and time.monotonic() - start > _SAY_AFTER_S:
                    has_said = True
                    log.warning(
                        "No answer yet, waiting startup_timeout_s=%g s at most: %s", self._startup_timeout_s, error
                    )
            await asyncio.sleep(0.2)

    async def _watch(self, url: str) -> None:
        """Looks at a server given by address now and then, also when it is lost: it may come back."""
        client = self.clients[url]
        answered_at = time.monotonic()
        while self.clients.get(url) is client:
            await asyncio.sleep(self._probe_interval_s)
            if client.last_answer_at is None:  # `reach` waits for its first answer, and says so
                continue
            state = self.pool.servers[url].state
            try:
                await client.model_info(timeout_s=self._look_timeout_s, num_retries=0)
            except EngineError as error:
                is_gone = isinstance(error, EngineUnreachable)
                silent_s = min(time.monotonic() - answered_at, self.silent_s(url))
                if state != "lost" and (is_gone or silent_s >= self._hang_timeout_s):
                    self.lose(url, str(error))
                continue
            answered_at = time.monotonic()
            if state == "routable":
                self._rejoins.pop(url, None)
            elif state == "lost" and self._rejoins.get(url, 0) < MAX_REJOINS and self.pool.urls("routable"):
                self._rejoins[url] = self._rejoins.get(url, 0) + 1
                self.pool.join(url)
                try:
                    await asyncio.to_thread(self._give_weights, url)
                except EngineError as error:
                    self.lose(url, str(error))

    # ------------------------------------------------------------------ from the fleet's threads

    def on_lost(self, url: str, reason: str) -> None:
        self._home.soon(lambda: self.lose(url, reason))

    def on_given_up(self, url: str, message: str) -> None:
        def give_up() -> None:
            self.pool.lose(url, message, comes_back=False)
            self._home.wake()

        self._home.soon(give_up)

    def on_started(self, url: str) -> None:
        """A server that was started again gets the weights, then requests."""
        for old in self.pool.urls("restarting"):
            if self.fleet is not None and old not in self.fleet.urls:
                self._home.call(self.forget(old), self._request_timeout_s)
        self._home.call(self.join(url), self._request_timeout_s)
        self._give_weights(url)
