"""Bucket: some of the parameters, so that an export never holds the model twice; ServerForm: their form for servers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PretrainedConfig

from lightrl.weights import block_fp8


@dataclass(frozen=True)
class WrittenFile:
    """A safetensors file that another rank has already written; see `disk.ShareWriter`."""

    path: str
    num_bytes: int
    shapes: dict[str, list[int]]  # Hugging Face name → shape


@dataclass(frozen=True)
class Bucket:
    """Some of a model's parameters, keyed by Hugging Face name. They are not sharded.

    An iterator of buckets empties each bucket before it yields the next, so only one is in memory. The tensors may be
    the trainer's parameters themselves; copy them to keep them.
    """

    tensors: dict[str, Tensor]
    is_last: bool = False
    files: tuple[WrittenFile, ...] = ()  # files of more parameters, written by other ranks

    @property
    def shapes(self) -> dict[str, list[int]]:
        """Maps all parameters, including those in `files`, to their shapes."""
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors.items()}
        for file in self.files:
            shapes |= file.shapes
        return shapes

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def bucketed(parameters: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[Bucket]:
    """Divides (name, tensor) pairs into buckets of at most `bucket_bytes`, unless a single tensor is larger.

    Args:
        parameters: read once; at most one parameter is read ahead of a bucket.

    Returns:
        The buckets in order; `is_last` is true for the last one. Without parameters, it is the only one, and empty.
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


ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")  # bfloat16 would round their small updates away
OUTPUT_HEAD = "lm_head.weight"  # the output head's Hugging Face name in all families that tie it


class ServerForm:
    """Converts parameters to the dtype, names and quantization that a server loads, mostly one tensor at a time.

    Args:
        dtype: dtype of floating-point parameters except routers' biases, like `torch.bfloat16`; None keeps each dtype.
        skip_names: Hugging Face names that the server does not load, such as the output head with tied embeddings.
        is_block_fp8: whether the server loads linear weights in block FP8.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, skip_names: Collection[str] = (), is_block_fp8: bool = False
    ) -> None:
        self.dtype = dtype
        self.skip_names = frozenset(skip_names)
        self.is_block_fp8 = is_block_fp8

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype | None = None) -> ServerForm:
        """Makes the form for a model with this config; skips a tied output head, which is sent as the embedding."""
        skip_names = [OUTPUT_HEAD] if getattr(config, "tie_word_embeddings", False) else []
        return cls(dtype, skip_names, block_fp8.is_block_fp8(config))

    def quantized(self, bucket: Bucket) -> Bucket:
        """Quantizes linear weights if the server loads block FP8. Call it before `tensors` and `layout`."""
        return replace(bucket, tensors=block_fp8.quantized(bucket.tensors)) if self.is_block_fp8 else bucket

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) in the bucket's order; the tensors are contiguous and have no gradient."""
        for name, dtype, _ in self.layout(bucket):
            yield name, bucket.tensors[name].detach().to(dtype).contiguous()

    def layout(self, bucket: Bucket) -> list[tuple[str, torch.dtype, torch.Size]]:
        """Returns the name, dtype and shape of each tensor that `tensors` yields."""
        return [
            (name, self._dtype(name, tensor), tensor.shape)
            for name, tensor in bucket.tensors.items()
            if name not in self.skip_names
        ]

    def _dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        is_kept = tensor.dtype == block_fp8.FP8 or name.endswith((block_fp8.SCALE, *ROUTER_BIASES))
        return tensor.dtype if self.dtype is None or not tensor.is_floating_point() or is_kept else self.dtype
