"""DraftModel: the fake server's draft model of speculative decoding; it only has checksums, and drafts nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightrl.weights.server_form import OUTPUT_HEAD

_SHARED = ("model.embed_tokens.weight", OUTPUT_HEAD)


class DraftModel:
    """As EAGLE's in SGLang 0.5.23: the target's own embedding and head, and a layer that no load reaches."""

    def __init__(self) -> None:
        self.own = {"model.fc.weight": torch.ones(4, 8)}
        self.target: Callable[[], dict[str, Tensor]] = dict  # the target's parameters
        self._kept: dict[str, Tensor] = {}  # shared parameters that an update did not reach

    def parameters(self) -> dict[str, Tensor]:
        return self._shared() | self._kept | self.own

    def keep(self) -> None:
        """From now on it has the present values of what it shares."""
        self._kept = {name: tensor.clone() for name, tensor in self._shared().items()}

    def share(self) -> None:
        """Undoes `keep`."""
        self._kept = {}

    def num_wrong(self) -> int:
        """How many values differ from the target's."""
        shared = self._shared()
        return sum(int((kept != shared[name]).sum()) for name, kept in self._kept.items())

    def _shared(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.target().items() if name in _SHARED}
