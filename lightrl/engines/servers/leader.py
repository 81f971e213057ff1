"""Leader: lets other processes send requests to the servers that this process controls; see also follower.py.

    rank 0: engine, Leader ── FleetState: servers, gate ─────────────► Follower ── /generate ──► servers
                                 ◄── FollowerState; failed servers ─────────

A follower chooses servers and repeats failed requests like the engine does, based on the state that the leader sends.
The leader decides whether a server is lost and when requests may begin.
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
    """The requests in flight from this process or its followers, and the gate: whether new requests may begin."""

    num_running: int = 0  # completions that a server is generating
    num_with_minimum: int = 0  # completions with min_new_tokens, which servers count from 0 again after a pause
    num_waiting: int = 0  # completions that wait for the gate or for a server
    is_held: bool = False  # new requests wait until a load ends
    is_paused: bool = False

    @property
    def is_open(self) -> bool:
        return not (self.is_held or self.is_paused)


@dataclass(frozen=True)
class FleetState:
    """The leader's state, pickled and sent to followers."""

    weight_version: int
    newest_version: int
    is_open: bool  # whether requests may begin
    may_grow: bool  # whether new servers may join
    servers: list[ServerStatus]
    router: Any  # the state of the leader's router


@dataclass(frozen=True)
class FollowerState:
    """A follower's state, sent back to the leader."""

    num_running: int = 0  # completions that a server is generating
    num_with_minimum: int = 0  # running completions with `min_new_tokens`
    loads: tuple[tuple[str, int, int], ...] = ()  # address, requests, outstanding tokens


class FollowerProcesses(Protocol):
    """The leader's connection to all followers."""

    async def notify(self) -> None:
        """Returns once each follower has the leader's state and has sent its own state back, or has exited."""

    def post(self) -> object:
        """Sends the leader's state without waiting for answers."""


@dataclass(eq=False)
class Leader:
    """Keeps the followers' copies of the fleet up to date, if there are followers."""

    home: HomeLoop
    members: Members
    traffic: Traffic
    _followers: FollowerProcesses | None = None
    _posting: asyncio.Task[Any] | None = None

    def lead(self, followers: FollowerProcesses | None) -> None:
        """Makes these processes send all requests, until called with None."""
        if self._posting is not None:
            self._posting.cancel()
        self._followers = followers
        self._posting = None if followers is None else self.home.spawn(self._post_changes(followers))

    async def _post_changes(self, followers: FollowerProcesses) -> None:
        while True:
            await self.home.wait_for_change(3600.0)
            followers.post()

    async def notify(self) -> None:
        """Returns once all followers have the current state and have sent their own states back."""
        if self._followers is not None:
            await self._followers.notify()

    def state(self) -> FleetState:
        fleet, router = self.members.fleet, self.members.router
        servers = [server.status() for server in fleet.in_state()]
        versions = fleet.weight_version, fleet.newest_version
        return FleetState(*versions, self.traffic.is_open, fleet.may_grow, servers, router.state)

    def on_follower_states(self, states: Sequence[FollowerState]) -> None:
        """Adds up the requests from all followers, given each follower's latest state."""
        self.traffic.num_running = sum(state.num_running for state in states)
        self.traffic.num_with_minimum = sum(state.num_with_minimum for state in states)
        self.members.router.note_loads(load for state in states for load in state.loads)

    def on_server_failed(self, kind: str, url: str, reason: str) -> None:
        """Called when a follower's request failed; `kind` is `lost` or `suspect`, the follower's view of the server."""
        server = self.members.fleet.servers.get(url)
        if server is not None and kind == "lost":
            self.members.lose(server, reason)
        elif server is not None:
            self.home.spawn(self.members.check(server))
