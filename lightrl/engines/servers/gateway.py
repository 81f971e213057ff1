"""Gateway: lets SGLang's gateway (smg) choose the server of each request; other calls go directly to each server.

    RequestLoop ── /generate ──► smg ──► one of its workers
    Gateway.keep ── /workers ──► smg     makes its workers match the routable servers

So requests reach only servers whose current weights are verified. Paths and fields match smg 1.13.0. A deleted
worker gets no new requests; for 5 seconds it is listed as `draining` and cannot be added again.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import logging
import socket
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lightrl.engines.servers.addresses import TOKEN_VARIABLE, as_url
from lightrl.engines.servers.client import abort_at
from lightrl.engines.servers.connection import Connection, ServerRefused, connections_within, raise_open_files
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.processes.command import environment_for
from lightrl.engines.servers.processes.keeper import start_all
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.engines.servers.request import Answer, MalformedAnswer
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import Server, State
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

log = logging.getLogger(__name__)

# All users on the machine can see a command line, but not the environment.
_PROGRAM = f"""
import os, sys
from smg.launch_router import main
sys.argv.append("--api-key=" + os.environ.pop({TOKEN_VARIABLE!r}))
main()
"""
# lightrl retries requests and checks servers itself; smg would count a server paused for a sync as overloaded.
_ARGUMENTS = [
    "--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--disable-worker-overload-protection",
    "--worker-stall-secs=1000000", "--worker-wedge-secs=1000000", "--request-timeout-secs=1000000",
    "--worker-startup-check-interval=1", "--max-concurrent-requests=0", "--idle-connection-timeout-secs=0",
    "--disable-tokenizer-autoload", "--log-level=warn", "--host=127.0.0.1", "--port={port}",
]  # fmt: skip

_SERVER_HEADER = "x-smg-routed-worker-id"
_NOT_FOUND, _CONFLICT = 404, 409
_SETTLING_S, _SETTLED_S = 0.1, 1.0  # intervals between checks of its workers
_CUT_AFTER_S = 1.0  # how long to wait for aborted requests: first a lost server's, then all others


@dataclass(frozen=True)
class GatewayState:
    """The gateway's state, which the leader sends to followers."""

    serving: frozenset[str] = frozenset()  # servers that it may send requests to
    problem: str = ""  # why it cannot be used
    num_cuts: int = 0  # how many times all connections to it were closed


class Gateway(Connection, Router):
    """A gateway that only this run uses; the gateway itself counts the requests at each server."""

    program = "SGLang's gateway"
    hints: ClassVar = {(_NOT_FOUND, "/workers"): "Check that router is the address of a gateway."}

    def __init__(self, url: str, token: str | None, fleet: ServerFleet, **settings: Any):
        super().__init__(url, token=token, max_connections=connections_within(raise_open_files(), 1), **settings)
        self.name = f"Gateway {self.url}"
        self.token = token  # API key for the gateway and the servers; None if they have none
        self.state = GatewayState()
        self.fleet = fleet  # its routable servers become the gateway's workers
        self._key = {"api_key": token} if token is not None else {}
        self._added: set[str] = set()  # addresses of all workers that this object has added

    @property
    def problem(self) -> str:  # type: ignore[override]
        return self.state.problem or f"{self.name} does not have the servers as workers."

    async def reach(self) -> None:
        await self.settle()
        if self.state.problem:
            raise EngineError(self.state.problem)

    def for_followers(self) -> Callable[..., Router]:
        return functools.partial(Gateway, self.url, self.token)

    def follow(self, state: GatewayState, home: HomeLoop) -> None:
        if state.num_cuts > self.state.num_cuts:
            home.spawn(self.close())
        self.state = state

    def note_loads(self, loads: Iterable[tuple[str, int, int]]) -> None:
        """No-op, because `settle` reads each server's load from the gateway."""

    def may_reach(self, server: Server, *states: State) -> list[Server]:
        return self.fleet.in_state(*states)

    def start_request(self, server: Server, tokens: int) -> None:
        """No-op, because `settle` reads the number of requests from the gateway."""

    end_request = start_request

    @staticmethod
    def check_setting(router: str) -> None:
        """Raises ValueError if `router` is neither `smg` nor an address."""
        if router != "smg" and ":" not in router:
            raise ValueError(f"router must be smg, or a gateway's address such as http://host:30000, got {router!r}.")

    @staticmethod
    def check_installed(router: str) -> None:
        if router == "smg" and importlib.util.find_spec("smg") is None:
            problem = "router: smg needs SGLang's gateway. Run `pip install smg`, or set router to a gateway's address."
            raise ValueError(problem)

    @classmethod
    def opened(cls, router: str, source: ServerSource, fleet: ServerFleet, timeouts: Timeouts) -> Gateway:
        """Returns the gateway at `router`. For `smg`, starts one with the servers' token; `source` keeps it running."""
        if router != "smg":
            return cls(as_url(router), source.token, fleet, timeouts=timeouts)
        process = smg_process(source.token)
        start_all([process])
        source.keep(process, timeouts.hang_s)
        return cls(process.url, process.token, fleet, timeouts=timeouts)

    def can_send(self) -> bool:
        """Whether all servers that the gateway may choose are routable; `send` also checks the chosen server."""
        return bool(self.state.serving) and self.state.serving <= set(self.fleet.urls("routable"))

    async def send(self, server: Server, body: dict[str, Any], timeout_s: float) -> tuple[Answer, str]:
        headers: dict[str, str] = {}
        settings: dict[str, Any] = {"timeout_s": timeout_s, "num_retries": 0, "headers": headers}
        try:
            answer = await self.request("POST", self.generate_path, body, read=server.client.read_answer, **settings)
        except ServerRefused as error:
            if error.status == _NOT_FOUND:  # the gateway has no worker
                raise EngineUnreachable(str(error)) from error
            raise
        url = headers.get(_SERVER_HEADER, "a server that it does not name")
        if url not in self.fleet.urls("routable", "draining"):
            raise MalformedAnswer(f"{self.name} sent a request to {url}, which does not have this run's weights.")
        return answer, url

    async def keep(self, home: HomeLoop) -> None:
        """Makes the gateway's workers match the routable servers while the engine runs."""
        while True:
            before = self.state
            await self.settle()
            if self.state != before:
                home.wake()
            is_settled = self.state.serving == set(self.fleet.urls("routable")) or self.state.problem
            await home.wait_for_change(_SETTLED_S if is_settled else _SETTLING_S)

    async def settle(self) -> None:
        """Sets the gateway's workers to the routable servers; if that fails, sets `state.problem`."""
        try:
            serving, problem = await self._update_workers(), ""
        except EngineError as error:
            serving, problem = frozenset[str](), str(error)
            if isinstance(error, EngineTimeout):  # the gateway hangs, so its requests hang too
                await self.cut()
        if bool(problem) != bool(self.state.problem):
            log.warning("%s", problem or f"{self.name} answers again.")
        self.state = replace(self.state, serving=serving, problem=problem)

    async def fail_requests(self, server: Server, home: HomeLoop) -> None:
        home.spawn(abort_at([server.client], abort_all=True))  # in case the server is alive; its answers are ignored
        await asyncio.sleep(_CUT_AFTER_S)
        await self.settle()
        if self.fleet.has(server) and server.num_requests:  # it hangs, and nobody knows which requests it has
            await abort_at([other.client for other in self.fleet.in_state("routable")], abort_all=True)
            await asyncio.sleep(_CUT_AFTER_S)  # meanwhile the other servers return their tokens so far
            await self.cut()
            home.wake()

    async def cut(self) -> None:
        """Closes all connections to the gateway, here and in followers; requests in flight are sent again."""
        self.state = replace(self.state, num_cuts=self.state.num_cuts + 1)
        await self.close()

    async def _update_workers(self) -> frozenset[str]:
        """Adds and removes workers; returns the servers that the gateway may send requests to."""
        timeout_s = min(self.timeouts.hang_s, self.timeouts.request_s)
        answer = await self.request("GET", "/workers", timeout_s=timeout_s)
        try:
            workers = {str(entry["url"]).rstrip("/"): entry for entry in answer["workers"]}
            loads = {url: int(worker["load"]) for url, worker in workers.items()}  # requests in flight
            serving = {url: worker["id"] for url, worker in workers.items() if worker["status"] != "draining"}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnreachable(f"{self.name} listed its workers as {str(answer)[:200]}.") from error
        routable = set(self.fleet.urls("routable"))
        for server in self.fleet.servers.values():
            server.num_requests = loads.get(server.url, 0)
        for url in serving.keys() - routable:
            if url not in self.fleet.servers and url not in self._added:
                raise EngineError(
                    f"{self.name} has a worker {url}, which is not one of this run's servers. Give each run its own "
                    f"gateway, or remove the worker: curl -X DELETE {self.url}/workers/{serving[url]}"
                )
            await self._change("DELETE", f"/workers/{serving[url]}")
        for url in routable - workers.keys():
            self._added.add(url)
            await self._change("POST", "/workers", {"url": url} | self._key)
        return frozenset(serving.keys() & routable)

    async def _change(self, method: Literal["POST", "DELETE"], path: str, body: dict[str, Any] | None = None) -> None:
        try:
            await self.request(method, path, body, read=None)
        except ServerRefused as error:
            if error.status not in (_NOT_FOUND, _CONFLICT):  # these mean that the change is done or in progress
                raise


def smg_process(token: str | None) -> ServerProcess:
    """Returns a process for SGLang's gateway on this machine; `start_all` starts it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = ["--prometheus-host=127.0.0.1", f"--prometheus-port={free.getsockname()[1]}"]
    command = [sys.executable, "-c", _PROGRAM, *_ARGUMENTS, *metrics]
    return _GatewayProcess(command, name="the gateway", port=0, token=token)


class _GatewayProcess(ServerProcess):
    def is_ready(self) -> bool:
        return self.answers()

    def environment(self) -> dict[str, str]:
        return environment_for(sys.executable) | {TOKEN_VARIABLE: self.token}
