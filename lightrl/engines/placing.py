"""PlannedEngine: what an engine takes of which devices, on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class PlannedEngine:
    """The engine: on the device of rank 0, on servers, or on another device of this machine."""

    name: str
    place: Literal["rank 0", "servers", "elsewhere"]
    servers: int = 1
    tp: int = 1
    width: int = 2  # bytes of a parameter and of a key or value
    max_rows: int | None = None  # rows that decode together; None: all in flight
    is_block_fp8: bool = False  # a byte for each parameter besides embedding and head

    def key_value_share(self, config: PretrainedConfig) -> int:
        """GPUs over which the key-values of a token are split."""
        return min(self.tp, int(config.num_key_value_heads))
