"""WeightTransport: how a sync sends weights, through a folder or bucket by bucket (Streaming)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch

from lightrl.concurrency.in_thread import in_thread
from lightrl.concurrency.owner import let_go
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.errors import WeightSyncError
from lightrl.weights import Bucket, HostCopy, ServerForm, SharedBucket, WeightFolder, bucketed
from lightrl.weights.disk import is_whole
from lightrl.weights.shared_memory import PART_BYTES

_T = TypeVar("_T")
GPU_PART_BYTES = 2**29  # size of a block in GPU memory


class WeightTransport(Protocol):
    """Sends a version's bytes to servers, one sync at a time. May keep a version for servers that join late."""

    needs_bracket: bool  # whether a load needs `begin_weight_update` and `end_weight_update`

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        """Does as much of a load as possible while servers generate; a failure leaves their weights untouched."""

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Loads the version into the remaining servers, which are paused; returns the number of bytes sent."""

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        """Loads a version that the transport `holds`."""

    def holds(self, weight_version: int) -> bool: ...

    def shared_folder(self) -> WeightFolder | None:
        """Returns the folder where other trainer ranks may write files for `stage`; None if that is not supported."""
        return None

    async def close(self) -> None:
        return None


class Streaming(WeightTransport):
    """Sends bucket by bucket while servers are paused; a server that fails midway has a mixture of weights.

    A copy of the model stays in host memory, for servers that join late or whose group broke.
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
            async for _ in copied:  # completes the copy, even if all servers have failed
                pass
            if not servers.left or not self.holds(weight_version):
                raise
        while True:  # the group broke, so the remaining servers get everything again
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
        """Prepares the transfer with each server."""

    @abstractmethod
    async def _send(self, servers: SyncServers, bucket: Bucket, version: str | None) -> None:
        """Sends a bucket to all servers; only the last has a `version`, and makes the servers flush their caches."""

    async def _stream(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Sends the buckets to all servers; returns the number of bytes."""
        num_bytes = 0
        async for bucket in buckets:
            servers.check_some_left()
            layout = self.form.layout(bucket)
            version = str(weight_version) if bucket.is_last else None
            if layout:
                await self._send(servers, bucket, version)
            elif version is not None:  # the last bucket contains only a tied head
                await servers.ask(lambda server: _acknowledge_empty(server, str(weight_version)))
            num_bytes += sum(shape.numel() * dtype.itemsize for _, dtype, shape in layout)
        servers.check_some_left()
        return num_bytes


class SharedMemoryTransport(Streaming):
    """Sends through shared memory on one host. **SGLang requires a pickle**: see weights/shared_memory.py.

    To keep the shared block small, a bucket is sent in parts of at most `part_bytes`, unless a tensor is larger.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(form)
        self.part_bytes = part_bytes
        self._shared = SharedBucket(self.form)
        self._sizes: dict[Server, int] = {}  # server → number of ranks

    async def _connect(self, servers: SyncServers) -> None:
        self._sizes = await servers.ask(num_ranks)

    async def _send(self, servers: SyncServers, bucket: Bucket, version: str | None) -> None:
        for part in bucketed(bucket.tensors.items(), self.part_bytes):
            await in_thread(self._shared.fill, part)
            await servers.ask(functools.partial(self._send_part, version if part.is_last else None, servers.timeout_s))

    async def _send_part(self, version: str | None, timeout_s: float, server: Server) -> None:
        payloads = [self._shared.payload() for _ in range(self._sizes[server])]  # one per rank
        await server.client.update_weights_from_tensor(payloads, version, timeout_s=timeout_s)


class CudaIpcTransport(SharedMemoryTransport):
    """Sends like SharedMemoryTransport, but through a block in rank 0's GPU memory instead of host memory.

    Each tp rank of a server gets a handle to the block. A rank on another GPU reads it over NVLink or PCIe, which needs
    peer access between the two GPUs. **SGLang requires a pickle**: see weights/shared_memory.py.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = GPU_PART_BYTES) -> None:
        super().__init__(form, part_bytes=part_bytes)
        self._shared = SharedBucket(self.form, device=f"cuda:{torch.cuda.current_device()}")


class DiskTransport(WeightTransport):
    """While the servers generate, writes a folder that they share with the trainer; then each server loads it."""

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
        # Without this check, SGLang would read a bad folder, read it again to roll back, and crash.
        if not await self._on_disk(servers, is_whole, folder):
            raise WeightSyncError(f"The folder {str(folder)!r} is incomplete: a file is missing or truncated.")
        await servers.ask(
            lambda server: server.client.update_weights_from_disk(
                str(folder), str(weight_version), timeout_s=servers.timeout_s
            )
        )
        return sum(file.stat().st_size for file in folder.glob("*.safetensors"))

    async def _on_disk(self, servers: SyncServers, step: Callable[..., _T], *arguments: Any) -> _T:
        """Runs a step in a thread, and abandons the thread if a network folder hangs."""
        try:
            return await asyncio.wait_for(in_thread(step, *arguments), servers.timeout_s)
        except TimeoutError as error:
            raise WeightSyncError(
                f"a step on the disk that holds {str(self.folder.root)!r} took longer than engine.timeouts.sync_s="
                f"{servers.timeout_s:g}. A network folder may be stuck. Check it, or set another weight_folder."
            ) from error

    def holds(self, weight_version: int) -> bool:
        return is_whole(self.folder.path_of(weight_version))

    async def close(self) -> None:
        let_go(self.folder.root)

    def shared_folder(self) -> WeightFolder:
        return self.folder


async def num_ranks(server: Server) -> int:
    """Returns a server's number of ranks: tensor-parallel times pipeline-parallel."""
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
