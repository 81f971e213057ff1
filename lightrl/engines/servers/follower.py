"""Follower: sends requests to servers from a process that does not control them; see leader.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.engines.servers.client import ServerClient
from lightrl.engines.servers.connection import raise_open_files
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.leader import FleetState, FollowerState, Leader, Traffic
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.request_loop import RequestLimits, RequestLoop
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import GONE, Server
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.trajectory import Sampling

ReportServer = Callable[[str, str, str], object]  # called with the arguments to `Leader.on_server_failed`


@dataclass(eq=False)
class _FollowedMembers(Members):
    """A copy of the leader's Members; the leader decides which servers are lost."""

    report: ReportServer
    _suspects: set[Server] = field(default_factory=set)  # servers reported since the last state arrived

    def follow(self, state: FleetState, make_client: Callable[[str], ServerClient]) -> None:
        """Adopts the leader's view of all servers; closes connections to lost servers."""
        self._suspects.clear()
        self.fleet.may_grow = state.may_grow
        self.router.follow(state.router, self.home)
        for status in state.servers:
            server = self.fleet.servers.get(status.url)
            if server is None:
                server = self.fleet.join(Server(make_client(status.url)))
            elif status.state in GONE and server.state != status.state:
                self.home.spawn(server.client.close())  # makes requests to this server fail at once
            server.state, server.weight_version = status.state, status.weight_version
            server.reason, server.may_return = status.reason, status.may_return
        for url in self.fleet.servers.keys() - {status.url for status in state.servers}:
            self.home.spawn(self.forget(self.fleet.servers[url]))

    def lose(self, server: Server, reason: str, *, is_given_up: bool = False) -> None:
        self.report("lost", server.url, reason)

    async def check(self, server: Server) -> None:
        if server not in self._suspects:
            self._suspects.add(server)
            self.report("suspect", server.url, "")


@dataclass
class Follower:
    """An engine that can only generate; it is pickled, sent to another process and opened there."""

    client_type: type[ServerClient]
    salt: str  # the leader's ServerFleet.salt
    token: str | None
    timeouts: Timeouts
    max_connections: int  # connections per server from this process; other requests wait here
    limits: RequestLimits
    make_router: Callable[..., Router] = Router  # the result of the leader's `Router.for_followers`
    reads_grammars: bool = False
    weight_version: int = -1
    continues_completions = returns_topk = True
    check_sampling: ClassVar[Any] = RolloutEngine.check_sampling

    async def open(self, report: ReportServer) -> None:
        """Builds the fleet and its request loop on the running event loop; `report` informs the leader of failures."""
        raise_open_files()
        self._fleet = ServerFleet(salt=self.salt)
        self._home = HomeLoop(self._fleet.describe, timeout_s=self.timeouts.request_s)
        router = self.make_router(self._fleet, timeouts=self.timeouts)
        self._members = _FollowedMembers(self._home, self._fleet, router, self.timeouts, report)
        self._traffic = Traffic(is_held=True)  # until the first state arrives
        leader = Leader(self._home, self._members, self._traffic)  # RequestLoop needs one, but it has no followers
        self._requests = RequestLoop(
            self._home, self._members, self._traffic, leader, limits=self.limits, timeouts=self.timeouts
        )
        await self._home.move_here(self._home.end_tasks)  # there is no old home to leave

    def follow(self, state: FleetState) -> None:
        if state.weight_version != self.weight_version:
            self._fleet.sessions.clear()  # the load has emptied the caches
        self.weight_version = self._fleet.weight_version = state.weight_version
        self._fleet.newest_version = state.newest_version
        self._members.follow(state, self._client)
        self._traffic.is_held = not state.is_open
        self._home.wake()

    @property
    def state(self) -> FollowerState:
        servers = self._fleet.in_state()
        loads = tuple((item.url, item.num_requests, item.outstanding_tokens) for item in servers if item.num_requests)
        return FollowerState(self._traffic.num_running, self._traffic.num_with_minimum, loads)

    async def generate(self, token_ids: list[int], sampling: Sampling, **request: Any) -> list[Completion]:
        return await self._requests.generate(token_ids, sampling, **request)

    generate_group = RolloutEngine.generate_group

    async def unfinished(self) -> dict[int, Completion]:
        return await self._requests.unfinished()

    async def close(self) -> None:
        await self._home.end_tasks()
        await self._members.disconnect(for_good=True)

    def _client(self, url: str) -> ServerClient:
        return self.client_type(url, token=self.token, timeouts=self.timeouts, max_connections=self.max_connections)
