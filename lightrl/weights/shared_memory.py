"""SharedBucket: a bucket in shared memory, which servers of the same host read without a copy on the way.

**This is the one place where a pickle leaves the process**: SGLang's `/update_weights_from_tensor` takes nothing else.
It is off by default. The pickle is made here and read by SGLang's allow-listed unpickler; nothing is unpickled on our
side. The tensors travel as the name of a shared-memory file.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket
from lightrl.weights.server_form import ServerForm

ALIGNMENT_BYTES = 16  # of each tensor's start: the receiver views the bytes in the tensor's own dtype
PART_BYTES = 32 * 2**20  # of a block, where nothing else is said
LOAD_FORMAT = "flattened_bucket"  # SGLang's name of what `fill` gives


class SharedBucket:
    """One block of shared memory, used for every bucket in turn, or for every part of one: it is as large as these.

    It may be filled in again when all servers have answered to what was in it before.

    Args:
        form: dtype and names that the servers want.
    """

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self._block: Tensor | None = None  # [bytes] uint8
        self._content: dict[str, Any] = {}

    def fill(self, bucket: Bucket) -> None:
        """Copies the bucket in, over the one before."""
        entries: list[SimpleNamespace] = []
        start = 0
        for name, dtype, shape in self.form.layout(bucket):
            end = start + shape.numel() * dtype.itemsize
            entries.append(
                SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=shape.numel())
            )
            start = end + -end % ALIGNMENT_BYTES
        if self._block is None or self._block.numel() < start:
            self._block = None  # before the next one is there
            block: Any = torch.empty(max(1, start), dtype=torch.uint8)
            with _shared_by_name():
                self._block = block.share_memory_()
        assert self._block is not None
        for entry, (_, tensor) in zip(entries, self.form.tensors(bucket), strict=True):
            self._block[entry.start_idx : entry.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
        self._content = {"flattened_tensor": self._block[:start], "metadata": entries}

    def payload(self) -> str:
        """The bucket for **one** receiver: one of SGLang's `serialized_named_tensors`, in base64.

        Torch counts who is going to open the memory; a payload that two open would end it for everybody.
        """
        with _shared_by_name():
            return base64.b64encode(ForkingPickler.dumps(self._content)).decode()


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Torch's other way hands over a file descriptor, which only a child of this process may take."""
    sharing: Any = torch.multiprocessing  # without types
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)
