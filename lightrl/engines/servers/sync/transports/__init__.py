"""How the bytes of a weight version reach the servers, including servers that need them later.

transport.py  WeightTransport, the interface for a sync; Streaming, for transports that send bucket by bucket. Also:
              a folder that trainer and servers share, written while servers generate; shared memory on one host, and
              memory of the trainer's GPUs (not tested yet), both of which use a pickle
broadcast.py  a process group of the trainer's rank 0 and all servers; NCCL, or gloo on the CPU
delta.py      sends the changes to a receiver on each server host, where servers load the result
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
