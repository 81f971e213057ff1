"""Gateway: SGLang's gateway (smg) chooses the server of each request; everything else goes to each server directly.

    Writer ── /generate ──► smg ──► one of its workers
    Gateway.keep ── /workers ──► smg     which are the routable servers, and no others

So a request reaches only servers whose present weights are verified. Paths and fields are those of smg 1.13.0: a
worker that is deleted gets no new request; for 5 seconds more it is listed as `draining`, and cannot be added again.
"""

from __future__ import annotations

import importlib.util
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.engines.servers.connection import Connection, ServerRefused, connections_within, raise_open_files
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.processes.command import environment_for
from lightrl.engines.servers.processes.process import ServerProcess
from lightrl.engines.servers.request import MalformedAnswer
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

log = logging.getLogger(__name__)

# Every user of the machine can see a command line, but not the environment.
_PROGRAM = f"""
import os, sys
from smg.launch_router import main
sys.argv.append("--api-key=" + os.environ.pop({TOKEN_VARIABLE!r}))
main()
"""
# lightrl itself sends requests again, and knows which servers are alive: one paused for a sync is not overloaded.
_ARGUMENTS = [
    "--disable-retries", "--disable-circuit-breaker", "--disable-health-check", "--disable-worker-overload-protection",
    "--worker-stall-secs=1000000", "--worker-wedge-secs=1000000", "--request-timeout-secs=1000000",
    "--worker-startup-check-interval=1", "--max-concurrent-requests=0", "--idle-connection-timeout-secs=0",
    "--disable-tokenizer-autoload", "--log-level=warn", "--host=127.0.0.1", "--port={port}",
]  # fmt: skip

_SERVER_HEADER = "x-smg-routed-worker-id"
_NOT_FOUND, _CONFLICT = 404, 409
_SETTLING_S, _SETTLED_S = 0.1, 1.0  # between two checks of its workers


@dataclass(frozen=True)
class GatewayState:
    """State of the gateway that the process which controls it sends to others that send requests through it."""

    serving: frozenset[str] = frozenset()  # servers that it may send a request to
    problem: str = ""  # why it cannot be used
    num_cuts: int = 0  # how often the connections of all requests were closed


class Gateway(Connection):
    """A gateway, used by this run alone.

    Args:
        token: its API key, and the servers'; None if they have none.
        fleet: which servers are routable.
    """

    program = "SGLang's gateway"
    hints: ClassVar = {(_NOT_FOUND, "/workers"): "Check that router is the address of a gateway."}

    def __init__(self, url: str, token: str | None, fleet: ServerFleet, **settings: Any):
        super().__init__(url, token=token, max_connections=connections_within(raise_open_files(), 1), **settings)
        self.name = f"Gateway {self.url}"
        self.token = token
        self.state = GatewayState()
        self._fleet = fleet
        self._key = {"api_key": token} if token is not None else {}
        self._added: set[str] = set()  # addresses of all workers that it ever had

    def can_send(self) -> bool:
        """Whether every server that it is known to choose from is routable; `generate` checks the one that it chose."""
        return bool(self.state.serving) and self.state.serving <= set(self._fleet.urls("routable"))

    async def generate(
        self, body: dict[str, Any], *, timeout_s: float, read: Callable[[bytes], Any]
    ) -> tuple[Any, str]:
        """Returns the answer of `/generate` to one request, and the address of the server that gave it."""
        headers: dict[str, str] = {}
        try:
            answer = await self.request(
                "POST", self.generate_path, body, timeout_s=timeout_s, num_retries=0, read=read, headers=headers
            )
        except ServerRefused as error:
            if error.status == _NOT_FOUND:  # it has no worker now
                raise EngineUnreachable(str(error)) from error
            raise
        url = headers.get(_SERVER_HEADER, "a server that it does not name")
        if url not in self._fleet.urls("routable", "draining"):
            raise MalformedAnswer(f"{self.name} sent a request to {url}, which does not have this run's weights.")
        return answer, url

    async def keep(self, home: HomeLoop) -> None:
        """Keeps its workers those servers that are routable."""
        while True:
            before = self.state
            await self.settle()
            if self.state != before:
                home.wake()
            is_settled = self.state.serving == set(self._fleet.urls("routable")) or self.state.problem
            await home.wait_for_change(_SETTLED_S if is_settled else _SETTLING_S)

    async def settle(self) -> None:
        """Makes the routable servers its workers, and no others; notes in `state` why it cannot."""
        try:
            serving, problem = await self._settle(), ""
        except EngineError as error:
            serving, problem = frozenset[str](), str(error)
            if isinstance(error, EngineTimeout):  # it hangs, and the requests in it
                await self.cut()
        if bool(problem) != bool(self.state.problem):
            log.warning("%s", problem or f"{self.name} answers again.")
        self.state = replace(self.state, serving=serving, problem=problem)

    async def cut(self) -> None:
        """Closes its connections, here and in processes that get its state: requests in flight are sent again."""
        self.state = replace(self.state, num_cuts=self.state.num_cuts + 1)
        await self.close()

    async def _settle(self) -> frozenset[str]:
        timeout_s = min(self.timeouts.hang_s, self.timeouts.request_s)
        answer = await self.request("GET", "/workers", timeout_s=timeout_s)
        try:
            workers = {str(entry["url"]).rstrip("/"): entry for entry in answer["workers"]}
            loads = {url: int(worker["load"]) for url, worker in workers.items()}  # requests in flight
            serving = {url: worker["id"] for url, worker in workers.items() if worker["status"] != "draining"}
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnreachable(f"{self.name} listed its workers as {str(answer)[:200]}.") from error
        routable = set(self._fleet.urls("routable"))
        for server in self._fleet.servers.values():
            server.num_requests = loads.get(server.url, 0)
        for url in serving.keys() - routable:
            if url not in self._fleet.servers and url not in self._added:
                raise EngineError(
                    f"{self.name} has a worker {url}, which is not one of this run's servers. Give each run a gateway "
                    f"of its own, or remove the worker: curl -X DELETE {self.url}/workers/{serving[url]}"
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
            if error.status not in (_NOT_FOUND, _CONFLICT):  # it is done, or under way
                raise


def check_router(setting: str | None) -> None:
    """Raises ValueError if `router` is neither `smg` nor an address nor None."""
    if setting not in (None, "smg") and ":" not in setting:
        raise ValueError(f"router must be smg, or a gateway's address such as http://host:30000, got {setting!r}.")


def check_smg() -> None:
    if importlib.util.find_spec("smg") is None:
        raise ValueError("router: smg needs SGLang's gateway: pip install smg. Or set router to a gateway's address.")


def smg_process(token: str | None) -> ServerProcess:
    """SGLang's gateway on this machine, not started."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics_port = free.getsockname()[1]
    command = [sys.executable, "-c", _PROGRAM, *_ARGUMENTS, f"--prometheus-port={metrics_port}"]
    return _GatewayProcess(command, name="the gateway", port=0, token=token)


class _GatewayProcess(ServerProcess):
    def is_ready(self) -> bool:
        return self.answers()

    def environment(self) -> dict[str, str]:
        return environment_for(sys.executable) | {TOKEN_VARIABLE: self.token}
