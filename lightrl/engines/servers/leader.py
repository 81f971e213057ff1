"""Leader: requests of several processes to the servers that one of them controls; its side of it.

    rank 0: engine, Leader ── FleetState: servers, gate ─────────────► Follower ── /generate ──► servers
                                 ◄── FollowerState; servers that failed ────

A follower knows what it is sent: it chooses among servers and continues requests elsewhere as the engine does, but
whether a server is lost, and when requests may begin, the leader decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.server import ServerStatus


@dataclass
class Traffic:
    """Requests in flight, of this process or of all that follow it, and whether new ones may begin."""

    num_running: int = 0  # completions that a server generates
    num_waiting: int = 0  # completions that wait for the gate or for a server
    is_held: bool = False  # requests wait for the end of a load
    is_paused: bool = False
    has_minimum: bool = False  # a request has min_new_tokens: a paused server would count from 0, so it is aborted

    @property
    def is_open(self) -> bool:
        return not (self.is_held or self.is_paused)


@dataclass(frozen=True)
class FleetState:
    """State that followers need; it is pickled."""

    weight_version: int
    newest_version: int
    is_open: bool  # requests may begin
    may_grow: bool  # servers may join
    servers: list[ServerStatus]
    router: Any  # the state of the leader's


@dataclass(frozen=True)
class FollowerState:
    """Answer of a follower."""

    num_running: int = 0  # completions that a server generates
    has_minimum: bool = False  # a request had `min_new_tokens`
    loads: tuple[tuple[str, int, int], ...] = ()  # address, requests, outstanding tokens


class FollowerProcesses(Protocol):
    """All followers, as the leader reaches them."""

    async def notify(self) -> None:
        """Returns when each has the leader's state and its own was noted, or it has ended."""
        ...

    def post(self) -> object:
        """Sends the leader's state without waiting."""
        ...


@dataclass(eq=False)
class Leader:
    """Keeps the followers' view of the fleet up to date; does nothing while there are none."""

    home: HomeLoop
    members: Members
    traffic: Traffic
    _followers: FollowerProcesses | None = None
    _posting: asyncio.Task[Any] | None = None

    def lead(self, followers: FollowerProcesses | None) -> None:
        """Leaves requests to these processes alone; None ends that."""
        if self._posting is not None:
            self._posting.cancel()
        self._followers = followers
        self._posting = None if followers is None else self.home.spawn(self._post_changes(followers))

    async def _post_changes(self, followers: FollowerProcesses) -> None:
        while True:
            await self.home.wait_for_change(3600.0)
            followers.post()

    async def notify(self) -> None:
        """Returns when all followers have the present state, and theirs is noted."""
        if self._followers is not None:
            await self._followers.notify()

    def state(self) -> FleetState:
        fleet, router = self.members.fleet, self.members.router
        servers = [server.status() for server in fleet.in_state()]
        versions = fleet.weight_version, fleet.newest_version
        return FleetState(*versions, self.traffic.is_open, fleet.may_grow, servers, router.state)

    def on_follower_states(self, states: Sequence[FollowerState]) -> None:
        """Counts the requests of all followers, given the latest state of each."""
        self.traffic.num_running = sum(state.num_running for state in states)
        self.traffic.has_minimum |= any(state.has_minimum for state in states)
        self.members.router.note_loads(load for state in states for load in state.loads)

    def on_server_failed(self, kind: str, url: str, reason: str) -> None:
        """A follower's request failed at a server, which is `lost` or `suspect`."""
        server = self.members.fleet.servers.get(url)
        if server is None:
            return
        if kind == "lost":
            self.members.lose(server, reason)
        else:
            self.home.spawn(self.members.check(server))
