"""HostCopy: a whole model in host memory, in storage that is used again: for syncs that the trainer does not wait for,
and for servers that come late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket


class HostCopy:
    """Keeps a copy of the buckets that pass; the trainer may change its parameters afterwards.

    This holds the whole model once, outside the bound of a bucket. The storage of one copy serves the next, so that
    pages are not asked for again each time: the buckets given before change with `add`.
    """

    def __init__(self) -> None:
        self.weight_version = -1  # of the copy, once it is whole
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of each bucket

    def begin(self) -> None:
        """The next `add` is the first of another version."""
        self.weight_version = -1
        self._names = []

    def add(self, bucket: Bucket) -> None:
        for name, tensor in bucket.tensors.items():
            kept = self._tensors.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                self._tensors[name] = kept
            kept.copy_(tensor.detach())
        self._names.append(list(bucket.tensors))

    def finish(self, weight_version: int) -> None:
        """The copy is whole and is this version."""
        self.weight_version = weight_version

    def take(self, buckets: Iterable[Bucket], weight_version: int) -> list[Bucket]:
        """Copies all of them; gives the copies as buckets."""
        self.begin()
        for bucket in buckets:
            self.add(bucket)
        self.finish(weight_version)
        return list(self.buckets())

    def buckets(self) -> Iterator[Bucket]:
        """The copy, cut as it came."""
        for index, names in enumerate(self._names):
            yield Bucket({name: self._tensors[name] for name in names}, is_last=index + 1 == len(self._names))
