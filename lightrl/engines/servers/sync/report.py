"""SyncServers, the servers that have not failed in a weight sync; SyncReport, its outcome for each server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightrl.engines.engine import Verification
from lightrl.engines.servers.server import Server
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, WeightSyncError, WeightSyncUndone
from lightrl.trace import span

_T = TypeVar("_T")


@dataclass
class SyncReport:
    """The outcome of a sync: each server serves a version or is lost. Keys are server addresses."""

    weight_version: int  # the version to load
    previous_version: int | None = None  # the servers' version before the sync; None if this run had loaded none
    versions: dict[str, int] = field(default_factory=dict)  # the version that the server serves now
    lost: dict[str, str] = field(default_factory=dict)  # why the server is paused or gone, and must get no requests
    absent: dict[str, str] = field(default_factory=dict)  # why the server was lost before the sync
    rolled_back: dict[str, str] = field(default_factory=dict)  # why the server serves the previous version again
    verified_by: dict[str, Verification] = field(default_factory=dict)  # the check that the server's weights passed
    canaries: list[str] = field(default_factory=list)  # servers that cached a canary from the previous version
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # stage, pause, load, verify, resume

    def describe(self) -> str:
        serving = [
            f"{url} serves version {version}" + (f" again ({self.rolled_back[url]})" if url in self.rolled_back else "")
            for url, version in self.versions.items()
        ]
        failed = {**self.lost, **{url: f"was left out: {reason}" for url, reason in self.absent.items()}}
        return "; ".join([*serving, *(f"{url}: {reason}" for url, reason in failed.items())])


class SyncFailed(WeightSyncError):
    """No server has the new weights; `report` says which servers have the old ones and which are lost."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


class SyncUndone(SyncFailed, WeightSyncUndone):
    """No server has the new weights, but some serve the old weights."""


class SyncServers:
    """The servers in a sync; a server that fails moves from `left` to `lost`."""

    def __init__(self, servers: Sequence[Server], timeout_s: float) -> None:
        self.left = list(servers)
        self.timeout_s = timeout_s  # deadline for each request, and for the trainer's next bucket
        self.has_old_weights = True  # whether the servers in `left` still have their old weights
        self.lost: dict[str, str] = {}  # address → reason
        self.silent: set[Server] = set()  # lost servers that do not answer at all

    async def ask(self, question: Callable[[Server], Awaitable[_T]]) -> dict[Server, _T]:
        """Calls `question` for all servers in `left` concurrently; returns the results of those that did not fail."""
        servers = list(self.left)

        async def answer(server: Server) -> _T:
            with span("sync", "sync", f"{server.url} sync"):
                return await question(server)

        outcomes = await asyncio.gather(*map(answer, servers), return_exceptions=True)
        answers: dict[Server, _T] = {}
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self.lose(server, str(outcome))
                if isinstance(outcome, (EngineUnreachable, EngineTimeout)):
                    self.silent.add(server)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[server] = outcome
        return answers

    def lose(self, server: Server, reason: str) -> None:
        self.lost[server.url] = reason
        self.left = [other for other in self.left if other is not server]

    def check_some_left(self) -> None:
        if not self.left:
            raise WeightSyncError("no server is left")
