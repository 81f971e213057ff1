"""Streaming: weights bucket by bucket to paused servers; what broadcast and shared memory have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.sync.report import Fleet
from lightrl.engines.sglang.sync.transports.transport import WeightTransport
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, HostCopy, ServerForm


class Streaming(WeightTransport):
    """Bucket by bucket while the servers are paused; a server that fails half-way holds a mixture.

    A copy of the whole model stays in host memory, for servers that join late and for those of a group that broke.
    """

    needs_bracket = True

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self.copy = HostCopy(self.form)

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        await self._connect(fleet)

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        self.copy.begin(weight_version)
        copied = _copied(self.copy, buckets)
        try:
            return await self._stream(fleet, copied, weight_version)
        except WeightSyncError:
            async for _ in copied:  # the rest, also when every server has failed
                pass
            if not fleet.clients or not self.holds(weight_version):
                raise
        while True:  # the group broke: the remaining servers get everything again
            num_clients = len(fleet.clients)
            try:
                return await self.load_held(fleet, weight_version)
            except WeightSyncError:
                if not 0 < len(fleet.clients) < num_clients:
                    raise

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        await self._connect(fleet)
        return await self._stream(fleet, _each(self.copy.buckets()), weight_version)

    def holds(self, weight_version: int) -> bool:
        return self.copy.weight_version == weight_version

    @abstractmethod
    async def _connect(self, fleet: Fleet) -> None:
        """Asks each server what the transfer depends on."""

    @abstractmethod
    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        """Sends one bucket to all; `version` comes with the last one, which also flushes the cache."""

    async def _stream(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        num_bytes = 0
        async for bucket in buckets:
            fleet.check_some_left()
            layout = self.form.layout(bucket)
            version = str(weight_version) if bucket.is_last else None
            if layout:
                await self._send(fleet, bucket, version)
            elif version is not None:  # it held only a tied head
                await fleet.ask(lambda client: _acknowledge_empty(client, str(weight_version)))
            num_bytes += sum(shape.numel() * dtype.itemsize for _, dtype, shape in layout)
        fleet.check_some_left()
        return num_bytes


async def num_ranks(client: SGLangClient) -> int:
    """Of a server: its tensor-parallel and pipeline parts together."""
    info = await client.server_info()
    return int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)


async def _acknowledge_empty(client: SGLangClient, weight_version: str) -> None:
    await client.set_weight_version(weight_version)
    await client.flush_cache()


async def _copied(copy: HostCopy, buckets: AsyncIterator[Bucket]) -> AsyncIterator[Bucket]:
    async for bucket in buckets:
        await in_thread(copy.add, bucket)
        yield bucket


async def _each(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket
