"""ChunkBuffers: memory for the logits of a chunk of positions, which all chunks use in turn.

In new memory for each chunk, glibc's heap would grow with the number of tokens: it keeps freed tensors of less than 32
MiB, and small tensors settle between them, so that no later chunk fits.

Shapes: n positions of a chunk, V vocabulary, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class ChunkBuffers:
    """Two tensors [n, V] in float32, or float64 for float64, and one for logits if their dtype is smaller.

    Args:
        chunk_tokens: the largest n.
        weight: [V, H] of the output head.
    """

    def __init__(self, chunk_tokens: int, weight: Tensor) -> None:
        shape, dtype = (chunk_tokens, weight.shape[0]), torch.promote_types(weight.dtype, torch.float32)
        self._first, self._second = (weight.new_empty(shape, dtype=dtype) for _ in range(2))
        self._logits = self._first if dtype == weight.dtype else weight.new_empty(shape)

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the logits [n, V] of hidden states [n, H]; valid until the next call."""
        out = self._logits[: hidden.shape[0]]
        if bias is None:
            return torch.mm(hidden, weight.T, out=out)
        return torch.addmm(bias, hidden, weight.T, out=out)

    def of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns two tensors for results from these logits; the first is `logits` itself if they have its dtype."""
        first, second = (buffer[: logits.shape[0]] for buffer in (self._first, self._second))
        return logits if self._logits is self._first else first, second
