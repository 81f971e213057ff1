"""DeltaCopy: the version that was sent last, in host memory; taking the next one gives the delta."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrl.weights import delta
from lightrl.weights.bucket import Bucket, bucketed
from lightrl.weights.disk import write_safetensors
from lightrl.weights.host_copy import HostCopy
from lightrl.weights.server_form import ServerForm

_THREADS = min(8, os.cpu_count() or 1)
_Task = tuple[str, int, delta.Bits, Tensor, torch.dtype]  # a chunk: name, number, kept bits, the trainer's tensor


class DeltaCopy(HostCopy):
    """Casts, compares, copies and adds up chunk by chunk, so that a chunk is read from memory once."""

    def __init__(self, form: ServerForm | None = None) -> None:
        super().__init__(form)
        self.checksums: dict[str, list[int]] = {}  # of each parameter's chunks
        # OpenMP's threads would spin beside those of the pool.
        self._pool = ThreadPoolExecutor(_THREADS, "lightrl-delta", torch.set_num_threads, (1,))

    def begin(self, weight_version: int) -> None:
        super().begin(weight_version)
        self.checksums = {}

    def take_delta(self, bucket: Bucket, has_base: bool) -> tuple[list[bytes], Bucket]:
        """Copies a bucket; the parts of its delta, none without a base, and the copy."""
        tasks: list[_Task] = []

        def plan(name: str, kept: Tensor, tensor: Tensor) -> None:
            old, flat = delta.bits_of(kept), tensor.reshape(-1)
            for index in range(delta.num_chunks(len(old))):
                source = flat[index * delta.CHUNK : (index + 1) * delta.CHUNK]
                tasks.append((name, index, delta.chunk(old, index), source, kept.dtype))
            self.checksums[name] = []

        def copied(group: Sequence[_Task]) -> tuple[delta.Block | None, list[int]]:
            changes, sums = [], []
            for name, index, old, source, dtype in group:
                new = delta.bits_of(source.to(dtype=dtype, device="cpu"))
                sums.append(delta.checksum(new))
                if not has_base:
                    old[:] = new
                elif (change := delta.replaced(name, index, old, new)) is not None:
                    changes.append(change)
            return delta.packed(changes) if changes else None, sums

        copy = self.add(bucket, plan)
        by_width = [list(run) for _, run in itertools.groupby(tasks, lambda task: task[-1].itemsize)]
        groups = [run[i : i + delta.BLOCK_CHUNKS] for run in by_width for i in range(0, len(run), delta.BLOCK_CHUNKS)]
        num_threads = torch.get_num_threads()
        blocks = []
        for group, (block, sums) in zip(groups, self._pool.map(copied, groups), strict=True):
            blocks.append(block)
            for task, one in zip(group, sums, strict=True):
                self.checksums[task[0]].append(one)
        torch.set_num_threads(num_threads)  # of other new threads, for which the pool's have set it too
        return list(delta.parts(blocks)), copy


def full_parts(copy: Bucket, part_bytes: int = delta.PART_BYTES) -> Iterator[bytes]:
    """A copied bucket as safetensors files of at most `part_bytes` of tensors, unless one is larger."""
    for part in bucketed(copy.tensors.items(), part_bytes):
        file = io.BytesIO()
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in part.tensors.items()]
        if layout:
            write_safetensors(file, layout, part.tensors.items())
            yield file.getvalue()
