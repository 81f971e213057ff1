"""How the bytes of a weight version reach the servers, including servers that need them later.

transport.py  WeightTransport, the interface; Streaming, the base of transports that send bucket by bucket; and three
              transports: through a folder that trainer and servers share, through shared memory on one host, and
              through the memory of the trainer's GPUs (not tested yet). The last two use a pickle.
broadcast.py  broadcasts in a process group of the trainer's rank 0 and all servers, over NCCL, or gloo on the CPU
delta.py      sends only the changes, to a receiver on each server host; servers load the receiver's result
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
