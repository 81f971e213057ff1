"""VLLMBroadcast: weights to vLLM's workers by NCCL. **Not run yet: vLLM's CPU build has no NCCL.**

vLLM's workers join by a unique id, without a store, and then add up one number to see that all are there.

Source: vLLM 0.32.0, distributed/weight_transfer/nccl_common.py and nccl_engine.py, device_communicators/pynccl.py.
"""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightrl.engines.servers.client import GroupPlace
from lightrl.engines.servers.sync.transports import BroadcastTransport
from lightrl.weights import BroadcastGroup

nccl: Any = torch.cuda.nccl  # untyped


class NCCLGroup(BroadcastGroup):
    """Rank 0 of a communicator with vLLM's workers; see BroadcastGroup. Its name is the unique id, in base64."""

    def __init__(self, name: str, world_size: int, timeout_s: float) -> None:
        self.name = name
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._where = f"The weight group with {world_size} members"
        with self._translated("did not form"):
            self._communicator: Any = nccl.init_rank(world_size, base64.b64decode(name), 0)
            one = torch.zeros(1, device="cuda")
            nccl.all_reduce([one], [one], comms=[self._communicator])
            torch.cuda.synchronize()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with self._translated("failed a transfer"):
            for tensor in tensors:
                nccl.broadcast([tensor.contiguous()], 0, comms=[self._communicator])
            torch.cuda.synchronize()

    def close(self) -> None:
        self._communicator = None  # its last reference


class VLLMBroadcast(BroadcastTransport):
    """BroadcastTransport to vLLM's workers."""

    def _new_name(self) -> str:
        return base64.b64encode(nccl.unique_id()).decode()

    def _make_group(self, name: str, place: GroupPlace, listener: socket.socket) -> BroadcastGroup:
        listener.close()
        return NCCLGroup(name, place.world_size, self.transfer_timeout_s)
