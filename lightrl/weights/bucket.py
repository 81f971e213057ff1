"""Buckets: parameters in parts of bounded size, so that an export never holds the whole model twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class WrittenFile:
    """A safetensors file of parameters that another rank has written already; see rank_share.py."""

    path: str
    num_bytes: int
    shapes: dict[str, list[int]]  # Hugging Face name → shape


@dataclass(frozen=True)
class Bucket:
    """Some parameters under their Hugging Face names, each whole (not sharded).

    An iterator of buckets empties a bucket when it is asked for the next one, so that one is in memory at a time, and
    the tensors may be the trainer's own: copy them to keep them.
    """

    tensors: dict[str, Tensor]
    is_last: bool = False
    written: tuple[WrittenFile, ...] = ()  # further parameters, for an engine that loads files

    @property
    def shapes(self) -> dict[str, list[int]]:
        """The number of bytes of all its parameters, the written ones too."""
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        for file in self.written:
            shapes |= file.shapes
        return shapes

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def bucketed(parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Cut (name, tensor) pairs into buckets of at most `bucket_bytes`, unless a single tensor is larger.

    Args:
        parameters: pairs in a fixed order; read once, at most one bucket ahead.
        bucket_bytes: upper bound of a bucket's size in bytes.

    Returns:
        The buckets in order; the last one is marked, and there is one even without parameters.
    """
    held: dict[str, Tensor] = {}
    size = 0
    for name, tensor in parameters:
        num_bytes = tensor.numel() * tensor.element_size()
        if held and size + num_bytes > bucket_bytes:
            yield Bucket(held)
            held.clear()
            held, size = {}, 0
        held[name] = tensor.detach()
        size += num_bytes
    yield Bucket(held, is_last=True)
