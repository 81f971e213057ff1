"""CudaIpcTransport: weights through GPU memory that servers on the same GPUs open. **Not run yet**: see the docs."""

from __future__ import annotations

import torch

from lightrl.engines.sglang.sync.transports.shared_memory import SharedMemoryTransport
from lightrl.weights import ServerForm, SharedBucket

PART_BYTES = 2**29  # of a block in GPU memory


class CudaIpcTransport(SharedMemoryTransport):
    """As through shared memory, with the block in the memory of rank 0's GPU: no byte passes the host.

    Every tp rank of a server gets a handle of its own to the block. A rank on another GPU reads it over NVLink or PCIe,
    which needs peer access between the two. **SGLang demands a pickle**, see weights/shared_memory.py.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(form, part_bytes=part_bytes)
        self._shared = SharedBucket(self.form, device=f"cuda:{torch.cuda.current_device()}")
