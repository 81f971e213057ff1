"""HostCopy: a whole model in reused host memory, for syncs in the background and for late servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket
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
            del bucket  # else it stays alive while the next is gathered
        return list(self.buckets())

    def buckets(self) -> Iterator[Bucket]:
        """The copy, in the original buckets."""
        for index, names in enumerate(self._names):
            yield Bucket({name: self._tensors[name] for name in names}, is_last=index + 1 == len(self._names))
