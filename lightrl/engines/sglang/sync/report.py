"""The servers of one weight sync: which are left, and what happened to each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightrl.engines.abilities import Proof
from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, WeightSyncError, WeightSyncUndone
from lightrl.trace import span

_T = TypeVar("_T")


@dataclass
class SyncReport:
    """What happened to each server: it serves a version again, or it is lost. Keys are addresses."""

    weight_version: int  # to be loaded
    previous_version: int | None = None  # that the servers had before; None: none of this run
    versions: dict[str, int] = field(default_factory=dict)  # the version it serves now
    lost: dict[str, str] = field(default_factory=dict)  # why it is paused or gone; it must get no request
    absent: dict[str, str] = field(default_factory=dict)  # why it took no part: it was lost before
    rolled_back: dict[str, str] = field(default_factory=dict)  # why it serves the previous version again
    proofs: dict[str, Proof] = field(default_factory=dict)  # how each server's weights were checked; see ProvesWeights
    planted: list[str] = field(default_factory=list)  # servers with a canary of the previous version; see CacheCanary
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # stage, pause, load, verify, resume

    def describe(self) -> str:
        serve = [
            f"{url} serves version {version}" + (f" again ({self.rolled_back[url]})" if url in self.rolled_back else "")
            for url, version in self.versions.items()
        ]
        gone = {**self.lost, **{url: f"took no part: {reason}" for url, reason in self.absent.items()}}
        return "; ".join([*serve, *(f"{url}: {what}" for url, what in gone.items())])


class SyncFailed(WeightSyncError):
    """No server has the new weights; `report` says which serve the old ones and which are lost."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


class SyncUndone(SyncFailed, WeightSyncUndone):
    """No server has the new weights, and some serve the old ones."""


class Fleet:
    """The servers of one sync; one that fails moves from `clients` to `lost`.

    Args:
        clients: one for each server.
        timeout_s: for each request, and for the trainer's next bucket.
    """

    def __init__(self, clients: Sequence[SGLangClient], timeout_s: float) -> None:
        self.clients = list(clients)
        self.timeout_s = timeout_s
        self.has_old_weights = True  # the weights of `clients` are untouched
        self.lost: dict[str, str] = {}  # why, by address
        self.silent: set[str] = set()  # the lost ones that do not answer at all

    async def ask(self, question: Callable[[SGLangClient], Awaitable[_T]]) -> dict[str, _T]:
        """Asks all servers at once and waits for the slowest; answers by address."""
        clients = list(self.clients)

        async def answer(client: SGLangClient) -> _T:
            with span("sync", "sync", f"{client.url} sync"):
                return await question(client)

        outcomes = await asyncio.gather(*map(answer, clients), return_exceptions=True)
        answers: dict[str, _T] = {}
        for client, outcome in zip(clients, outcomes, strict=True):
            if isinstance(outcome, EngineError):
                self.lose(client.url, str(outcome))
                if isinstance(outcome, (EngineUnreachable, EngineTimeout)):
                    self.silent.add(client.url)
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                answers[client.url] = outcome
        return answers

    def lose(self, url: str, reason: str) -> None:
        self.lost[url] = reason
        self.clients = [client for client in self.clients if client.url != url]

    def check_some_left(self) -> None:
        if not self.clients:
            raise WeightSyncError("no server is left")
