"""Watch: checks all servers, and reacts when one is lost, returns, joins or leaves."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.connection import OutOfFiles, ServerRefused
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.processes.keeper import restart
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.engines.servers.registry import READ_EVERY_S, Registry, ServerEntry
from lightrl.engines.servers.server import GONE, Server
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.sync.loader import WeightLoader
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, LightRLError

log = logging.getLogger(__name__)

_TICK_S = 0.25
_IDENTIFY_EVERY = 5  # identify only at every fifth check, because the server's scheduler has to answer that request
_FAILURES = (LightRLError, OSError, MemoryError, RuntimeError)  # from work in a thread, or from starting the thread


@dataclass(eq=False)
class Watch:
    """Checks every server until it is forgotten, and reads the registry if there is one; used on the home loop.

    A lost server is restarted if the engine started it; otherwise it is checked until it returns. In both cases it gets
    the weights before it gets requests.
    """

    home: HomeLoop
    members: Members
    loader: WeightLoader
    source: ServerSource
    timeouts: Timeouts
    _watched: set[Server] = field(default_factory=set)
    _leaving: set[str] = field(default_factory=set)  # addresses of servers that are or will be drained

    async def run(self) -> None:
        """Starts watching all servers; called on each new loop."""
        for server in self.members.fleet.in_state():
            self.home.spawn(self._watch(server))
        self.home.spawn(self.members.router.keep(self.home))
        if self.source.registry is not None:
            await self._follow_registry(self.source.registry)

    async def _watch(self, server: Server) -> None:
        if server in self._watched:
            return
        self._watched.add(server)
        try:
            await self._until_lost_for_good(server)
            if server.process is not None and server.state == "restarting":
                self.home.spawn(self._restart(server, server.process))
        finally:
            self._watched.discard(server)

    async def _until_lost_for_good(self, server: Server) -> None:
        """Checks a server regularly. A server that the engine did not start may return, so it is checked while lost."""
        interval_s = self.timeouts.probe_interval_s
        answered_at = checked_at = time.monotonic()
        num_checks = 0
        while True:
            await asyncio.sleep(min(interval_s, _TICK_S))
            process = server.process
            if not self.members.fleet.has(server) or server.state == "retired" or (process and server.state in GONE):
                return
            if process is not None and not process.is_alive():
                self.members.lose(server, f"its process ended ({process.exit_status()})")
                continue
            if server.client.last_answer_at is None or time.monotonic() - checked_at < interval_s:
                continue  # `reach` waits for the first answer, and reports an error if none arrives
            num_checks += 1
            try:
                problem = await self._find_problem(server, should_identify=num_checks % _IDENTIFY_EVERY == 0)
            except OutOfFiles:
                answered_at = time.monotonic()  # the server is not the cause
                continue
            except EngineError as error:
                is_gone = not isinstance(error, EngineTimeout | ServerRefused)  # also true if it cannot serve rollouts
                silent_s = min(time.monotonic() - answered_at, server.silent_s)
                if server.state not in GONE and (is_gone or silent_s >= self.timeouts.hang_s):
                    self.members.lose(server, str(error))
                continue
            finally:
                checked_at = time.monotonic()
            answered_at = time.monotonic()
            if problem is not None:
                self.members.lose(server, problem)
            elif server.state == "lost" and server.may_return and self.members.fleet.has(server):
                server.rejoin()
                self.home.wake()  # a sync may be waiting for it
                await self._give_weights(server)

    async def _find_problem(self, server: Server, *, should_identify: bool) -> str | None:
        """Returns why a server that answers must get no more requests (it was restarted or changed), or None."""
        version = None if self.members.fleet.is_loading else server.weight_version
        was_routable = server.state == "routable"
        info = await server.client.model_info(timeout_s=self.members.probe_s, num_retries=0)
        if was_routable and should_identify and await server.identify():
            return "it was restarted: a different process answers at its address"
        is_steady = server.state == "routable" and not self.members.fleet.is_loading
        if was_routable and is_steady and version == server.weight_version >= 0:
            reported = info.get("weight_version")
            if str(reported) != str(version):
                return f"it reports version {reported!r}: it was restarted or changed"
        return None

    async def _give_weights(self, server: Server) -> bool:
        """Loads the weights into a running server and admits it; marks it as lost if that fails."""
        try:
            await in_thread(self.loader.give, server)
        except _FAILURES as error:
            self.members.lose(server, str(error) or repr(error))
            return False
        return True

    async def _restart(self, lost: Server, process: ServerProcess) -> None:
        """Restarts a server that the engine started, if the restart policy allows, and makes a new Server for it."""
        current = lost

        async def join_with_weights() -> None:
            nonlocal current
            before = current
            current = self.members.fleet.join(Server(self.source.client(process.url), process, losses=lost.losses))
            self.home.wake()  # a sync may be waiting for it
            await self.members.forget(before)
            if not await self._give_weights(current):
                raise EngineError(current.reason)

        problem = await restart(process, lost.reason, join_with_weights)
        if problem is None:
            self.home.spawn(self._watch(current))
        else:
            self.members.lose(current, problem, is_given_up=True)

    async def _follow_registry(self, registry: Registry) -> None:
        while True:
            await asyncio.sleep(READ_EVERY_S)
            reading = asyncio.ensure_future(in_thread(registry.read))  # never more than one thread at a time
            while not (await asyncio.wait({reading}, timeout=self.timeouts.request_s))[0]:
                log.warning("The registry %s cannot be read: its disk does not respond. Waiting.", registry.folder)
            try:
                entries = reading.result()
            except (OSError, RuntimeError) as error:  # RuntimeError if no thread can start
                log.warning("The registry %s cannot be read: %r. Trying again.", registry.folder, error)
                continue
            silent = set(self.members.fleet.urls("lost", "retired")) - set(entries)  # servers that still answer stay
            leaving = {url for url, entry in entries.items() if entry.is_leaving}
            for url in (silent | leaving) - self._leaving:
                self._leaving.add(url)
                self.home.spawn(self._remove(url, registry))
            for url, entry in entries.items():
                if url not in self.members.fleet.servers and url not in leaving:
                    self.home.spawn(self._add(entry))

    async def _add(self, entry: ServerEntry) -> None:
        """Adds an announced server to the fleet and gives it the weights."""
        self.source.receivers.add(entry.receiver)
        server = self.members.fleet.join(Server(self.source.client(entry.url)))
        self.home.spawn(self._watch(server))
        try:
            await self.members.reach(server)
        except LightRLError as error:
            self.members.lose(server, str(error))
            return
        await self._give_weights(server)

    async def _remove(self, url: str, registry: Registry) -> None:
        """Drains and forgets a server that is leaving, or is lost and silent, and removes its entry in the registry."""
        server = self.members.fleet.servers.get(url)
        try:
            if server is not None:
                await in_thread(self.loader.remove, server)
                log.info("The server at %s has left.", url)
            await in_thread(registry.release, url)
        except _FAILURES as error:
            if server is not None:
                self.members.lose(server, str(error) or repr(error))
        finally:
            self._leaving.discard(url)
