"""ChunkBuffers: memory for the logits of one chunk of positions, reused by every chunk.

If each chunk allocated memory, glibc's heap would grow with the number of tokens: it keeps freed tensors of less than
32 MiB, and small tensors allocated in the gaps leave no room for later chunks.

Shapes: n positions in a chunk, V vocabulary, H hidden size.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class ChunkBuffers:
    """Tensors [n, V]: two in float32 (float64 for a float64 head), and one in the head's dtype if that is smaller.

    Args:
        chunk_tokens: the largest n.
        weight: [V, H] of the output head.
    """

    def __init__(self, chunk_tokens: int, weight: Tensor) -> None:
        shape, dtype = (chunk_tokens, weight.shape[0]), torch.promote_types(weight.dtype, torch.float32)
        self._first = weight.new_empty(shape, dtype=dtype)
        self._logits = self._first if dtype == weight.dtype else weight.new_empty(shape)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the logits [n, V] of hidden states [n, H]; valid until the next call."""
        out = self._logits[: hidden.shape[0]]
        if bias is None:
            return torch.mm(hidden, weight.T, out=out)
        return torch.addmm(bias, hidden, weight.T, out=out)

    @functools.cached_property
    def _second(self) -> Tensor:
        return torch.empty_like(self._first)

    def first(self, logits: Tensor) -> Tensor:
        """Returns a tensor for results computed from these logits: `logits` itself if the dtypes match."""
        return logits if self._logits is self._first else self._first[: logits.shape[0]]

    def second(self, logits: Tensor) -> Tensor:
        """Returns another tensor for results computed from these logits."""
        return self._second[: logits.shape[0]]
