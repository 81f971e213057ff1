"""Weights through memory that servers share: of the same host, or of the same GPUs (**not run yet**: see the docs)."""

from __future__ import annotations

import torch

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.engines.servers.sync.transports.transport import Streaming, num_ranks
from lightrl.weights import Bucket, ServerForm, SharedBucket, bucketed
from lightrl.weights.shared_memory import PART_BYTES

GPU_PART_BYTES = 2**29  # size of a block in GPU memory


class SharedMemoryTransport(Streaming):
    """Through shared memory to servers of the same host. **SGLang demands a pickle**: see weights/shared_memory.py.

    A bucket is sent in parts of at most `part_bytes`, unless one tensor is larger, so that the shared block is small.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(form)
        self.part_bytes = part_bytes
        self._shared = SharedBucket(self.form)
        self._sizes: dict[Server, int] = {}  # ranks

    async def _connect(self, servers: SyncServers) -> None:
        self._sizes = await servers.ask(num_ranks)

    async def _send(self, servers: SyncServers, bucket: Bucket, version: str | None) -> None:
        for part in bucketed(bucket.tensors.items(), self.part_bytes):
            await in_thread(self._shared.fill, part)
            await self._send_part(servers, version if part.is_last else None)

    async def _send_part(self, servers: SyncServers, version: str | None) -> None:
        await servers.ask(
            lambda server: server.client.update_weights_from_tensor(
                [self._shared.payload() for _ in range(self._sizes[server])],  # one for each rank
                version,
                timeout_s=servers.timeout_s,
            )
        )


class CudaIpcTransport(SharedMemoryTransport):
    """Sends as through shared memory, with the block in the memory of rank 0's GPU: no byte passes the host.

    Every tp rank of a server gets a handle of its own to the block. A rank on another GPU reads it over NVLink or PCIe,
    which needs peer access between the two. **SGLang demands a pickle**: see weights/shared_memory.py.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = GPU_PART_BYTES) -> None:
        super().__init__(form, part_bytes=part_bytes)
        self._shared = SharedBucket(self.form, device=f"cuda:{torch.cuda.current_device()}")
