"""SharedBucket: a bucket in shared memory, which servers on the same host read without a copy.

**This is the only place where a pickle leaves the process**, because SGLang's `/update_weights_from_tensor` and
`/load_lora_adapter_from_tensors` accept nothing else. It is off by default. SGLang's unpickler allows only listed
classes; lightrl unpickles nothing. A bucket's pickle holds the name of a shared-memory file instead of the tensors.
"""

from __future__ import annotations

import base64
import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from lightrl.weights.bucket import Bucket, ServerForm

ALIGNMENT_BYTES = 16  # tensors start at multiples of this, since the receiver views the bytes in the tensor's dtype
PART_BYTES = 32 * 2**20  # a block's default size
LOAD_FORMAT = "flattened_bucket"  # SGLang's name for the format that `fill` writes


class SharedBucket:
    """A block of shared memory that is reused for each bucket; it grows to the size of the largest bucket.

    Refill it only after all servers have confirmed that they loaded the content.

    Args:
        form: dtype and names that the servers need.
        device: `cpu`, or a GPU whose memory the servers open (CUDA IPC).
    """

    def __init__(self, form: ServerForm | None = None, *, device: str = "cpu") -> None:
        self.form = form or ServerForm()
        self.device = torch.device(device)
        self._block: Tensor | None = None  # [bytes] uint8
        self._content: dict[str, Any] = {}

    def fill(self, bucket: Bucket) -> None:
        """Overwrites the block with this bucket."""
        entries, start = _entries(self.form.layout(bucket))
        if self._block is None or self._block.numel() < start:
            self._block = None  # frees it before the next one is allocated
            block: Any = torch.empty(max(1, start), dtype=torch.uint8, device=self.device)
            with _shared_by_name():
                self._block = block if self.device.type == "cuda" else block.share_memory_()
        assert self._block is not None
        for entry, (_, tensor) in zip(entries, self.form.tensors(bucket), strict=True):
            self._block[entry.start_idx : entry.end_idx].copy_(tensor.reshape(-1).view(torch.uint8))
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # servers do not wait for this process's stream
        self._content = {"flattened_tensor": self._block[:start], "metadata": entries}

    def payload(self) -> str:
        """Encodes the bucket in base64 for **one** receiver, as an entry of SGLang's `serialized_named_tensors`.

        Torch expects each payload to be opened once; if two receivers open it, the memory is freed too early.
        """
        with _shared_by_name():
            content = io.BytesIO()
            _DevicesByUuid(content).dump(self._content)
            return base64.b64encode(content.getvalue()).decode()


class _DevicesByUuid(ForkingPickler):
    """Identifies a CUDA tensor's device by UUID, because device indices depend on CUDA_VISIBLE_DEVICES.

    SGLang's version of torch's `rebuild_cuda_tensor` accepts a UUID (srt/utils/patch_torch.py).
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        return rebuild, with_uuid(arguments, str(torch.cuda.get_device_properties(value.device).uuid))


_DEVICE_ARGUMENT = 6  # index of the device in rebuild_cuda_tensor's arguments


def with_uuid(arguments: Sequence[Any], uuid: str) -> tuple[Any, ...]:
    """Replaces the device index with the UUID in the arguments of torch's `rebuild_cuda_tensor`."""
    return (*arguments[:_DEVICE_ARGUMENT], uuid, *arguments[_DEVICE_ARGUMENT + 1 :])


def payload_of(tensors: Mapping[str, Tensor]) -> str:
    """Encodes tensors by value in the format of `SharedBucket.payload`, for receivers on any host."""
    layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    entries, num_bytes = _entries(layout)
    flat = torch.zeros(num_bytes, dtype=torch.uint8)
    for entry, tensor in zip(entries, tensors.values(), strict=True):
        flat[entry.start_idx : entry.end_idx].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": entries})).decode()


def _entries(layout: Sequence[tuple[str, torch.dtype, torch.Size]]) -> tuple[list[SimpleNamespace], int]:
    """Returns SGLang's metadata for each tensor in a block, and the block's size in bytes."""
    entries: list[SimpleNamespace] = []
    start = 0
    for name, dtype, shape in layout:
        end = start + shape.numel() * dtype.itemsize
        entries.append(
            SimpleNamespace(name=name, shape=shape, dtype=dtype, start_idx=start, end_idx=end, numel=shape.numel())
        )
        start = end + -end % ALIGNMENT_BYTES
    return entries, start


@contextlib.contextmanager
def _shared_by_name() -> Iterator[None]:
    """Context manager in which torch shares memory by file name, because only children can inherit descriptors."""
    sharing: Any = torch.multiprocessing  # untyped
    before = sharing.get_sharing_strategy()
    sharing.set_sharing_strategy("file_system")
    try:
        yield
    finally:
        sharing.set_sharing_strategy(before)
