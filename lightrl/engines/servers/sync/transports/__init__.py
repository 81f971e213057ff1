"""How the bytes of a weight version reach paused servers, and what is kept for late ones.

transport.py  WeightTransport, the interface that a sync uses; Streaming, for those that send bucket by bucket. Also:
              a folder that trainer and servers see, written while they generate; shared memory of the same host, or
              memory of the trainer's GPUs (not tested yet), both of which use a pickle
broadcast.py  a process group of the trainer's rank 0 and all servers; NCCL, or gloo on the CPU
delta.py      sends what changed to a receiver next to the servers, which load it from there
"""

from __future__ import annotations

from typing import Literal

from lightrl.engines.servers.sync.transports.broadcast import BroadcastTransport
from lightrl.engines.servers.sync.transports.delta import DeltaTransport
from lightrl.engines.servers.sync.transports.transport import (
    CudaIpcTransport,
    DiskTransport,
    SharedMemoryTransport,
    WeightTransport,
)

__all__ = [
    "BroadcastTransport",
    "CudaIpcTransport",
    "DeltaTransport",
    "DiskTransport",
    "SharedMemoryTransport",
    "TransportName",
    "WeightTransport",
]

TransportName = Literal["disk", "distributed", "tensor", "delta", "cuda_ipc"]
