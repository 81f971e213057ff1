"""Members: the servers of an engine, each with its client: which join, are lost, come back."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import aiohttp

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.sglang.client import SGLangClient, abort_at
from lightrl.engines.sglang.connection import OutOfFiles, ServerRefused
from lightrl.engines.sglang.gateway import Gateway
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.pool import ServerPool
from lightrl.engines.sglang.servers.registry import LOOK_EVERY_S, Registry, ServerEntry
from lightrl.engines.sglang.servers.server_process import ServerProcess
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, LightRLError

if TYPE_CHECKING:
    from lightrl.engines.sglang.servers.fleet import ServerFleet

log = logging.getLogger(__name__)

_SHORT_S = 5.0
_CUT_AFTER_S = 1.0  # for requests of a lost server, then of the others, to leave the gateway by themselves
_IDENTIFY_EVERY = 5  # health checks: the question reaches the scheduler, so it costs more than a sign of life
_WARN_AFTER_S = 3.0  # a wrong port looks like a server that is starting
_WARN_EVERY_S = 30.0
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


class Members:
    """Keeps `pool` and `clients` up to date; both belong to the home loop.

    A `fleet` watches and restarts the servers that were started here. A task watches each server given by address, and
    another the registry, if there is one. When a server is back or new, `give_weights`, called in a thread with its
    address, loads the weights and admits it; one that leaves is drained, and `let_go` called in the same way.
    """

    def __init__(
        self,
        home: HomeLoop,
        make_client: Callable[[str], SGLangClient],
        give_weights: Callable[[str], None],
        let_go: Callable[[str], None],
        *,
        timeouts: Timeouts,
        probe_interval_s: float = 2.0,
    ) -> None:
        self.pool = ServerPool()
        self.clients: dict[str, SGLangClient] = {}
        self.processes: dict[str, ServerProcess] = {}  # which answered last, by address
        self.fleet: ServerFleet | None = None
        self.gateway: Gateway | None = None  # that requests go through
        self.registry: Registry | None = None
        self.on_found: Callable[[ServerEntry], None] = lambda entry: None  # before it joins
        self.may_grow = False  # servers may join that are not known yet
        self.is_loading = False  # servers may report either version
        self.salt = secrets.token_hex(8)  # two runs on one server share no key-values
        self._home = home
        self._make_client = make_client
        self._give_weights = give_weights
        self._let_go = let_go
        self._timeouts = timeouts
        self._look_s = min(timeouts.hang_s, timeouts.request_s)
        self._probe_interval_s = probe_interval_s
        self._is_leaving: set[str] = set()  # drained, or about to be

    async def join(self, url: str) -> None:
        """Adds a server that is up but does not have our weights."""
        old = self.clients.get(url)
        if old is not None:
            await old.close(for_good=True)
        self.clients[url] = self._make_client(url)
        self.pool.join(url)
        if self.fleet is None:
            self._home.spawn(self._watch(url))

    async def reach(self) -> None:
        """Waits until every server answers, at most `startup_s`; raises EngineError if the gateway cannot be used."""
        await asyncio.gather(*(self._reach(client) for client in self.clients.values()))
        if self.gateway is not None:
            await self.gateway.settle()
            if problem := self.gateway.state.problem:
                raise EngineError(problem)

    async def identify(self, url: str, *, timeout_s: float = 0.0) -> bool:
        """Notes which process answers at an address; True if it is another one than before."""
        process = ServerProcess.read(await self.clients[url].server_info(timeout_s=timeout_s))
        before = self.processes.get(url)
        self.processes[url] = process
        return before is not None and before.identity != process.identity

    def cache_key(self, url: str) -> str:
        """Under which a request shares key-values in this server: its weight version of this run."""
        return self.cache_key_of(self.pool.servers[url].weight_version)

    def cache_key_of(self, weight_version: int) -> str:
        return f"{self.salt}/{weight_version}"

    def page_tokens(self, url: str) -> int:
        """The unit in which this server caches key-values."""
        return self.processes[url].page_tokens if url in self.processes else 1

    def lose(self, url: str, reason: str) -> None:
        """Fails the server's requests at once; they continue elsewhere."""
        has_fleet = self.fleet is not None
        if self.pool.lose(url, reason, comes_back=has_fleet, may_return=not has_fleet):
            server = self.pool.servers[url]
            log.warning("The server at %s is %s: %s", url, "retired" if server.state == "retired" else "lost", reason)
            if not self.pool.urls("starting", "routable", "syncing") and self.pool.has_hope():
                log.warning(
                    "No server is left now; requests wait up to engine.timeouts.server_wait_s=%g s for one to return.",
                    self._timeouts.server_wait_s,
                )
            if self.fleet is not None:
                self.fleet.report(url, reason)
            self._home.spawn(self._free(url, self.clients[url]))
        self._home.wake()

    async def _free(self, url: str, client: SGLangClient) -> None:
        """Makes the requests at a lost server fail, so that they continue elsewhere."""
        await client.close()
        if (gateway := self.gateway) is None:
            return
        self._home.spawn(abort_at([client], abort_all=True))  # if it is alive; its answers are not used
        await asyncio.sleep(_CUT_AFTER_S)
        await gateway.settle()
        if url in self.pool.servers and self.pool.servers[url].num_requests:  # it hangs, and which these are is unknown
            await abort_at([self.clients[one] for one in self.pool.urls("routable")], abort_all=True)
            await asyncio.sleep(_CUT_AFTER_S)  # the others return what they have
            await gateway.cut()
            self._home.wake()

    def check_hope(self, since: float) -> None:
        """Raises if no server will be routable, or none could be used for `server_wait_s` after `since`, monotonic."""
        limit_s = self._timeouts.server_wait_s
        is_late = time.monotonic() - since > limit_s
        if is_late and self.gateway is not None and self.pool.urls("routable") and not self.gateway.can_send():
            problem = self.gateway.state.problem or f"{self.gateway.name} does not have the servers as workers."
            raise EngineTimeout(f"No request was sent for engine.timeouts.server_wait_s={limit_s:g} s: {problem}")
        has_hope = self.may_grow or self.pool.has_hope()
        if not has_hope or (is_late and not self.pool.urls("starting", "routable", "syncing")):
            waited = f"none returned within engine.timeouts.server_wait_s={limit_s:g}; " if is_late else ""
            raise EngineError(
                f"No server is left: {waited}{self.pool.describe()}. Check their logs; resume from the last checkpoint."
            )
        if is_late:
            raise EngineTimeout(
                f"A request waited engine.timeouts.server_wait_s={limit_s:g} s for a routable server: "
                f"{self.pool.describe()}."
            )

    async def wait_for_any(self) -> None:
        """Waits for a server that may get weights, at most `server_wait_s`."""
        since = time.monotonic()
        while not self.pool.urls("starting", "routable", "syncing"):
            self.check_hope(since)
            await self._home.wait_for_change(1.0)

    async def look(self, url: str) -> None:
        """Checks a server after one of its requests failed."""
        client = self.clients.get(url)
        if client is None or self.pool.servers[url].state not in ("routable", "syncing"):
            return
        try:
            await client.model_info(timeout_s=self._look_s, num_retries=1)
        except EngineError as error:
            is_busy = isinstance(error, EngineTimeout) and self.silent_s(url) < self._timeouts.hang_s
            if self.clients.get(url) is client and not is_busy and not isinstance(error, OutOfFiles):
                self.lose(url, str(error))

    def silent_s(self, url: str) -> float:
        """Seconds since it last answered anything. A busy server may delay one answer while it gives others."""
        client = self.clients.get(url)
        last = client.last_answer_at if client is not None else None
        return float("inf") if last is None else time.monotonic() - last

    async def dtypes(self) -> set[str]:
        """That each server was started with, or `auto`; of a quantized one the coarsest."""
        urls = self.pool.urls("routable", "syncing", "starting")
        names = await asyncio.gather(*(self._dtype(self.clients[url]) for url in urls))
        return {name for name in names if name is not None} or {"auto"}

    async def _dtype(self, client: SGLangClient) -> str | None:
        with contextlib.suppress(EngineError, asyncio.TimeoutError):  # a server that is gone computes nothing
            info = await asyncio.wait_for(client.server_info(), self._timeouts.request_s)  # its retries included
            is_coarse = info.get("quantization") or str(info.get("kv_cache_dtype")).startswith("fp8")
            return "float8_e4m3fn" if is_coarse else str(info.get("dtype") or "auto")
        return None

    async def disconnect(self, *, for_good: bool = False) -> None:
        """Closes the connections; the next requests, on this loop or another, open new ones unless it is `for_good`."""
        for client in (*self.clients.values(), *([] if self.gateway is None else [self.gateway])):
            await client.close(for_good=for_good)

    def watch_all(self) -> None:
        """Watches the servers given by address, the registry and the gateway, on a new loop. From any thread."""
        if self.fleet is None:
            for url in self.clients:
                self._home.soon(lambda url=url: self._home.spawn(self._watch(url)))  # type: ignore[misc]
        if self.registry is not None:
            self._home.soon(lambda: self._home.spawn(self._follow()))
        if (gateway := self.gateway) is not None:
            self._home.soon(lambda: self._home.spawn(gateway.keep(self._home)))

    async def _follow(self) -> None:
        """Lets servers join and leave as the registry says."""
        registry = self.registry
        assert registry is not None
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            reading = asyncio.ensure_future(in_thread(registry.read))  # one thread, however long it takes
            while not (await asyncio.wait({reading}, timeout=self._timeouts.request_s))[0]:
                log.warning("The registry %s cannot be read: its disk does not answer. Waiting.", registry.folder)
            try:
                entries = reading.result()
            except (OSError, RuntimeError) as error:  # also no thread
                log.warning("The registry %s cannot be read: %r. Trying again.", registry.folder, error)
                continue
            silent = set(self.pool.urls("lost", "retired")) - set(entries)  # one that answers stays
            leaving = {url for url, entry in entries.items() if entry.is_leaving}
            for url in (silent | leaving) - self._is_leaving:
                self._is_leaving.add(url)
                self._home.spawn(self._leave(url))
            for url, entry in entries.items():
                if url not in self.pool.servers and url not in leaving:
                    self._home.spawn(self._enter(entry))

    async def _enter(self, entry: ServerEntry) -> None:
        """Adds a server amid the run."""
        self.on_found(entry)
        await self.join(entry.url)
        try:
            await self._reach(self.clients[entry.url])
            await in_thread(self._give_weights, entry.url)
        except (LightRLError, OSError, MemoryError, RuntimeError) as error:  # also no thread, no memory
            self.lose(entry.url, str(error) or repr(error))

    async def _leave(self, url: str) -> None:
        """Lets go of a server that leaves, or is lost and silent, and tells it so."""
        try:
            if url in self.clients:
                await in_thread(self._let_go, url)
                log.info("The server at %s has left.", url)
            if self.registry is not None:
                await in_thread(self.registry.release, url)
        except (LightRLError, OSError, MemoryError, RuntimeError) as error:  # also no thread, no memory
            self.lose(url, str(error) or repr(error))
        finally:
            self._is_leaving.discard(url)

    async def drain(self, url: str) -> None:
        """Moves the requests of a server that leaves elsewhere, waits for that at most `request_s`, and forgets it."""
        deadline = time.monotonic() + self._timeouts.request_s
        self.pool.drain(url)
        if self.gateway is not None:
            await self.gateway.settle()
        while self.pool.drain(url) and time.monotonic() < deadline:
            self._home.wake()  # processes that follow learn of it
            if self.pool.urls("routable"):  # else its requests have nowhere to go on
                with contextlib.suppress(EngineError):
                    await self.clients[url].abort(abort_all=True)
            await asyncio.sleep(0.05)
            if self.gateway is not None:  # it counts the requests
                await self.gateway.settle()
        self.pool.forget(url)
        self.processes.pop(url, None)
        await self.clients.pop(url).close(for_good=True)

    async def _reach(self, client: SGLangClient) -> None:
        """Waits while the server may be starting; raises within seconds if its address is wrong."""
        start = time.monotonic()
        warn_after_s = _WARN_AFTER_S
        while True:
            try:
                await client.model_info(timeout_s=min(_SHORT_S, self._timeouts.request_s), num_retries=0)
                return
            except EngineError as error:
                waited_s = time.monotonic() - start
                is_fatal = _is_other_program(error) or (_is_nowhere(error) and waited_s > _WARN_AFTER_S)
                if is_fatal or waited_s > self._timeouts.startup_s:
                    raise
                if self.fleet is None and waited_s > warn_after_s:
                    warn_after_s += _WARN_EVERY_S
                    log.warning(
                        "No answer yet; waiting up to engine.timeouts.startup_s=%g s: %s",
                        self._timeouts.startup_s,
                        error,
                    )
            await asyncio.sleep(0.2)

    async def _watch(self, url: str) -> None:
        """Checks a server given by address now and then, also when it is lost: it may come back."""
        client = self.clients[url]
        answered_at = time.monotonic()
        num_checks = 0
        while self.clients.get(url) is client:
            await asyncio.sleep(self._probe_interval_s)
            if self.clients.get(url) is not client:
                return
            if client.last_answer_at is None:  # `reach` waits for the first answer and reports if there is none
                continue
            state = self.pool.servers[url].state
            num_checks += 1
            version = None if self.is_loading else self.pool.servers[url].weight_version
            try:
                info = await client.model_info(timeout_s=self._look_s, num_retries=0)
                if state == "routable" and num_checks % _IDENTIFY_EVERY == 0 and await self.identify(url):
                    self.lose(url, "another process answers at its address: it was restarted")
                    continue
            except OutOfFiles:
                answered_at = time.monotonic()  # the server was not asked
                continue
            except EngineError as error:
                is_gone = isinstance(error, EngineUnreachable)
                silent_s = min(time.monotonic() - answered_at, self.silent_s(url))
                if state not in ("lost", "retired") and (is_gone or silent_s >= self._timeouts.hang_s):
                    self.lose(url, str(error))
                continue
            answered_at = time.monotonic()
            if self.clients.get(url) is not client:
                return
            if state == "routable":
                if self._reports_another(url, info, version):
                    self.lose(url, f"it reports version {info.get('weight_version')!r}: it was restarted or changed")
            elif state == "retired":
                return
            elif state == "lost" and self.pool.servers[url].may_return:
                self.pool.join(url)
                self._home.wake()  # a sync may wait for it
                try:
                    await in_thread(self._give_weights, url)
                except (LightRLError, OSError, MemoryError, RuntimeError) as error:  # also no thread, no memory
                    self.lose(url, str(error) or repr(error))

    def _reports_another(self, url: str, info: Mapping[str, Any], version: int | None) -> bool:
        """Whether it reports another version than `version`, which it had when it was asked; None during a load."""
        server = self.pool.servers[url]
        is_steady = server.state == "routable" and not self.is_loading and version == server.weight_version >= 0
        return is_steady and str(info.get("weight_version")) != str(version)

    async def _replace(self, url: str) -> None:
        """Joins a restarted server and forgets the addresses that no server has any more."""
        for old in self.pool.urls("restarting"):
            if self.fleet is not None and old not in self.fleet.urls:
                self.pool.forget(old)
                self.processes.pop(old, None)
                await self.clients.pop(old).close(for_good=True)
        await self.join(url)

    def on_lost(self, url: str, reason: str) -> None:
        self._home.soon(lambda: self.lose(url, reason))

    def on_given_up(self, url: str, message: str) -> None:
        def give_up() -> None:
            self.pool.lose(url, message, comes_back=False)
            self._home.wake()

        self._home.soon(give_up)

    def on_started(self, url: str) -> None:
        """Gives a restarted server the weights; then it gets requests."""
        self._home.call(self._replace(url), self._timeouts.request_s)
        self._give_weights(url)


def _is_other_program(error: EngineError) -> bool:
    """Whether what answered is not our SGLang server: it refuses the request or the token, or speaks no JSON."""
    if isinstance(error, ServerRefused):
        return not error.is_server_error
    return isinstance(error.__cause__, (ValueError, aiohttp.ClientResponseError))


def _is_nowhere(error: EngineError) -> bool:
    """Whether the address leads to no machine: its name is unknown, or there is no route."""
    cause = error.__cause__
    cause = cause.os_error if isinstance(cause, aiohttp.ClientConnectorError) else cause
    return isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) in _NO_ROUTE
