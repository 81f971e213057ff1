"""WeightTransport: what a sync needs of a way to carry weights; Streaming: those that send bucket by bucket."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, HostCopy, ServerForm, WeightFolder


class WeightTransport(Protocol):
    """How the bytes of a version reach paused servers, one sync at a time. May keep a version for late servers."""

    needs_bracket: bool  # the servers' begin_weight_update and end_weight_update

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        """Does what it can while the servers still generate. Raises WeightSyncError; the servers are untouched then."""
        ...

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Afterwards every server that is left has the version; returns the number of bytes."""
        ...

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        """Loads a version that the transport has kept; see `holds`."""
        ...

    def holds(self, weight_version: int) -> bool: ...

    def shared_folder(self) -> WeightFolder | None:
        """Into which other ranks of the trainer may write files that `stage` takes over; None if it takes none."""
        return None

    async def close(self) -> None:
        return None


class Streaming(WeightTransport):
    """Bucket by bucket while the servers are paused; a server that fails half-way holds a mixture.

    A copy of the whole model stays in host memory, for servers that join late and for those of a group that broke.
    """

    needs_bracket = True

    def __init__(self, form: ServerForm | None = None) -> None:
        self.form = form or ServerForm()
        self.copy = HostCopy(self.form)

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        await self._connect(servers)

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        self.copy.begin(weight_version)
        copied = _copied(self.copy, buckets)
        try:
            return await self._stream(servers, copied, weight_version)
        except WeightSyncError:
            async for _ in copied:  # the rest, also when every server has failed
                pass
            if not servers.left or not self.holds(weight_version):
                raise
        while True:  # the group broke: the remaining servers get everything again
            num_servers = len(servers.left)
            try:
                return await self.load_held(servers, weight_version)
            except WeightSyncError:
                if not 0 < len(servers.left) < num_servers:
                    raise

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        await self._connect(servers)
        return await self._stream(servers, _each(self.copy.buckets()), weight_version)

    def holds(self, weight_version: int) -> bool:
        return self.copy.weight_version == weight_version

    @abstractmethod
    async def _connect(self, servers: SyncServers) -> None:
        """Asks each server what the transfer depends on."""

    @abstractmethod
    async def _send(self, servers: SyncServers, bucket: Bucket, version: str | None) -> None:
        """Sends one bucket to all; `version` comes with the last one, which also flushes the cache."""

    async def _stream(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        num_bytes = 0
        async for bucket in buckets:
            servers.check_some_left()
            layout = self.form.layout(bucket)
            version = str(weight_version) if bucket.is_last else None
            if layout:
                await self._send(servers, bucket, version)
            elif version is not None:  # it held only a tied head
                await servers.ask(lambda server: _acknowledge_empty(server, str(weight_version)))
            num_bytes += sum(shape.numel() * dtype.itemsize for _, dtype, shape in layout)
        servers.check_some_left()
        return num_bytes


async def num_ranks(server: Server) -> int:
    """Number of a server's ranks: its tensor-parallel and pipeline parts together."""
    return (await server.client.server_info()).world_size


async def _acknowledge_empty(server: Server, weight_version: str) -> None:
    await server.client.set_weight_version(weight_version)
    await server.client.flush_cache()


async def _copied(copy: HostCopy, buckets: AsyncIterator[Bucket]) -> AsyncIterator[Bucket]:
    async for bucket in buckets:
        await in_thread(copy.add, bucket)
        yield bucket


async def _each(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket
