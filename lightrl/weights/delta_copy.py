"""DeltaCopy: the version that was sent last, in host memory; taking the next one gives the delta."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lightrl.weights import delta
from lightrl.weights.bucket import Bucket, bucketed
from lightrl.weights.disk import write_safetensors
from lightrl.weights.server_form import ServerForm


class HostCopy:
    """Copies buckets; the trainer may change its parameters afterwards.

    Holds the whole model once, outside the bound of a bucket. Each copy reuses the storage of the previous one, to save
    the allocation of pages: `add` changes buckets that were handed out before.

    Args:
        form: dtype and names to keep.
    """

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self.weight_version = -1  # of the copy, once it is complete
        self._coming_version = -1
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of each bucket

    def begin(self, weight_version: int) -> None:
        """Starts a version; the copy is incomplete until its last bucket."""
        self.weight_version = -1
        self._coming_version = weight_version
        self._names = []

    def add(self, bucket: Bucket, copy: Callable[[str, Tensor, Tensor], object] | None = None) -> Bucket:
        """Copies a bucket; returns the copy. `copy` gets each name, what was kept, and the trainer's tensor."""
        copied: dict[str, Tensor] = {}
        for name, dtype, shape in self.form.layout(bucket):
            tensor = bucket.tensors[name].detach()
            kept = self._tensors.get(name)
            if kept is None or kept.shape != shape or kept.dtype != dtype:
                kept = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=tensor.is_cuda)
                self._tensors[name] = kept
            if copy is None:
                kept.copy_(tensor)
            else:
                copy(name, kept, tensor)
            copied[name] = kept
        self._names.append(list(copied))
        if bucket.is_last:
            self.weight_version = self._coming_version
        return Bucket(copied, is_last=bucket.is_last)

    def take(self, buckets: Iterable[Bucket], weight_version: int) -> list[Bucket]:
        """Copies all buckets; returns the copies."""
        self.begin(weight_version)
        for bucket in buckets:
            self.add(bucket)
        return list(self.buckets())

    def buckets(self) -> Iterator[Bucket]:
        """The copy, in the original buckets."""
        for index, names in enumerate(self._names):
            yield Bucket({name: self._tensors[name] for name in names}, is_last=index + 1 == len(self._names))


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
