"""ServerForm: parameters as a server needs them: in its dtype, and tied weights only once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightrl.weights.bucket import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OUTPUT_HEAD = "lm_head.weight"  # the Hugging Face name of the output head, in every family that ties it


class ServerForm:
    """Converts a bucket one tensor at a time, so that it never holds the bucket twice.

    Args:
        dtype: of the floating-point parameters, such as `torch.bfloat16`; None keeps the trainer's.
        skip_names: Hugging Face names that the server does not take: the output head of a model with tied embeddings.
    """

    def __init__(self, dtype: torch.dtype | None = None, skip_names: Collection[str] = ()) -> None:
        self.dtype = dtype
        self.skip_names = frozenset(skip_names)

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype | None = None) -> ServerForm:
        """Builds the form for a model of this config; a tied output head is the embedding, which is sent anyway."""
        return cls(dtype, [OUTPUT_HEAD] if getattr(config, "tie_word_embeddings", False) else [])

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the bucket's order; contiguous, without gradient."""
        for name, tensor in bucket.tensors.items():
            if name in self.skip_names:
                continue
            dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            yield name, tensor.detach().to(dtype).contiguous()

    def layout(self, bucket: Bucket) -> list[tuple[str, torch.dtype, torch.Size]]:
        """(name, dtype, shape) of each of `tensors`, without converting them."""
        return [
            (name, self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape)
            for name, tensor in bucket.tensors.items()
            if name not in self.skip_names
        ]
