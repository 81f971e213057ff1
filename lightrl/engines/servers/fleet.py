"""ServerFleet: which servers may get requests, and which one a request goes to. Decisions only: no HTTP, no event loop.

join ─► starting ──(has the weights)──► routable ──► draining ──► forgotten
            ▲                              │
            └── restarting, lost ◄── lose ─┴──► lost or retired for good
"""

from __future__ import annotations

import secrets
import statistics
from collections.abc import Collection
from dataclasses import dataclass, field

from lightrl.engines.servers.server import ACTIVE, GONE, Server, State

MAX_SESSIONS = 65536  # remembered; then all are forgotten
# A server that is lost so often within so many weight versions is retired.
MAX_LOSSES, WITHIN_VERSIONS = 4, 8
SLOW_FACTOR = 3.0  # a server that takes so many times as long for a token as the others is named


@dataclass(eq=False, kw_only=True)
class ServerFleet:
    """The servers of an engine, and the sessions whose prefixes they hold.

    A server is routable only after it acknowledged the current weights. A session stays on its server while that server
    is routable and at most `max_lead_tokens` busier than the least busy one; a prefix cache is worth that much.
    """

    may_grow: bool = False  # servers may join that are not known yet
    max_lead_tokens: int = 65536
    salt: str = field(default_factory=lambda: secrets.token_hex(8))  # part of cache keys: two runs share no key-values
    servers: dict[str, Server] = field(default_factory=dict)  # address to server
    weight_version: int = -1  # all routable servers have it
    newest_version: int = -1  # that a server may have: of the load in progress, or the last
    is_loading: bool = False  # servers may report either version
    sessions: dict[str, str] = field(default_factory=dict)  # session to the address that has its prefix, until a load

    def join(self, server: Server) -> Server:
        """Adds a server that is up but does not have our weights."""
        self.servers[server.url] = server
        return server

    def admit(self, server: Server, weight_version: int) -> None:
        """Makes a server routable that has acknowledged these weights."""
        server.state, server.reason, server.may_return = "routable", "", False
        server.weight_version = weight_version

    def drain(self, server: Server) -> bool:
        """Sends no new requests to a server that is about to leave; False if it has none to finish."""
        if server.state in ACTIVE:
            server.state, server.reason = "draining", "it leaves"
        return server.state == "draining" and server.num_requests > 0

    def lose(self, server: Server, reason: str, *, is_given_up: bool = False) -> bool:
        """Marks a server that is gone, or whose weights are unknown; False if it was marked before.

        Requests wait for one of ours, which is restarted until it `is_given_up`, and for one that may answer again. One
        that was lost too often is retired, unless it is the last.
        """
        if not self.has(server):
            return False
        server.released.clear()
        is_restarted = server.process is not None and not is_given_up
        may_return = server.process is None and not is_given_up
        if server.state in GONE and not (server.state == "restarting" and is_given_up):
            return False
        was_gone = server.state in GONE
        newest = max(item.weight_version for item in self.servers.values())
        server.losses = (*server.losses, newest)[-MAX_LOSSES:]
        flaps = len(server.losses) == MAX_LOSSES and newest - server.losses[0] <= WITHIN_VERSIONS
        if may_return and flaps and any(item is not server for item in self.in_state(*ACTIVE)):
            reason = f"it was lost {MAX_LOSSES} times within {WITHIN_VERSIONS} weight versions, the last time: {reason}"
            server.state, may_return = "retired", False
        else:
            server.state = "restarting" if is_restarted else "lost"
        server.reason, server.may_return = reason, may_return
        return not was_gone

    def forget(self, server: Server) -> None:
        """Drops a server that left, or was restarted at another address."""
        if self.has(server):
            del self.servers[server.url]

    def has(self, server: Server) -> bool:
        return self.servers.get(server.url) is server

    def choose(self, session: str, *, min_version: int = -1, excluded: Collection[Server] = ()) -> Server | None:
        """The server for a request of this session; None if no server fits. Avoids `excluded` if another one fits."""
        fitting = [server for server in self.in_state("routable") if server.weight_version >= min_version]
        candidates = [server for server in fitting if server not in excluded] or fitting
        if not candidates:
            return None
        best = min(candidates, key=lambda server: (server.outstanding_tokens, server.num_requests))
        home = self.servers.get(self.sessions.get(session, ""))
        if home in candidates and home.outstanding_tokens <= best.outstanding_tokens + self.max_lead_tokens:
            best = home
        if len(self.sessions) >= MAX_SESSIONS:
            self.sessions.clear()
        self.sessions[session] = best.url
        return best

    def start_request(self, server: Server, tokens: int) -> None:
        server.outstanding_tokens += tokens
        server.num_requests += 1

    def end_request(self, server: Server, tokens: int) -> None:
        server.outstanding_tokens -= tokens
        server.num_requests -= 1

    def note_answer(self, url: str, seconds: float, num_tokens: int) -> str | None:
        """Counts an answer; returns a warning about a server that has become slower than the others."""
        server = self.servers.get(url)
        if server is None:
            return None
        server.note_answer(seconds, num_tokens)
        speeds = [one.ms_per_token for one in self.servers.values() if one is not server]
        others = [speed for speed in speeds if speed is not None]
        own = server.ms_per_token
        if own is None or not others:
            return None
        usual, was_slow = statistics.median(others), server.is_slow
        server.is_slow = own > SLOW_FACTOR * usual
        if was_slow or not server.is_slow:
            return None
        return (
            f"The server at {url} takes {own:.3g} ms for a token, the others {usual:.3g} ms. Look for another program "
            "on its GPU, throttling, other arguments, or a slow network."
        )

    def in_state(self, *states: State) -> list[Server]:
        """The servers in these states; all if none is named."""
        return [server for server in list(self.servers.values()) if not states or server.state in states]

    def urls(self, *states: State) -> list[str]:
        return [server.url for server in self.in_state(*states)]

    def cache_key(self, weight_version: int) -> str:
        """The key under which requests share key-values in a server: a weight version of this run."""
        return f"{self.salt}-{weight_version}"  # vLLM takes no slash

    def has_hope(self) -> bool:
        """Whether a server is routable or may become routable by itself."""
        return self.may_grow or any(
            server.state not in ("lost", "retired") or server.may_return for server in self.servers.values()
        )

    def describe(self) -> str:
        """One clause per server, for messages."""
        return "; ".join(server.describe() for server in self.servers.values())
