"""HostCopy: a whole model in host memory, in storage that is used again: for syncs that the trainer does not wait for,
and for servers that come late."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket
from lightrl.weights.server_form import ServerForm


class HostCopy:
    """Keeps a copy of the buckets that pass; the trainer may change its parameters afterwards.

    This holds the whole model once, outside the bound of a bucket. The storage of one copy serves the next, so that
    pages are not asked for again each time: the buckets given before change with `add`.

    Args:
        form: dtype and names that are kept.
    """

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self.weight_version = -1  # of the copy, once its last bucket is there
        self._coming_version = -1
        self._tensors: dict[str, Tensor] = {}
        self._names: list[list[str]] = []  # of each bucket

    def begin(self, weight_version: int) -> None:
        """The next `add` is the first bucket of this version; there is no whole copy until its last."""
        self.weight_version = -1
        self._coming_version = weight_version
        self._names = []

    def add(self, bucket: Bucket) -> None:
        for name, tensor in self.form.tensors(bucket):
            kept = self._tensors.get(name)
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
                self._tensors[name] = kept
            kept.copy_(tensor)
        self._names.append([name for name, _, _ in self.form.layout(bucket)])
        if bucket.is_last:
            self.weight_version = self._coming_version

    def take(self, buckets: Iterable[Bucket], weight_version: int) -> list[Bucket]:
        """Copies all of them; gives the copies as buckets."""
        self.begin(weight_version)
        for bucket in buckets:
            self.add(bucket)
            del bucket  # else it lives on while the next is gathered
        return list(self.buckets())

    def buckets(self) -> Iterator[Bucket]:
        """The copy, cut as it came."""
        for index, names in enumerate(self._names):
            yield Bucket({name: self._tensors[name] for name in names}, is_last=index + 1 == len(self._names))
