"""WeightTransport: what a sync needs of a way to carry weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from lightrl.engines.sglang.sync.report import SyncServers
from lightrl.weights import Bucket, WeightFolder


class WeightTransport(Protocol):
    """How the bytes of a version reach paused servers, one sync at a time. May keep a version for late servers."""

    needs_bracket: bool  # SGLang's begin_weight_update and end_weight_update

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        """What can be done while the servers still generate. Raises WeightSyncError; the servers are untouched then."""
        ...

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Afterwards every server that is left has the version; returns the number of bytes."""
        ...

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        """As `load`, with a version that the transport has kept; see `holds`."""
        ...

    def holds(self, weight_version: int) -> bool: ...

    def shared_folder(self) -> WeightFolder | None:
        """Into which other ranks of the trainer may write files that `stage` takes over; None if it takes none."""
        return None

    async def close(self) -> None:
        return None
