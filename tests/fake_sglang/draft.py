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

    def parameters(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self.target().items() if name in _SHARED} | self.own
