"""DeltaCopy: the version that was sent last, in host memory; taking the next one gives the delta."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from lightrl.weights.bucket import Bucket, bucketed
from lightrl.weights.delta import CHUNK, PART_BYTES, ChunkDelta, bits_of, checksum, chunk, num_chunks, parts, replaced
from lightrl.weights.disk import write_safetensors
from lightrl.weights.host_copy import HostCopy
from lightrl.weights.server_form import ServerForm

_THREADS = min(8, os.cpu_count() or 1)


class DeltaCopy(HostCopy):
    """Casts, compares, copies and adds up chunk by chunk, so that a chunk is read from memory once."""

    def __init__(self, form: ServerForm | None = None) -> None:
        super().__init__(form)
        self.checksums: dict[str, list[int]] = {}  # of each parameter's chunks
        self._pool = ThreadPoolExecutor(_THREADS, "lightrl-delta")

    def begin(self, weight_version: int) -> None:
        super().begin(weight_version)
        self.checksums = {}

    def take_delta(self, bucket: Bucket, has_base: bool) -> tuple[list[bytes], Bucket]:
        """Copies a bucket; the parts of its delta, none without a base, and the copy."""
        tasks: list[tuple[str, int, Tensor, Tensor]] = []

        def plan(name: str, kept: Tensor, tensor: Tensor) -> None:
            flat = tensor.reshape(-1)
            tasks.extend((name, index, kept, flat) for index in range(num_chunks(flat.numel())))
            self.checksums[name] = []

        def copied(name: str, index: int, kept: Tensor, flat: Tensor) -> tuple[ChunkDelta | None, int]:
            source = flat[index * CHUNK : (index + 1) * CHUNK].to(dtype=kept.dtype, device="cpu")
            old, new = chunk(bits_of(kept), index), bits_of(source)
            if has_base:
                return replaced(name, index, old, new), checksum(new)
            old[:] = new
            return None, checksum(new)

        copy = self.add(bucket, plan)
        results = list(self._pool.map(lambda task: copied(*task), tasks))
        for task, (_, one) in zip(tasks, results, strict=True):
            self.checksums[task[0]].append(one)
        return list(parts(delta for delta, _ in results)), copy


def full_parts(copy: Bucket, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """A copied bucket as safetensors files of at most `part_bytes` of tensors, unless one is larger."""
    for part in bucketed(copy.tensors.items(), part_bytes):
        file = io.BytesIO()
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items()]
        if layout:
            write_safetensors(file, layout, part.tensors.items())
            yield file.getvalue()
