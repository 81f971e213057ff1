"""The servers of one weight sync, who of them is left, and what became of each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from lightrl.engines.sglang.client import SGLangClient
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, WeightSyncError

_T = TypeVar("_T")


@dataclass
class SyncReport:
    """What became of each server: it serves a version again, or it is lost."""

    weight_version: int  # that was to be loaded
    versions: dict[str, int] = field(default_factory=dict)  # address → the version it serves now
    lost: dict[str, str] = field(default_factory=dict)  # address → what happened; paused or gone, not to be routed to
    absent: dict[str, str] = field(default_factory=dict)  # address → why it took no part: it was lost before
    rolled_back: dict[str, str] = field(default_factory=dict)  # address → why it serves the version before again
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # stage, pause, load, verify, resume

    def describe(self) -> str:
        serve = [
            f"{url} serves version {version}" + (f" again ({self.rolled_back[url]})" if url in self.rolled_back else "")
            for url, version in self.versions.items()
        ]
        gone = {**self.lost, **{url: f"it took no part: {why}" for url, why in self.absent.items()}}
        return "; ".join([*serve, *(f"{url}: {what}" for url, what in gone.items())])


class SyncFailed(WeightSyncError):
    """No server has the new weights; `report` says which serve the old ones and which are lost."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


class Fleet:
    """The servers of one sync; who fails to answer drops out of `clients` and into `lost`.

    Args:
        clients: one of each server.
        timeout_s: of each question to a server, and of each wait for the trainer's next bucket.
    """

    def __init__(self, clients: Sequence[SGLangClient], timeout_s: float) -> None:
        self.clients = list(clients)
        self.timeout_s = timeout_s
        self.lost: dict[str, str] = {}
        self.silent: set[str] = set()  # those of the lost that do not answer at all

    async def ask(self, question: Callable[[SGLangClient], Awaitable[_T]]) -> dict[str, _T]:
        """The answers by address, of all at once; waits for the slowest."""
        clients = list(self.clients)
        answers = await asyncio.gather(*(question(client) for client in clients), return_exceptions=True)
        found: dict[str, _T] = {}
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, EngineError):
                self.lose(client.url, str(answer))
                if isinstance(answer, (EngineUnreachable, EngineTimeout)):
                    self.silent.add(client.url)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[client.url] = answer
        return found

    def lose(self, url: str, what: str) -> None:
        self.lost[url] = what
        self.clients = [client for client in self.clients if client.url != url]

    def check_some_left(self) -> None:
        if not self.clients:
            raise WeightSyncError("no server is left")
