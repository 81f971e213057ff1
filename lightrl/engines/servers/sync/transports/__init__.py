"""How a weight version's bytes reach the servers, also those that need them later.

transport.py  WeightTransport, the interface for a sync; Streaming, for transports that send bucket by bucket. Also:
              a folder that trainer and servers share, written while servers generate; shared memory of the same host,
              and memory of the trainer's GPUs (not tested yet), which both use a pickle
broadcast.py  a process group of the trainer's rank 0 and all servers; NCCL, or gloo on the CPU
delta.py      sends the changes to a receiver on the servers' host, where they load the result
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
