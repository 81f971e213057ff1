"""ServerFleet: decides which servers may get requests, and which server gets each one. Uses no HTTP or event loop.

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

MAX_SESSIONS = 65536  # at this number of sessions, all are forgotten
# A server that is lost MAX_LOSSES times within WITHIN_VERSIONS weight versions is retired.
MAX_LOSSES, WITHIN_VERSIONS = 4, 8
SLOW_FACTOR = 3.0  # warn about a server that takes this many times as long per token as the others


@dataclass(eq=False, kw_only=True)
class ServerFleet:
    """The servers of an engine, and which sessions' prefixes each server has in its cache.

    A server is routable only after it has acknowledged the current weights. A session stays on its server unless that
    server has over `max_lead_tokens` more outstanding tokens than the least busy one: a cached prefix saves that many.
    """

    may_grow: bool = False  # whether new servers may join
    max_lead_tokens: int = 65536
    salt: str = field(default_factory=lambda: secrets.token_hex(8))  # in cache keys, so that runs share no prefixes
    servers: dict[str, Server] = field(default_factory=dict)  # address → server
    weight_version: int = -1  # the version on all routable servers
    newest_version: int = -1  # the newest version that a server may have, from the current or last load
    is_loading: bool = False  # during a load, servers may report either version
    sessions: dict[str, str] = field(default_factory=dict)  # session → server with its prefix; cleared by a load

    def join(self, server: Server) -> Server:
        """Adds a running server that does not have this run's weights."""
        self.servers[server.url] = server
        return server

    def admit(self, server: Server, weight_version: int) -> None:
        """Makes a server routable after it has acknowledged these weights."""
        server.state, server.reason, server.may_return = "routable", "", False
        server.weight_version = weight_version

    def drain(self, server: Server) -> bool:
        """Stops new requests to a leaving server; returns whether it still has requests in flight."""
        if server.state in ACTIVE:
            server.state, server.reason = "draining", "it is leaving"
        return server.state == "draining" and server.num_requests > 0

    def lose(self, server: Server, reason: str, *, is_given_up: bool = False) -> bool:
        """Marks a server as lost, because it is gone or its weights are unknown; returns False if it was lost before.

        A server that the engine started is restarted until it `is_given_up`; any other server may return on its own.
        Requests wait for both kinds. A server that is lost too often is retired, unless it is the last one.
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
        is_unstable = len(server.losses) == MAX_LOSSES and newest - server.losses[0] <= WITHIN_VERSIONS
        if may_return and is_unstable and any(item is not server for item in self.in_state(*ACTIVE)):
            reason = f"it was lost {MAX_LOSSES} times within {WITHIN_VERSIONS} weight versions, the last time: {reason}"
            server.state, may_return = "retired", False
        else:
            server.state = "restarting" if is_restarted else "lost"
        server.reason, server.may_return = reason, may_return
        return not was_gone

    def forget(self, server: Server) -> None:
        """Removes a server that has left, or was restarted at a different address."""
        if self.has(server):
            del self.servers[server.url]

    def has(self, server: Server) -> bool:
        return self.servers.get(server.url) is server

    def choose(self, session: str, *, min_version: int = -1, excluded: Collection[Server] = ()) -> Server | None:
        """Returns the server for this session's request, or None if none is eligible; avoids `excluded` if it can."""
        eligible = [server for server in self.in_state("routable") if server.weight_version >= min_version]
        candidates = [server for server in eligible if server not in excluded] or eligible
        if not candidates:
            return None
        best = min(candidates, key=lambda server: (server.outstanding_tokens, server.num_requests))
        previous = self.servers.get(self.sessions.get(session, ""))
        if previous in candidates and previous.outstanding_tokens <= best.outstanding_tokens + self.max_lead_tokens:
            best = previous
        if len(self.sessions) >= MAX_SESSIONS:
            self.sessions.clear()
        self.sessions[session] = best.url
        return best

    def note_answer(self, url: str, seconds: float, num_tokens: int) -> str | None:
        """Records an answer's speed; returns a warning if the server has become much slower than the others."""
        server = self.servers.get(url)
        if server is None:
            return None
        server.note_answer(seconds, num_tokens)
        speeds = [other.ms_per_token for other in self.servers.values() if other is not server]
        other_speeds = [speed for speed in speeds if speed is not None]
        speed = server.ms_per_token
        if speed is None or not other_speeds:
            return None
        median, was_slow = statistics.median(other_speeds), server.is_slow
        server.is_slow = speed > SLOW_FACTOR * median
        if was_slow or not server.is_slow:
            return None
        return (
            f"The server at {url} takes {speed:.3g} ms per token; the others take {median:.3g} ms. Look for another "
            "program on its GPU, throttling, different arguments, or a slow network."
        )

    def in_state(self, *states: State) -> list[Server]:
        """Returns the servers in these states; all if no state is given."""
        return [server for server in list(self.servers.values()) if not states or server.state in states]

    def urls(self, *states: State) -> list[str]:
        return [server.url for server in self.in_state(*states)]

    def cache_key(self, weight_version: int) -> str:
        """Returns the prefix cache key for this run's requests that use this weight version."""
        return f"{self.salt}-{weight_version}"  # vLLM accepts no slash

    def has_hope(self) -> bool:
        """Whether any server is routable, or may become routable without the user's help."""
        return self.may_grow or any(
            server.state not in ("lost", "retired") or server.may_return for server in self.servers.values()
        )

    def describe(self) -> str:
        """Describes each server in one clause, for messages."""
        return "; ".join(server.describe() for server in self.servers.values())
