"""ServerForm: the parameters as a server wants them: its dtype, and each tensor once where weights are tied."""

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
    """What a server is sent of a bucket, one tensor at a time, so that a conversion never holds a bucket twice.

    Args:
        dtype: of the floating-point parameters, such as `torch.bfloat16`; None sends them as the trainer has them.
        skip_names: Hugging Face names that the server does not want: the output head of a model with tied embeddings.
    """

    def __init__(self, dtype: torch.dtype | None = None, skip_names: Collection[str] = ()) -> None:
        self.dtype = dtype
        self.skip_names = frozenset(skip_names)

    @classmethod
    def of(cls, config: PretrainedConfig, dtype: torch.dtype | None = None) -> ServerForm:
        """For the model of this config; a tied output head is the embedding, which travels anyway."""
        return cls(dtype, [OUTPUT_HEAD] if getattr(config, "tie_word_embeddings", False) else [])

    def tensors(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) in the bucket's order; contiguous, without gradient."""
        for name, tensor in bucket.tensors.items():
            if name in self.skip_names:
                continue
            wants = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
            yield name, tensor.detach().to(wants).contiguous()

    def layout(self, bucket: Bucket) -> list[tuple[str, torch.dtype, torch.Size]]:
        """(name, dtype, shape) of what `tensors` gives, without making it."""
        return [
            (name, self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype, tensor.shape)
            for name, tensor in bucket.tensors.items()
            if name not in self.skip_names
        ]
