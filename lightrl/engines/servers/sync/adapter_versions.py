"""AdapterVersions: the adapters that servers hold, one per weight version, and the requests that use them.

SGLang 0.5.23 compares each tensor's SHA-256 with the trainer's, and crashes if they differ; vLLM 0.32 checks nothing.
Names are the keys of vLLM's prefix cache, so they contain a digest: a resume may repeat a version with other values.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.request import CompletionDraft, NamedVersion
from lightrl.engines.servers.request_loop import ServedVersions
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.transports.transport import num_ranks
from lightrl.errors import EngineError
from lightrl.models.tuning import ServedForm
from lightrl.weights.shared_memory import payload_of

log = logging.getLogger(__name__)

_PREFIX = "policy-v"
_POLL_S = 0.05


@dataclass(frozen=True)
class Adapter:
    """A version's tensors, kept in host memory for servers that return."""

    name: str
    tensors: Mapping[str, Tensor]  # peft's name → tensor
    checksums: Mapping[str, str]

    @classmethod
    def of(cls, version: int, tensors: Mapping[str, Tensor], config: dict[str, Any]) -> Adapter:
        tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        checksums = {
            name: hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().data).hexdigest()
            for name, tensor in tensors.items()
        }
        digest = hashlib.sha256(json.dumps([config, checksums], sort_keys=True).encode()).hexdigest()[:12]
        return cls(f"{_PREFIX}{version}-{digest}", tensors, checksums)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class AdapterClient(Protocol):
    """The methods of a server client that load adapters."""

    async def load_adapter(
        self, name: str, config: dict[str, Any], payloads: Sequence[str], checksums: dict[str, str], *, timeout_s: float
    ) -> None: ...

    async def unload_adapter(self, name: str, *, timeout_s: float = 0.0) -> None: ...

    def is_unknown_adapter(self, error: EngineError) -> bool: ...


@dataclass
class AdapterVersions(ServedVersions):
    """The adapter versions that every routable server has."""

    fleet: ServerFleet  # its weight version is the base's
    form: ServedForm
    timeout_s: float  # limit for each request, and for a removed version's requests to finish
    newest: int = -1
    _adapters: dict[int, Adapter] = field(default_factory=dict)  # weight version → adapter, oldest first
    _in_use: dict[str, dict[str, Server]] = field(default_factory=dict)  # name → id and server of its requests

    def choose(self, started_with: NamedVersion | None) -> NamedVersion:
        """Returns the version that the completion started with, or the newest if servers no longer have it."""
        version = self.newest
        if started_with is not None and started_with.name in (adapter.name for adapter in self._adapters.values()):
            version = started_with.version
        return NamedVersion(version, self._adapters[version].name, self.fleet.weight_version)

    @contextlib.contextmanager
    def used(self, named: NamedVersion | None, rid: str, server: Server) -> Iterator[None]:
        assert named is not None
        requests = self._in_use.setdefault(named.name, {})
        requests[rid] = server
        try:
            yield
        finally:
            del requests[rid]

    def min_version(self, draft: CompletionDraft) -> int:
        return -1  # all routable servers have all adapters, so the base version does not matter

    def is_missing(self, server: Server, error: EngineError) -> bool:
        return cast(AdapterClient, server.client).is_unknown_adapter(error)

    def names(self) -> set[str]:
        """Returns the names of the adapters that servers must have."""
        return {adapter.name for adapter in self._adapters.values()} | self._in_use.keys()

    async def pack(self, adapter: Adapter) -> str:
        """Returns what `give` sends to each rank: all tensors, or where a server can read them."""
        return await in_thread(payload_of, dict(adapter.tensors))

    async def add(self, version: int, adapter: Adapter) -> list[Adapter]:
        """Records a version that all routable servers have; drops and returns old versions, aborting their requests."""
        replaced = self._adapters.pop(version, adapter)  # another one if this run resumed from an older checkpoint
        self._adapters[version] = adapter
        self.newest = version
        dropped = [self._adapters.pop(old) for old in list(self._adapters)[: -self.form.num_versions]]
        dropped += [replaced] * (replaced.name != adapter.name)
        requests = [request for old in dropped for request in self._in_use.get(old.name, {}).items()]
        await asyncio.gather(*(server.client.abort(rid) for rid, server in requests), return_exceptions=True)
        return dropped

    async def give(self, server: Server, adapter: Adapter, payload: str) -> None:
        """Removes unused adapters, loads an adapter under its name, and checks that the server lists it."""
        client, name = cast(AdapterClient, server.client), adapter.name
        kept = self.names() - {name}  # before listing, because `remove` may unload others in the meantime
        left = [other for other in await adapters_of(server) if other.startswith(_PREFIX) and other not in kept]
        unloads = (client.unload_adapter(other, timeout_s=self.timeout_s) for other in left)
        await asyncio.gather(*unloads, return_exceptions=True)
        payloads = [payload] * await num_ranks(server)
        await client.load_adapter(name, self.form.config, payloads, dict(adapter.checksums), timeout_s=self.timeout_s)
        if name not in await adapters_of(server):
            raise EngineError(f"{server.url} acknowledged the adapter {name} but does not list it in /v1/models.")

    async def give_all(self, server: Server) -> None:
        """Loads all versions into a returning server, before it gets requests."""
        for adapter in list(self._adapters.values()):
            await self.give(server, adapter, await self.pack(adapter))

    async def remove(self, name: str) -> None:
        """Unloads an adapter after its last request has finished; unloading it earlier would delay other updates."""
        deadline = time.monotonic() + self.timeout_s
        while (requests := self._in_use.get(name)) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._in_use.pop(name, None)
        if requests:
            urls = ", ".join(sorted({server.url for server in requests.values()}))
            problem = "%d requests with adapter %s still run on %s, timeouts.sync_s=%g s after an abort. %s"
            log.warning(problem, len(requests), name, urls, self.timeout_s, "The next load removes the adapter.")
            return
        for server in self.fleet.in_state("routable") if name not in self.names() else ():
            with contextlib.suppress(EngineError):  # the server may have been lost in the meantime
                await cast(AdapterClient, server.client).unload_adapter(name, timeout_s=self.timeout_s)


async def adapters_of(server: Server) -> list[str]:
    """Returns the names of the server's adapters."""
    models = await server.client.request("GET", "/v1/models")
    with server.client.reading("/v1/models"):
        return [entry["id"] for entry in models["data"] if entry.get("parent") is not None]
