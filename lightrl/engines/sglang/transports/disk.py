"""DiskTransport: weights through a folder that trainer and servers see."""

from __future__ import annotations

from collections.abc import AsyncIterator

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.sglang.sync_report import Fleet
from lightrl.engines.sglang.transports.transport import WeightTransport
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, WeightFolder
from lightrl.weights.disk import is_whole


class DiskTransport(WeightTransport):
    """Through a folder that trainer and servers see. Written while they generate; each server loads by itself."""

    needs_bracket = False

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        writer = await in_thread(self.folder.begin, weight_version)
        try:
            async for bucket in buckets:
                await in_thread(writer.add, bucket)
                del bucket  # else it stays alive while the next is gathered
            await in_thread(writer.finish)
        finally:
            writer.discard()

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        return await self.load_held(fleet, weight_version)

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        place = self.folder.path_of(weight_version)
        if not is_whole(place):  # SGLang's own rollback reads the same folder again, and dies
            raise WeightSyncError(f"The folder {str(place)!r} is incomplete: a file is missing or truncated.")
        await fleet.ask(
            lambda client: client.update_weights_from_disk(
                str(place), weight_version=str(weight_version), timeout_s=fleet.timeout_s
            )
        )
        return sum(file.stat().st_size for file in place.glob("*.safetensors"))

    def holds(self, weight_version: int) -> bool:
        return is_whole(self.folder.path_of(weight_version))
