"""Members: changes servers' states when they answer, are lost or leave; called by `Watch` and by requests."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import time
from dataclasses import dataclass

import aiohttp
import torch

from lightrl.engines.servers.connection import NO_ANSWER, OutOfFiles, ServerRefused
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import ACTIVE, Server
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout

log = logging.getLogger(__name__)

_SHORT_S = 5.0
_WARN_AFTER_S = 3.0  # short, because a wrong port looks like a server that is still starting
_WARN_EVERY_S = 30.0
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)


@dataclass(eq=False)
class Members:
    """Changes the states of servers and the connections to them; used on the home loop."""

    home: HomeLoop
    fleet: ServerFleet
    router: Router  # sends all requests
    timeouts: Timeouts

    @property
    def probe_s(self) -> float:
        """The deadline for a health check."""
        return min(self.timeouts.hang_s, self.timeouts.request_s)

    async def reach_all(self) -> None:
        """Waits up to `startup_s` until every server answers; raises EngineError if the router does not work."""
        await asyncio.gather(*(self.reach(server) for server in self.fleet.in_state()))
        await self.router.reach()

    async def identify_all(self) -> None:
        """Reads the identity of every server that answers; the first load asks the others again.

        Raises EngineError if a server was started without an argument that rollouts need.
        """

        async def identify(server: Server) -> None:
            with contextlib.suppress(*NO_ANSWER):
                await server.identify()

        await asyncio.gather(*(identify(server) for server in self.fleet.in_state()))

    async def reach(self, server: Server) -> None:
        """Waits for a server that may still be starting; raises within seconds if its address is wrong."""
        start = time.monotonic()
        warn_after_s = _WARN_AFTER_S
        while True:
            try:
                await server.client.model_info(timeout_s=min(_SHORT_S, self.timeouts.request_s), num_retries=0)
                return
            except EngineError as error:
                waited_s = time.monotonic() - start
                is_fatal = _is_other_program(error) or (_is_unreachable(error) and waited_s > _WARN_AFTER_S)
                if is_fatal or waited_s > self.timeouts.startup_s:
                    raise
                if server.process is None and waited_s > warn_after_s:
                    warn_after_s += _WARN_EVERY_S
                    limit_s = self.timeouts.startup_s
                    log.warning("No answer yet; waiting up to engine.timeouts.startup_s=%g s: %s", limit_s, error)
            await asyncio.sleep(0.2)

    def lose(self, server: Server, reason: str, *, is_given_up: bool = False) -> None:
        """Marks a server as lost and makes its requests fail, so that they continue on other servers."""
        if server.process is not None and not is_given_up:  # quote the end of the log, because a restart may hide it
            reason = f"{reason}. {server.process.last_output()}"
        if self.fleet.lose(server, reason, is_given_up=is_given_up):
            state = "retired" if server.state == "retired" else "lost"
            log.warning("The server at %s is %s: %s", server.url, state, reason)
            if not self.fleet.in_state(*ACTIVE) and self.fleet.has_hope():
                log.warning(
                    "No server is left; requests wait up to engine.timeouts.startup_s=%g s for one to return.",
                    self.timeouts.server_wait_s,
                )
            self.home.spawn(self._fail_requests(server))
        self.home.wake()

    async def _fail_requests(self, server: Server) -> None:
        await server.client.close()
        await self.router.fail_requests(server, self.home)

    def check_wait(self, since: float) -> None:
        """Raises EngineError if waiting is futile: no server can become routable, or `server_wait_s` has passed."""
        limit_s = self.timeouts.server_wait_s
        is_late = time.monotonic() - since > limit_s
        if is_late and self.fleet.urls("routable") and not self.router.can_send():
            problem = f"No request was sent for engine.timeouts.startup_s={limit_s:g} s: {self.router.problem}"
            raise EngineTimeout(problem)
        if not self.fleet.has_hope() or (is_late and not self.fleet.in_state(*ACTIVE)):
            waited = f"none returned within engine.timeouts.startup_s={limit_s:g}; " if is_late else ""
            raise EngineError(
                f"No server is left: {waited}{self.fleet.describe()}. Check their logs; resume from the last "
                "checkpoint."
            )
        if is_late:
            raise EngineTimeout(
                f"A request waited engine.timeouts.startup_s={limit_s:g} s for a routable server: "
                f"{self.fleet.describe()}."
            )

    async def wait_for_any(self) -> None:
        """Waits up to `server_wait_s` for a server that can receive weights."""
        since = time.monotonic()
        while not self.fleet.in_state(*ACTIVE):
            self.check_wait(since)
            await self.home.wait_for_change(1.0)

    async def check(self, server: Server) -> None:
        """Checks a server after one of its requests failed."""
        if not self.fleet.has(server) or server.state != "routable":
            return
        try:
            await server.client.model_info(timeout_s=self.probe_s, num_retries=1)
        except EngineError as error:
            is_busy = isinstance(error, EngineTimeout) and server.silent_s < self.timeouts.hang_s
            is_busy |= isinstance(error, ServerRefused) and error.is_busy and error.status < 500  # so it is alive
            if not is_busy and not isinstance(error, OutOfFiles):
                self.lose(server, str(error))

    def sent_dtype(self, auto: torch.dtype) -> torch.dtype | None:
        """Returns the servers' common dtype if it is narrower than float32; None means the trainer's dtype.

        `auto` is the dtype that `auto` selects on servers started by the engine; it may differ on others.
        """
        dtypes = set()
        for server in self.fleet.in_state():
            is_our_auto = server.info is not None and server.info.is_auto and server.process is not None
            dtypes.add(auto if is_our_auto else server.info.dtype if server.info is not None else None)
        dtype = dtypes.pop() if len(dtypes) == 1 else None
        return None if dtype == torch.float32 else dtype

    async def drain(self, server: Server) -> None:
        """Moves a leaving server's requests to other servers, for at most `request_s`, and then forgets the server."""
        deadline = time.monotonic() + self.timeouts.request_s
        self.fleet.drain(server)
        await self.router.settle()
        while self.fleet.drain(server) and time.monotonic() < deadline:
            self.home.wake()  # also notifies followers
            if self.fleet.urls("routable"):  # otherwise its requests cannot continue anywhere
                with contextlib.suppress(EngineError):
                    await server.client.abort(abort_all=True)
            await asyncio.sleep(0.05)
            await self.router.settle()  # updates the number of requests if a gateway counts them
        await self.forget(server)

    async def forget(self, server: Server) -> None:
        self.fleet.forget(server)
        await server.client.close(for_good=True)

    async def disconnect(self, *, for_good: bool = False) -> None:
        """Closes all connections; unless `for_good`, later requests open new ones, perhaps on a different loop."""
        for server in self.fleet.in_state():
            await server.client.close(for_good=for_good)
        await self.router.close(for_good=for_good)


def _is_other_program(error: EngineError) -> bool:
    """Whether a program other than the server answered: it refused the request or the token, or did not send JSON."""
    if isinstance(error, ServerRefused):
        return not error.is_temporary
    return isinstance(error.__cause__, (TypeError, ValueError, aiohttp.ClientResponseError))


def _is_unreachable(error: EngineError) -> bool:
    """Whether the address is unreachable: the host is unknown, or there is no route to it."""
    cause = error.__cause__
    cause = cause.os_error if isinstance(cause, aiohttp.ClientConnectorError) else cause
    return isinstance(cause, socket.gaierror) or getattr(cause, "errno", None) in _NO_ROUTE
