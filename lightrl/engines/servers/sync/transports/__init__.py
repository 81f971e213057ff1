"""How the bytes of a weight version reach paused servers, and what is kept for late ones.

transport.py  WeightTransport, the interface that a sync uses; Streaming, for those that send bucket by bucket. Also:
              a folder that trainer and servers see, written while they generate; shared memory of the same host, or
              memory of the trainer's GPUs (not tested yet), both of which use a pickle
broadcast.py  a process group of the trainer's rank 0 and all servers; NCCL, or gloo on the CPU
delta.py      sends what changed to a receiver next to the servers, which load it from there
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.sync.transports.broadcast import BroadcastTransport
from lightrl.engines.servers.sync.transports.delta import DeltaTransport
from lightrl.engines.servers.sync.transports.transport import (
    CudaIpcTransport,
    DiskTransport,
    SharedMemoryTransport,
    WeightTransport,
)
from lightrl.weights import ServerForm, WeightFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "BroadcastTransport",
    "CudaIpcTransport",
    "DeltaTransport",
    "DiskTransport",
    "SharedMemoryTransport",
    "TransportName",
    "WeightTransport",
    "make_transport",
]

TransportName = Literal["disk", "distributed", "tensor", "delta", "cuda_ipc"]
TRANSFER_TIMEOUT_S = 120.0  # to broadcast one bucket


def make_transport(
    name: TransportName,
    config: PretrainedConfig,
    *,
    dtype: torch.dtype | None,
    folder: Path,
    sync_s: float,
    trainer_host: str | None = None,
    connect: Callable[[str], Connection],
    receiver_of: Callable[[str], str],
    request_s: float,
    broadcast: type[BroadcastTransport] = BroadcastTransport,
) -> WeightTransport:
    """Returns the transport of this name; it sends `dtype`, or the trainer's own if None. Its class says the rest."""
    form = ServerForm.of(config, dtype)
    if name == "distributed":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        timeout_s = min(TRANSFER_TIMEOUT_S, sync_s)
        return broadcast(form, device=device, transfer_timeout_s=timeout_s, trainer_host=trainer_host)
    if name == "cuda_ipc":
        return CudaIpcTransport(form)
    if name == "tensor":
        return SharedMemoryTransport(form)
    if name == "delta":
        return DeltaTransport(form, config, connect=connect, receiver_of=receiver_of, wait_s=request_s)
    return DiskTransport(WeightFolder(folder, config, form=form))
