"""Requests of several processes to the servers that one of them controls.

    rank 0: SGLangEngine, Leader ── news: servers, gate ────────────► SGLangFollower ── /generate ──► servers
                                 ◄── state: requests; suspects ──────

A follower knows what it is told: it chooses among servers and continues requests elsewhere as the engine does, but
whether a server is lost, and when requests may begin, the leader decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.engines.abilities import Followers
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.gateway import Gateway, GatewayState
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.open_files import raise_open_files
from lightrl.engines.sglang.pool import PooledServer
from lightrl.engines.sglang.sync.loading import Loading
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.engines.sglang.writer import NoFollowers, RequestLimits, Writer
from lightrl.trajectory import Sampling


@dataclass(frozen=True)
class News:
    """What a leader tells."""

    weight_version: int
    is_open: bool  # requests may begin
    may_grow: bool  # servers may join
    servers: list[PooledServer]
    gateway: GatewayState | None  # None: requests go to each server directly


@dataclass(frozen=True)
class FollowerState:
    """What a follower answers."""

    num_running: int = 0  # completions that a server writes
    has_minimum: bool = False  # a request had `min_new_tokens`
    loads: tuple[tuple[str, int, int], ...] = ()  # address, requests, outstanding tokens


class Leader:
    """The engine as its followers' processes use it."""

    def __init__(
        self, home: HomeLoop, members: Members, writer: Writer, loading: Loading, follower: SGLangFollower
    ) -> None:
        self.follower = follower
        self._home = home
        self._members = members
        self._writer = writer
        self._loading = loading

    def lead(self, followers: Followers | None) -> None:
        self._writer.followers = followers or NoFollowers()
        self._home.on_wake = self._writer.followers.post

    def news(self) -> News:
        is_open = not (self._writer.is_held or self._writer.is_paused)
        servers = list(self._members.pool.servers.values())
        gateway = self._members.gateway
        state = None if gateway is None else gateway.state
        return News(self._loading.weight_version, is_open, self._members.may_grow, servers, state)

    def note(self, states: Sequence[FollowerState]) -> None:
        self._writer.num_running = sum(state.num_running for state in states)
        self._writer.has_minimum |= any(state.has_minimum for state in states)
        if self._members.gateway is not None:  # it counts them
            return
        for url, server in self._members.pool.servers.items():
            loads = [load for state in states for load in state.loads if load[0] == url]
            server.num_requests = sum(load[1] for load in loads)
            server.outstanding_tokens = sum(load[2] for load in loads)

    def hear(self, kind: str, url: str, reason: str) -> None:
        if kind == "lost":
            self._members.lose(url, reason)
        else:
            self._home.spawn(self._members.look(url))


class _ToldMembers(Members):
    """Members as the leader tells them."""

    def __init__(
        self,
        home: HomeLoop,
        make_client: Callable[[str], SGLangClient],
        report: Callable[[str, str, str], object],
        *,
        salt: str,
        timeouts: Timeouts,
    ) -> None:
        super().__init__(home, make_client, lambda url: None, lambda url: None, timeouts=timeouts)
        self.salt = salt
        self._report = report
        self._suspects: set[str] = set()  # reported since the last news

    def follow(self, news: News) -> None:
        self._suspects.clear()
        self.may_grow = news.may_grow
        if self.gateway is not None and news.gateway is not None:
            if news.gateway.num_cuts > self.gateway.state.num_cuts:
                self._home.spawn(self.gateway.close())
            self.gateway.state = news.gateway
        for told in news.servers:
            was_here = told.url in self.clients
            server = self.pool.servers.get(told.url) or self.pool.join(told.url)
            if not was_here:
                self.clients[told.url] = self._make_client(told.url)
            elif told.state in ("restarting", "lost", "retired") and server.state != told.state:
                self._home.spawn(self.clients[told.url].close())  # fails its requests at once
            server.state, server.weight_version = told.state, told.weight_version
            server.reason, server.may_return = told.reason, told.may_return
        for url in self.clients.keys() - {told.url for told in news.servers}:
            self.pool.forget(url)
            self._home.spawn(self.clients.pop(url).close(for_good=True))

    def lose(self, url: str, reason: str) -> None:
        self._report("lost", url, reason)

    async def look(self, url: str) -> None:
        if url not in self._suspects:
            self._suspects.add(url)
            self._report("suspect", url, "")

    def watch_all(self) -> None:
        """The leader does."""


@dataclass
class SGLangFollower:
    """An engine that only requests completions.

    Args:
        salt: of the run's keys in the servers' prefix caches.
        max_connections: of this process to each server; more requests queue here.
    """

    salt: str
    token: str | None
    timeouts: Timeouts
    max_connections: int
    max_retries: int
    limits: RequestLimits
    gateway: tuple[str, str | None] | None = None  # address and key
    weight_version: int = -1

    async def open(self, report: Callable[[str, str, str], object]) -> None:
        raise_open_files()
        self._home = HomeLoop(lambda: self._members.pool.describe(), lambda: None, timeout_s=self.timeouts.request_s)
        self._members = _ToldMembers(self._home, self._client, report, salt=self.salt, timeouts=self.timeouts)
        if self.gateway is not None:
            self._members.gateway = Gateway(*self.gateway, self._members.pool, timeouts=self.timeouts)
        self._writer = Writer(
            self._home, self._members, limits=self.limits, timeouts=self.timeouts, max_retries=self.max_retries
        )
        self._writer.is_held = True  # until the first news
        await self._home.move_here(self._home.end_tasks)

    def follow(self, news: News) -> None:
        if news.weight_version != self.weight_version:
            self._members.pool.sessions.clear()  # the load has emptied the caches
        self.weight_version = news.weight_version
        self._members.follow(news)
        self._writer.is_held = not news.is_open
        self._home.wake()

    @property
    def state(self) -> FollowerState:
        servers = self._members.pool.servers.values()
        loads = tuple((item.url, item.num_requests, item.outstanding_tokens) for item in servers if item.num_requests)
        return FollowerState(self._writer.num_running, self._writer.has_minimum, loads)

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, **of_request: Any
    ) -> list[Completion]:
        return await self._writer.write(token_ids, sampling, session, n, **of_request)

    generate_group = RolloutEngine.generate_group

    async def unfinished(self) -> dict[int, Completion]:
        return await self._writer.unfinished()

    async def close(self) -> None:
        await self._home.end_tasks()
        await self._members.disconnect(for_good=True)

    def _client(self, url: str) -> SGLangClient:
        return SGLangClient(url, token=self.token, timeouts=self.timeouts, max_connections=self.max_connections)
