"""Server: one of an engine's servers, with its state, its load and what it reports about itself."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Literal

import torch

from lightrl.checks.printable import count_text
from lightrl.engines.engine import Verification
from lightrl.engines.servers.client import MEMORY_PARTS, MemoryPart, ServerClient, ServerInfo
from lightrl.engines.servers.processes.process import ServerProcess

State = Literal["starting", "routable", "draining", "restarting", "lost", "retired"]
ACTIVE: tuple[State, ...] = ("starting", "routable")  # can receive weights
GONE: tuple[State, ...] = ("restarting", "lost", "retired")
SPEED_ANSWERS = 64  # number of recent answers over which a server's speed is averaged


@dataclass(eq=False)
class Server:
    """A server at one address, from when it joins until it is forgotten; used only on the home loop.

    `ServerFleet` decides the state; `Members` and `Watch` act on it. When the engine restarts a server, it makes
    a new Server with a new address and the same process object.
    """

    client: ServerClient
    process: ServerProcess | None = None  # set if the engine started it
    state: State = "starting"
    reason: str = ""  # why it is not routable
    may_return: bool = False  # whether a lost server is admitted again when it answers
    losses: tuple[int, ...] = ()  # the fleet's newest weight version at each recent loss of this server
    weight_version: int = -1  # the last version that it acknowledged
    verified_by: Verification = "version"  # the strongest check that the last load passed
    info: ServerInfo | None = None  # None until `identify`
    digest_dtype: torch.dtype | None = None  # the dtype for which its digests matched the trainer's
    logged_check: Verification | None = None  # the check that was last logged for this process
    released: set[MemoryPart] = field(default_factory=set)  # parts of its memory; resuming other parts would crash it
    num_requests: int = 0
    outstanding_tokens: int = 0  # prompt tokens plus max_new_tokens of its requests
    num_answers: int = 0
    recent_s: float = 0.0  # seconds and tokens of recent answers, with decaying weights
    recent_tokens: float = 0.0
    is_slow: bool = False  # whether it is much slower than the others; logged when it slows down

    @property
    def url(self) -> str:
        return self.client.url

    @property
    def silent_s(self) -> float:
        """Seconds since its last answer to any request. A busy server may delay one answer while it sends others."""
        last = self.client.last_answer_at
        return float("inf") if last is None else time.monotonic() - last

    def status(self) -> ServerStatus:
        return ServerStatus(**{item.name: getattr(self, item.name) for item in fields(ServerStatus)})

    def describe(self) -> str:
        """Describes the server in a clause, for messages."""
        reason, requests = f" ({self.reason})" if self.reason else "", count_text(self.num_requests, "request")
        return f"{self.url} is {self.state} with version {self.weight_version} and {requests}{reason}"

    def rejoin(self) -> None:
        """Called when a lost server answers again at its address; it no longer has this run's weights."""
        self.state, self.reason, self.may_return = "starting", "", False
        self.weight_version = -1

    async def identify(self, *, timeout_s: float = 0.0) -> bool:
        """Updates `info`; returns whether a different process now answers at the address."""
        info = await self.client.server_info(timeout_s=timeout_s)
        is_other_process = self.info is not None and self.info.identity != info.identity
        if is_other_process:
            self.digest_dtype = self.logged_check = None
        self.info = info
        return is_other_process

    async def release_memory(self) -> None:
        """Releases the memory that the server still holds; pause the server first, because it crashes unless idle."""
        tags = [part for part in MEMORY_PARTS if part not in self.released]
        self.released.update(tags)  # before the request; if the request fails, the server is lost anyway
        if tags:
            await self.client.release_memory(tags)

    async def resume_memory(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        """Resumes the released ones among `parts`, one at a time."""
        for part in MEMORY_PARTS:
            if part in parts and part in self.released:
                self.released.discard(part)
                await self.client.resume_memory([part])

    def note_answer(self, seconds: float, num_tokens: int) -> None:
        decay = 1 - 1 / SPEED_ANSWERS
        self.recent_s = self.recent_s * decay + seconds
        self.recent_tokens = self.recent_tokens * decay + num_tokens
        self.num_answers += 1

    @property
    def ms_per_token(self) -> float | None:
        """Milliseconds per token over recent answers; None while there are too few."""
        is_known = self.num_answers >= SPEED_ANSWERS and self.recent_tokens
        return 1000 * self.recent_s / self.recent_tokens if is_known else None


@dataclass(frozen=True)
class ServerStatus:
    """A server's state as plain values, for `lightrl status` and for followers."""

    url: str
    state: State
    weight_version: int
    num_requests: int
    outstanding_tokens: int
    reason: str
    may_return: bool
