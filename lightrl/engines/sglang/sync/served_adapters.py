"""ServedAdapters: a policy's adapters on servers that hold its base: one adapter per weight version, by name.

    base, once ─► Loading ─► every server
    adapters of version 12 ─► `policy-v12` on every server, beside `policy-v11`, while they generate
    a request ─► lora_path: policy-v12, until it ends; later requests use the newest

So a load needs no pause and sends only the adapters. A request keeps the version it began with, which is the version of
its tokens. `max_staleness + 1` versions are kept. A request under an older one is aborted and continues under the
newest; so is every request at each load with `interrupt: abort`.

What was measured on SGLang 0.5.23: a server compares the SHA-256 of each tensor with what the trainer says, and dies
if one differs; it refuses a second adapter of a name; its prefix cache keeps adapters apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.request import AdapterVersion
from lightrl.engines.sglang.sync.loading import Loading
from lightrl.engines.sglang.sync.report import Fleet, SyncReport
from lightrl.engines.sglang.sync.transports.streaming import num_ranks
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.errors import EngineError, WeightSyncError
from lightrl.models.lora import AdapterShape, is_adapter, peft_name
from lightrl.weights import Bucket, ServerForm
from lightrl.weights.shared_memory import payload_of

log = logging.getLogger(__name__)

_PREFIX = "policy-v"
_LOOK_S = 0.05


@dataclass(frozen=True)
class _Adapter:
    """One version's tensors in host memory, for servers that come back."""

    tensors: dict[str, Tensor]  # by peft's names
    checksums: dict[str, str]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class ServedAdapters:
    """The adapter versions that every routable server has, and the requests that use them.

    Args:
        shape: of the policy's adapters.
        num_versions: how many are kept.
        form: dtype in which adapters are sent.
        is_aborting: whether requests in flight continue under each new version.
    """

    def __init__(
        self,
        home: HomeLoop,
        members: Members,
        loading: Loading,
        *,
        shape: AdapterShape,
        num_versions: int,
        form: ServerForm,
        timeouts: Timeouts,
        is_aborting: bool = False,
    ) -> None:
        self.weight_version = -1  # of the newest adapter on all routable servers
        self._kept: dict[int, _Adapter] = {}  # oldest first
        self._in_use: dict[int, dict[str, SGLangClient]] = {}  # by version and request id
        self._shapes: dict[str, torch.Size] | None = None  # of the first load
        self._home = home
        self._members = members
        self._loading = loading
        self._shape = shape
        self._num_versions = num_versions
        self._form = form
        self._timeouts = timeouts
        self._is_aborting = is_aborting
        loading.before_admit = self._equip

    @property
    def needs_base(self) -> bool:
        return self._loading.weight_version < 0

    def load(self, buckets: Iterable[Bucket], weight_version: int) -> None:
        """From the thread that gathers them: the adapters of a version, and then the base if `needs_base`.

        Raises:
            WeightSyncError: if the adapters are not those of the first load, or no server takes them.
        """
        start = time.perf_counter()
        tensors, base = _apart(buckets)
        adapter = self._checked(tensors)
        if base is not None:
            self._loading.load(base, weight_version)
        with self._loading.lock:
            report = self._home.call(self._load(adapter, weight_version), self._timeouts.sync_s)
            report.seconds["load"] = round(time.perf_counter() - start, 6)
            self._loading.last_report = report

    def choose(self, begun_with: AdapterVersion | None) -> AdapterVersion:
        """The version for the next request of a completion: the one it began with, or the newest. On the home loop."""
        version = self.weight_version
        if begun_with is not None and begun_with.version in self._kept and not self._is_aborting:
            version = begun_with.version
        return AdapterVersion(version, name_of(version), self._loading.weight_version)

    @contextlib.contextmanager
    def used(self, version: int, rid: str, client: SGLangClient) -> Iterator[None]:
        """A request under this version runs inside."""
        requests = self._in_use.setdefault(version, {})
        requests[rid] = client
        try:
            yield
        finally:
            del requests[rid]

    def _checked(self, tensors: dict[str, Tensor]) -> _Adapter:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        if not shapes or (self._shapes is not None and shapes != self._shapes):
            raise WeightSyncError(
                f"The load has {len(shapes)} adapter tensors instead of the {len(self._shapes or shapes)} of the first "
                "load, in the same shapes. Every load must have the same."
            )
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise WeightSyncError(f"Parameter {name!r} has values that are not finite.")
        self._shapes = shapes
        sent = {peft_name(name): tensor.cpu() for name, tensor in self._form.tensors(Bucket(tensors))}
        return _Adapter({name: tensor.clone() for name, tensor in sent.items()}, _checksums(sent))

    async def _load(self, adapter: _Adapter, weight_version: int) -> SyncReport:
        urls = self._members.pool.urls("routable")
        fleet = Fleet([self._members.clients[url] for url in urls], self._timeouts.sync_s)
        payload = await in_thread(payload_of, adapter.tensors)
        await fleet.ask(lambda client: self._give(client, weight_version, adapter, payload))
        for url, reason in fleet.lost.items():
            self._members.lose(url, reason)
        if not fleet.clients:
            lost = "; ".join(f"{url}: {reason}" for url, reason in fleet.lost.items())
            raise WeightSyncError(
                f"The adapters of version {weight_version} reached no server: {lost or 'no server is left'}. "
                f"{self._shape.how_to_serve}"
            )
        self._kept.pop(weight_version, None)  # from before this run was resumed from an older checkpoint
        self._kept[weight_version] = adapter
        self.weight_version = weight_version
        self._members.pool.sessions.clear()
        old = list(self._kept)[: -self._num_versions]
        for version in old:
            del self._kept[version]
        stopped = [version for version in self._in_use if version in old or self._is_aborting]
        requests = [request for version in stopped for request in self._in_use[version].items()]
        await asyncio.gather(*(client.abort(rid) for rid, client in requests), return_exceptions=True)
        for version in old:
            self._home.spawn(self._retire(version))
        versions = {client.url: weight_version for client in fleet.clients}
        num_bytes = adapter.num_bytes * len(fleet.clients)
        return SyncReport(weight_version, versions=versions, lost=fleet.lost, num_bytes=num_bytes)

    async def _give(self, client: SGLangClient, version: int, adapter: _Adapter, payload: str) -> None:
        """Afterwards the server has this adapter under the version's name, and lists it; others of ours are removed."""
        name, timeout_s = name_of(version), self._timeouts.sync_s
        known = {name_of(one) for one in (*self._kept, *self._in_use)} - {name}
        for other in await client.adapters():
            if other.startswith(_PREFIX) and other not in known:  # of an earlier run, or of this one before a resume
                await client.unload_adapter(other, timeout_s=timeout_s)
        payloads = [payload] * await num_ranks(client)
        await client.load_adapter(name, self._shape.config, payloads, adapter.checksums, timeout_s=timeout_s)
        if name not in await client.adapters():
            raise EngineError(f"{client.url} acknowledged the adapter {name} but does not list it in /v1/models.")

    async def _equip(self, url: str) -> None:
        """Gives a server that is back all kept versions, before it gets requests."""
        client = self._members.clients[url]
        for version, adapter in list(self._kept.items()):
            await self._give(client, version, adapter, await in_thread(payload_of, adapter.tensors))

    async def _retire(self, version: int) -> None:
        """Unloads a version when its last request has ended: a server would hold other updates back until then."""
        deadline = time.monotonic() + self._timeouts.sync_s
        while (requests := self._in_use.get(version)) and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_S)
        self._in_use.pop(version, None)
        if requests:
            log.warning(
                "Requests under %s were aborted and still run after timeouts.sync_s=%g s, %d of them on %s. The next "
                "load removes this adapter.",
                name_of(version),
                self._timeouts.sync_s,
                len(requests),
                ", ".join(sorted({client.url for client in requests.values()})),
            )
            return
        for url in self._members.pool.urls("routable", "syncing"):
            with contextlib.suppress(EngineError):  # it may have been lost meanwhile
                await self._members.clients[url].unload_adapter(name_of(version), timeout_s=self._timeouts.sync_s)


def name_of(version: int) -> str:
    return f"{_PREFIX}{version}"


def _apart(buckets: Iterable[Bucket]) -> tuple[dict[str, Tensor], Iterator[Bucket] | None]:
    """The adapters, which come first, as copies; and the base's buckets, None if there are none."""
    tensors: dict[str, Tensor] = {}
    rest = iter(buckets)
    for bucket in rest:
        if not all(is_adapter(name) for name in bucket.tensors):
            return tensors, itertools.chain([bucket], rest)
        tensors |= {name: tensor.detach().clone() for name, tensor in bucket.tensors.items()}
    return tensors, None


def _checksums(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }
