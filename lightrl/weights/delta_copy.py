"""DeltaCopy: the version that was sent last, in host memory; taking the next one gives the delta."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket, bucketed
from lightrl.weights.delta import (
    BLOCK_CHUNKS,
    CHUNK,
    PART_BYTES,
    Bits,
    Block,
    bits_of,
    checksum,
    chunk,
    num_chunks,
    packed,
    parts,
    replaced,
)
from lightrl.weights.disk import write_safetensors
from lightrl.weights.host_copy import HostCopy
from lightrl.weights.server_form import ServerForm

_THREADS = min(8, os.cpu_count() or 1)
_Task = tuple[str, int, Bits, Tensor, torch.dtype]  # a chunk: name, number, kept bits, the trainer's tensor


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
        groups: list[list[_Task]] = []
        size = width = 0  # of the last group: elements, and bytes of each

        def plan(name: str, kept: Tensor, tensor: Tensor) -> None:
            nonlocal size, width
            flat, old = tensor.reshape(-1), bits_of(kept)
            for index in range(num_chunks(flat.numel())):
                task = (name, index, chunk(old, index), flat[index * CHUNK : (index + 1) * CHUNK], kept.dtype)
                num = len(task[2])
                if not groups or width != old.itemsize or size + num > BLOCK_CHUNKS * CHUNK:
                    groups.append([])
                    size, width = 0, old.itemsize
                groups[-1].append(task)
                size += num
            self.checksums[name] = []

        def copied(group: list[_Task]) -> tuple[Block | None, list[int]]:
            changes, sums = [], []
            for name, index, old, source, dtype in group:
                new = bits_of(source.to(dtype=dtype, device="cpu"))
                sums.append(checksum(new))
                if not has_base:
                    old[:] = new
                elif (change := replaced(name, index, old, new)) is not None:
                    changes.append(change)
            return packed(changes) if changes else None, sums

        copy = self.add(bucket, plan)
        blocks = []
        for group, (block, sums) in zip(groups, self._pool.map(copied, groups), strict=True):
            blocks.append(block)
            for task, one in zip(group, sums, strict=True):
                self.checksums[task[0]].append(one)
        return list(parts(blocks)), copy


def full_parts(copy: Bucket, part_bytes: int = PART_BYTES) -> Iterator[bytes]:
    """A copied bucket as safetensors files of at most `part_bytes` of tensors, unless one is larger."""
    for part in bucketed(copy.tensors.items(), part_bytes):
        file = io.BytesIO()
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items()]
        if layout:
            write_safetensors(file, layout, part.tensors.items())
            yield file.getvalue()
