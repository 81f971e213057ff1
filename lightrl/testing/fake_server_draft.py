"""DraftModel: the fake server's draft model of speculative decoding; it only has checksums, and drafts nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from lightrl.weights.server_form import OUTPUT_HEAD

_SHARED = ("model.embed_tokens.weight", OUTPUT_HEAD)


class DraftModel:
    """As EAGLE's in SGLang 0.5.23: the target's own embedding and head, and a layer that no load reaches."""

    def __init__(self) -> None:
        self.own = {"model.fc.weight": torch.ones(4, 8)}
        self._kept: dict[str, Tensor] = {}  # shared parameters that an update did not reach

    def parameters(self, target: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: target[name] for name in _SHARED if name in target} | self._kept | self.own

    def keep(self, target: dict[str, Tensor]) -> None:
        """From now on it has the present values of what it shares."""
        self._kept = {name: target[name].clone() for name in _SHARED if name in target}

    def share(self) -> None:
        """Undoes `keep`."""
        self._kept = {}

    def num_wrong(self, target: dict[str, Tensor]) -> int:
        """How many values differ from the target's."""
        return sum(int((kept != target[name]).sum()) for name, kept in self._kept.items())
