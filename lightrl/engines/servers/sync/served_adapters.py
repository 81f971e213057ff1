"""AdapterDelivery: sends each weight version to the servers as an adapter with its own name, next to their base.

    base, once ─► every server, sent as in WeightLoader
    adapters of version 12 ─► `policy-v12-…` on every server, next to `policy-v11-…`, while they generate
    a request ─► the name `policy-v12-…`, until it finishes; later requests use the newest

So a load needs no pause and sends only the adapters. A request and its tokens keep the version that it started with.
`max_staleness + 1` versions are kept; a request with an older version is aborted and continues with the newest.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightrl.engines.engine import Verification
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.sync.adapter_versions import Adapter, AdapterVersions
from lightrl.engines.servers.sync.delivery import WeightDelivery
from lightrl.engines.servers.sync.loader import WeightLoader
from lightrl.engines.servers.sync.report import SyncReport, SyncServers
from lightrl.engines.servers.sync.verification import ParameterCheck
from lightrl.errors import WeightSyncError
from lightrl.models.tuning import Part, ServedForm, Tuning, tuning_of
from lightrl.weights import Bucket, ServerForm

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(eq=False, kw_only=True)
class AdapterLoader(WeightLoader):
    """Loads the base once and then only adapters."""

    _adapters: ParameterCheck = field(default_factory=ParameterCheck)

    @property
    def versions(self) -> AdapterVersions:
        assert isinstance(self.requests.versions, AdapterVersions)
        return self.requests.versions

    @property
    def weight_version(self) -> int:
        """The newest adapter version that every routable server has."""
        return self.versions.newest

    def load(self, buckets: Iterable[Bucket], weight_version: int) -> None:
        """Loads the base, if the buckets contain it after the adapters, and then the adapters.

        Raises:
            WeightSyncError: if names or shapes differ from the first load, or no server accepts the adapters.
        """
        start = time.perf_counter()
        tensors, base = _split(buckets, self.versions.form.tuning)
        adapter = self._checked_adapter(tensors, weight_version)
        if base is not None:
            super().load(base, weight_version)
        with self._lock:
            report = self.home.call(self._load_adapter(adapter, weight_version), self.timeouts.sync_s)
            report.seconds["load"] = round(time.perf_counter() - start, 6)
            self.last_report = report

    def verified_by(self) -> dict[str, Verification]:
        """Returns the weakest check for each routable server, because adapters have no digests."""
        return dict.fromkeys(self.fleet.urls("routable"), "version")

    async def _before_admit(self, server: Server) -> None:
        await self.versions.give_all(server)

    def _checked_adapter(self, tensors: dict[str, Tensor], weight_version: int) -> Adapter:
        if not tensors:
            raise WeightSyncError("The load contains no adapters. Every load must have the same adapters as the first.")
        for _ in self._adapters.checked([Bucket(tensors, is_last=True)]):
            pass
        form, sent = self.versions.form, ServerForm(self.dtype).tensors(Bucket(tensors))
        saved = {form.tuning.saved_name(name): tensor.cpu() for name, tensor in sent}
        return Adapter.of(weight_version, saved, form.config)

    async def _load_adapter(self, adapter: Adapter, weight_version: int) -> SyncReport:
        versions = self.versions
        servers = SyncServers(self.fleet.in_state("routable"), self.timeouts.sync_s)
        payload = await versions.pack(adapter)
        candidates = list(servers.left)
        await servers.ask(lambda server: versions.give(server, adapter, payload))
        self._lose_failed(candidates, servers)
        if not servers.left:
            lost = "; ".join(f"{url}: {reason}" for url, reason in servers.lost.items())
            raise WeightSyncError(
                f"The adapters for version {weight_version} reached no server: {lost or 'no server is left'}. "
                f"{versions.form.how_to_start}"
            )
        self.fleet.sessions.clear()
        for dropped in await versions.add(weight_version, adapter):
            self.home.spawn(versions.remove(dropped.name))
        loaded = {server.url: weight_version for server in servers.left}
        num_bytes = adapter.num_bytes * len(servers.left)
        return SyncReport(weight_version, versions=loaded, lost=servers.lost, num_bytes=num_bytes)


class AdapterDelivery(WeightDelivery):
    """Sends the base once, and then only the adapters of each version."""

    loader_type = AdapterLoader
    form: ServedForm | None = None  # how servers hold the adapters; set by `expect_policy`

    def check_loads_whole(self, setting: str) -> None:
        raise ValueError(f"{setting} needs adapters='merged'. Set that, or omit {setting}.")

    def start_args(self) -> dict[str, Any]:
        return self.form.server_args if self.form is not None else {}

    def expect_policy(self, policy: PreTrainedModel, num_versions: int) -> None:
        tuning = tuning_of(policy)
        if not tuning.keeps_base:
            raise ValueError("engine.adapters='served' needs a policy with lora. Add lora, or set adapters to merged.")
        self.form = tuning.served_form(policy, num_versions)

    def parts_to_load(self, base_version: int) -> list[Part]:
        return ["added"] if base_version >= 0 else ["added", "base"]

    def versions(self, fleet: ServerFleet, source: ServerSource) -> AdapterVersions:
        assert self.form is not None
        return AdapterVersions(fleet, self.form, timeout_s=source.timeouts.sync_s)


def _split(buckets: Iterable[Bucket], tuning: Tuning) -> tuple[dict[str, Tensor], Iterator[Bucket] | None]:
    """Returns copies of the adapters, which come first, and the buckets of the base; None if there is no base."""
    tensors: dict[str, Tensor] = {}
    iterator = iter(buckets)
    for bucket in iterator:
        if not all(tuning.adds(name) for name in bucket.tensors):
            return tensors, itertools.chain([bucket], iterator)
        tensors |= {name: tensor.detach().clone() for name, tensor in bucket.tensors.items()}
    return tensors, None
