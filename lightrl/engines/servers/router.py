"""Router: sends each request to the server that the fleet chooses. gateway.py has another router."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.request import Answer
from lightrl.engines.servers.server import Server, State
from lightrl.engines.servers.timeouts import Timeouts


class Router:
    """Sends each request to the server that the fleet has chosen, and counts each server's requests."""

    state: Any = None  # pickled and sent to followers
    problem: str = ""  # why the router cannot send requests

    def __init__(self, fleet: ServerFleet, *, timeouts: Timeouts) -> None:
        self.fleet = fleet
        self.timeouts = timeouts

    async def reach(self) -> None:
        """Called once all servers answer; raises EngineError if the router does not work."""

    async def keep(self, home: HomeLoop) -> None:
        """Does background work while the engine runs."""

    async def settle(self) -> None:
        """Returns once only routable servers get requests, or once the router has failed to ensure this."""

    def can_send(self) -> bool:
        """Whether a request can be sent now to a server whose weights are verified."""
        return True

    def may_reach(self, server: Server, *states: State) -> list[Server]:
        """Returns the servers that may get a request for `server`; a gateway may choose any server in these states."""
        return [server]

    def start_request(self, server: Server, tokens: int) -> None:
        server.outstanding_tokens += tokens
        server.num_requests += 1

    def end_request(self, server: Server, tokens: int) -> None:
        server.outstanding_tokens -= tokens
        server.num_requests -= 1

    async def send(self, server: Server, body: dict[str, Any], timeout_s: float) -> tuple[Answer, str]:
        """Sends a request; returns the answer and the address of the server that sent it."""
        client = server.client
        return await client.generate(body, num_retries=0, timeout_s=timeout_s, read=client.read_answer), server.url

    async def fail_requests(self, server: Server, home: HomeLoop) -> None:
        """Makes the requests to a lost server fail; called after this process's connections to it are closed."""

    async def close(self, *, for_good: bool = False) -> None:
        """Closes the router's connections."""

    def for_followers(self) -> Callable[..., Router]:
        """Returns a picklable function that makes a follower's router from its fleet and `timeouts`."""
        return Router

    def follow(self, state: Any, home: HomeLoop) -> None:
        """Adopts the state of the leader's router."""

    def note_loads(self, loads: Iterable[tuple[str, int, int]]) -> None:
        """Adds up the followers' loads, given as (address, requests, outstanding tokens)."""
        servers = self.fleet.servers
        for server in servers.values():
            server.num_requests = server.outstanding_tokens = 0
        for url, num_requests, tokens in loads:
            if url in servers:
                servers[url].num_requests += num_requests
                servers[url].outstanding_tokens += tokens
