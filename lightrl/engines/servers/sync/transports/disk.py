"""DiskTransport: weights through a folder that trainer and servers see."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.engines.servers.sync.transports.transport import WeightTransport
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, WeightFolder
from lightrl.weights.disk import is_whole

_T = TypeVar("_T")


class DiskTransport(WeightTransport):
    """Through a folder that trainer and servers see. Written while they generate; each server loads by itself."""

    needs_bracket = False

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        writer = await self._on_disk(servers, self.folder.begin, weight_version)
        try:
            async for bucket in buckets:
                await self._on_disk(servers, writer.add, bucket)
            await self._on_disk(servers, writer.finish)
        finally:
            with contextlib.suppress(WeightSyncError):
                await self._on_disk(servers, writer.discard)

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        return await self.load_held(servers, weight_version)

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        folder = self.folder.path_of(weight_version)
        # Else SGLang's own rollback would read the same folder again, and die.
        if not await self._on_disk(servers, is_whole, folder):
            raise WeightSyncError(f"The folder {str(folder)!r} is incomplete: a file is missing or truncated.")
        await servers.ask(
            lambda server: server.client.update_weights_from_disk(
                str(folder), str(weight_version), timeout_s=servers.timeout_s
            )
        )
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    async def _on_disk(self, servers: SyncServers, step: Callable[..., _T], *arguments: Any) -> _T:
        """A network folder may hang for ever; its thread is then abandoned."""
        try:
            return await asyncio.wait_for(in_thread(step, *arguments), servers.timeout_s)
        except asyncio.TimeoutError as error:
            raise WeightSyncError(
                f"the disk of {str(self.folder.root)!r} did not finish a step within engine.timeouts.sync_s="
                f"{servers.timeout_s:g}. It may be a network folder that hangs. Check it, or set another weight_folder."
            ) from error

    def holds(self, weight_version: int) -> bool:
        return is_whole(self.folder.path_of(weight_version))

    def shared_folder(self) -> WeightFolder:
        return self.folder
