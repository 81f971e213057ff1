"""WeightDelivery: the settings for sending weights to servers; makes the loader that sends them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lightrl.checks.bounds import check_choice
from lightrl.checks.files import check_local
from lightrl.concurrency.owner import hold
from lightrl.engines.servers.addresses import remote_servers, trainer_address
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.request_loop import ServedVersions
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.sync.cache_canary import CacheCanary
from lightrl.engines.servers.sync.loader import WeightLoader
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import (
    BroadcastTransport,
    CudaIpcTransport,
    DeltaTransport,
    DiskTransport,
    SharedMemoryTransport,
    TransportName,
    WeightTransport,
)
from lightrl.engines.servers.sync.verification import WeightVerifier
from lightrl.errors import EngineUnreachable
from lightrl.models.tuning import Part
from lightrl.weights import ServerForm, WeightFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from lightrl.engines.servers.request_loop import RequestLoop

TRANSFER_TIMEOUT_S = 120.0  # limit for broadcasting one bucket


@dataclass(eq=False, kw_only=True)
class WeightDelivery:
    """The settings for sending weights. The loader sends the full weights, with added parameters merged in."""

    loader_type: ClassVar[type[WeightLoader]] = WeightLoader
    transport: TransportName
    broadcast_type: type[BroadcastTransport]
    gpu_transports: Sequence[TransportName]  # transports that need a GPU
    weight_folder: str | None
    trainer_host: str | None

    def __post_init__(self) -> None:
        check_choice(("disk", "distributed", "tensor", "delta", "cuda_ipc"), transport=self.transport)
        check_local(weight_folder=self.weight_folder)

    def check(self) -> None:
        """Raises ValueError if this machine cannot use the transport."""
        if self.transport in self.gpu_transports and not torch.cuda.is_available():
            raise ValueError(f"transport={self.transport!r} needs a GPU, but torch finds none. Use disk, for example.")

    def check_reach(self, urls: Sequence[str]) -> None:
        """Raises ValueError if this transport cannot reach these servers."""
        try:
            remote = remote_servers(urls)
            if self.transport == "distributed":
                trainer_address(urls, self.trainer_host)
        except EngineUnreachable:
            return  # the engine waits for the server, and fails if it never answers
        if remote and self.transport in ("tensor", "cuda_ipc"):
            problem = f"transport: {self.transport} needs servers on this machine; {remote[0]} is elsewhere. Use disk."
            raise ValueError(problem)
        if remote and self.transport == "disk" and self.weight_folder is None:
            raise ValueError(
                f"{remote[0]} is on another machine and cannot read this machine's temporary folder. Set weight_folder "
                "to a folder that has the same path on both, or use transport: distributed or delta."
            )

    def check_loads_whole(self, setting: str) -> None:
        """Raises ValueError naming `setting` if loads do not send the full weights."""

    def start_args(self) -> dict[str, Any]:
        """Returns arguments for servers that are started here."""
        return {}

    def expect_policy(self, policy: PreTrainedModel, num_versions: int) -> None:
        """Called before `loader`; see RolloutEngine."""

    def parts_to_load(self, base_version: int) -> list[Part]:
        """Returns the parts that the next load must send, given the version of the servers' base (-1: none)."""
        return ["whole"]

    def versions(self, fleet: ServerFleet, source: ServerSource) -> ServedVersions:
        """Makes the object that chooses each request's weights."""
        return ServedVersions()

    def loader(
        self,
        requests: RequestLoop,
        source: ServerSource,
        config: PretrainedConfig,
        dtype: torch.dtype | None,
        *,
        verify: bool,
    ) -> WeightLoader:
        """Makes a loader that sends weights in `dtype` to the servers of `requests`; `config` describes their model."""
        timeouts, limits, form = requests.timeouts, requests.limits, ServerForm.of(config, dtype)
        canary = CacheCanary(
            requests.fleet, vocab_size=limits.vocab_size, max_context=limits.max_context, timeout_s=timeouts.generate_s
        )
        sync = ServerSync(
            self._make_transport(config, form, source),
            timeout_s=timeouts.sync_s,
            verify=verify,
            verifier=WeightVerifier(config, form, timeout_s=timeouts.sync_s),
            canary=canary if verify else None,
        )
        return self.loader_type(
            home=requests.home,
            members=requests.members,
            requests=requests,
            sync=sync,
            timeouts=timeouts,
            config=config,
            dtype=dtype,
            is_colocated=source.placement == "colocated",
        )

    def _make_transport(self, config: PretrainedConfig, form: ServerForm, source: ServerSource) -> WeightTransport:
        timeouts = source.timeouts
        if self.transport == "distributed":
            return self.broadcast_type(
                form,
                device="cuda" if torch.cuda.is_available() else "cpu",
                transfer_timeout_s=min(TRANSFER_TIMEOUT_S, timeouts.sync_s),
                trainer_host=self.trainer_host,
            )
        if self.transport == "cuda_ipc":
            return CudaIpcTransport(form)
        if self.transport == "tensor":
            return SharedMemoryTransport(form)
        if self.transport == "delta":
            connect = functools.partial(Connection, token=source.token, timeouts=timeouts)
            receiver_of, wait_s = source.receivers.of, timeouts.request_s
            return DeltaTransport(form, config, connect=connect, receiver_of=receiver_of, wait_s=wait_s)
        if self.weight_folder is not None:
            hold(Path(self.weight_folder), "weight_folder")
        return DiskTransport(WeightFolder(Path(self.weight_folder or source.folder / "weights"), config, form=form))
