"""PlannedEngine: the devices and memory that an engine will use, computed before it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class PlannedEngine:
    """What an engine will use: rank 0's device, servers, or another device of this machine."""

    name: str
    place: Literal["rank 0", "servers", "elsewhere"]
    servers: int = 1
    tp: int = 1
    width: int = 2  # bytes of a parameter, and of a key or value
    max_rows: int | None = None  # rows that decode together; None for all in flight
    is_block_fp8: bool = False  # one byte per parameter, except embedding and head
