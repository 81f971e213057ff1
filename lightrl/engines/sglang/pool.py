"""ServerPool: which servers may get requests, and which one a request goes to. Decisions only: no HTTP, no event loop.

join ─► starting ──(has the weights)──► routable ◄──► syncing ──► draining ──► forgotten
            ▲                              │              │
            └── restarting, lost ◄── lose ─┴──────────────┘──► lost or retired for good
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

State = Literal["starting", "routable", "syncing", "draining", "restarting", "lost", "retired"]
MAX_SESSIONS = 65536  # remembered; then all are forgotten
# A server that is lost so often within so many weight versions is retired.
MAX_LOSSES, WITHIN_VERSIONS = 4, 8


# A server that takes so many times as long for a token as the others is named, by about so many of its latest answers.
SLOW_FACTOR, SLOW_ANSWERS = 3.0, 64


@dataclass
class PooledServer:
    """What the pool knows of one server."""

    url: str
    state: State = "starting"
    weight_version: int = -1  # acknowledged
    outstanding_tokens: int = 0  # of its requests: prompts and what may still be written
    num_requests: int = 0
    reason: str = ""  # why it is not routable
    may_return: bool = False  # it is lost, and admitted again if it answers
    losses: tuple[int, ...] = ()  # the pool's newest weight version at each of the latest
    num_answers: int = 0
    recent_s: float = 0.0  # that the latest answers took, and their tokens; older ones count less
    recent_tokens: float = 0.0
    is_slow: bool = False  # and named for it


class ServerPool:
    """The servers of an engine, and the sessions whose prefixes they hold.

    A server is routable only after it acknowledged the current weights. A session stays on its server while that server
    is routable and at most `max_lead_tokens` busier than the least busy one; a prefix cache is worth that much.
    """

    def __init__(self, *, max_lead_tokens: int = 65536) -> None:
        self.servers: dict[str, PooledServer] = {}
        self.max_lead_tokens = max_lead_tokens
        self.sessions: dict[str, str] = {}  # and where their prefixes are; a load empties the caches, and clears this

    def join(self, url: str) -> PooledServer:
        """Adds a server that is up but does not have our weights, in place of an earlier one at this address."""
        earlier = self.servers.get(url)
        self.servers[url] = PooledServer(url, losses=earlier.losses if earlier is not None else ())
        return self.servers[url]

    def admit(self, url: str, weight_version: int) -> None:
        """Makes a server routable that has acknowledged these weights."""
        server = self.servers[url]
        server.state, server.weight_version, server.reason, server.may_return = "routable", weight_version, "", False

    def hold(self, url: str, reason: str) -> None:
        """Sends no new requests to a server while it gets weights."""
        server = self.servers[url]
        if server.state == "routable":
            server.state, server.reason = "syncing", reason

    def drain(self, url: str) -> bool:
        """Sends no new requests to a server that is about to leave; False if it has none to finish."""
        server = self.servers[url]
        if server.state in ("routable", "syncing", "starting"):
            server.state, server.reason = "draining", "it leaves"
        return server.state == "draining" and server.num_requests > 0

    def lose(self, url: str, reason: str, *, comes_back: bool = False, may_return: bool = False) -> bool:
        """Marks a server that is gone, or whose weights are unknown; False if it was marked before.

        Requests wait for one that `comes_back`, since it is being restarted, or `may_return`. One that may return but
        was lost too often is retired, unless it is the last.
        """
        server = self.servers.get(url)
        if server is None:
            return False
        was_marked = server.state in ("restarting", "lost", "retired")
        if was_marked and not (server.state == "restarting" and not comes_back):
            server.may_return = server.may_return and may_return
            return False
        newest = max(item.weight_version for item in self.servers.values())
        server.losses = (*server.losses, newest)[-MAX_LOSSES:]
        flaps = len(server.losses) == MAX_LOSSES and newest - server.losses[0] <= WITHIN_VERSIONS
        if may_return and flaps and set(self.urls("starting", "routable", "syncing")) - {url}:
            reason = f"it was lost {MAX_LOSSES} times within {WITHIN_VERSIONS} weight versions, the last time: {reason}"
            server.state, may_return = "retired", False
        else:
            server.state = "restarting" if comes_back else "lost"
        server.reason, server.may_return = reason, may_return
        return not was_marked

    def forget(self, url: str) -> None:
        """Drops an address that is no longer in use: the server was restarted at another."""
        self.servers.pop(url, None)

    def choose(self, session: str, *, min_version: int = -1, excluded: Collection[str] = ()) -> str | None:
        """The address for a request of this session; None if no server fits. Avoids `excluded` if another one fits."""
        fitting = [
            item for item in self.servers.values() if item.state == "routable" and item.weight_version >= min_version
        ]
        candidates = [item for item in fitting if item.url not in excluded] or fitting
        if not candidates:
            return None
        best = min(candidates, key=lambda item: (item.outstanding_tokens, item.num_requests))
        home = self.servers.get(self.sessions.get(session, ""))
        if home in candidates and home.outstanding_tokens <= best.outstanding_tokens + self.max_lead_tokens:
            best = home
        if len(self.sessions) >= MAX_SESSIONS:
            self.sessions.clear()
        self.sessions[session] = best.url
        return best.url

    def start_request(self, url: str, tokens: int) -> PooledServer:
        """Counts a request; pass the result to `end_request`."""
        server = self.servers[url]
        server.outstanding_tokens += tokens
        server.num_requests += 1
        return server

    def end_request(self, server: PooledServer, tokens: int) -> None:
        server.outstanding_tokens -= tokens
        server.num_requests -= 1

    def note_answer(self, url: str, seconds: float, num_tokens: int) -> str | None:
        """Notes how long a server took for an answer; what to say about one that has become slower than the others."""
        if url not in self.servers:
            return None
        server = self.servers[url]
        kept = 1 - 1 / SLOW_ANSWERS
        server.recent_s = server.recent_s * kept + seconds
        server.recent_tokens = server.recent_tokens * kept + num_tokens
        server.num_answers += 1
        known = [item for item in self.servers.values() if item.num_answers >= SLOW_ANSWERS and item.recent_tokens]
        others = [1000 * item.recent_s / item.recent_tokens for item in known if item is not server]
        if server not in known or not others:
            return None
        own, usual, was_slow = 1000 * server.recent_s / server.recent_tokens, statistics.median(others), server.is_slow
        server.is_slow = own > SLOW_FACTOR * usual
        if was_slow or not server.is_slow:
            return None
        return (
            f"The server at {url} takes {own:.3g} ms for a token, the others {usual:.3g} ms. Look for another program "
            "on its GPU, throttling, other arguments, or a slow network."
        )

    def urls(self, *states: State) -> list[str]:
        """Addresses of the servers in these states; all if none is named."""
        return [item.url for item in self.servers.values() if not states or item.state in states]

    def has_hope(self) -> bool:
        """Whether a server is routable or may become routable by itself."""
        return any(item.state not in ("lost", "retired") or item.may_return for item in self.servers.values())

    def describe(self) -> str:
        """One clause per server, for messages."""
        return "; ".join(
            f"{item.url} is {item.state} with version {item.weight_version} and {item.num_requests} requests"
            + (f" ({item.reason})" if item.reason else "")
            for item in self.servers.values()
        )
