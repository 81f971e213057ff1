"""Transports: how the bytes of a weight version reach paused SGLang servers, and what is kept for late ones.

disk           a folder that trainer and servers see; written while they generate
broadcast      a process group of the trainer's rank 0 and all servers; NCCL, or gloo on the CPU
shared memory  servers of the same host; not the default, since SGLang demands a pickle
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.sync_report import Fleet
from lightrl.errors import EngineError, WeightSyncError
from lightrl.weights import BroadcastGroup, Bucket, HostCopy, ServerForm, SharedBucket, WeightFolder, bucketed
from lightrl.weights.broadcast import listen
from lightrl.weights.disk import is_whole
from lightrl.weights.shared_memory import PART_BYTES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TransportName = Literal["disk", "distributed", "tensor"]
TRANSFER_TIMEOUT_S = 120.0  # for one bucket in a broadcast
_HOST = "127.0.0.1"  # of the group's store
_GROUP_NUMBERS = itertools.count()
_SERVER_GRACE_S = 10.0  # a server's own deadline is the group's; its answer may come a little later


class WeightTransport(Protocol):
    """How the bytes of a version reach paused servers, one sync at a time. May keep a version for late servers."""

    needs_bracket: bool  # SGLang's begin_weight_update and end_weight_update

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        """What can be done while the servers still generate. Raises WeightSyncError; the servers are untouched then."""
        ...

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Afterwards every server of the fleet has the version, or has left the fleet; returns the number of bytes."""
        ...

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        """As `load`, with a version that the transport has kept; see `holds`."""
        ...

    def holds(self, weight_version: int) -> bool: ...

    async def close(self) -> None:
        return None


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


class _Streaming(WeightTransport):
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
            del bucket  # else it stays alive while the next is gathered
        fleet.check_some_left()
        return num_bytes


class BroadcastTransport(_Streaming):
    """By broadcast in a process group of this process and all servers: NCCL between GPUs, gloo on the CPU.

    The group is built at the first sync, and again whenever the set of servers changes. A server that dies half-way
    breaks it for all, a hanging one after `transfer_timeout_s`; the others then get everything from the copy, in a new
    group. The deadline holds for one bucket, and for the group to form.
    """

    def __init__(
        self, form: ServerForm | None = None, *, device: str = "cpu", transfer_timeout_s: float = 120.0
    ) -> None:
        super().__init__(form)
        self.device = device
        self.transfer_timeout_s = transfer_timeout_s
        self._group: BroadcastGroup | None = None
        self._members: list[str] = []

    async def close(self) -> None:
        group, self._group, self._members = self._group, None, []
        if group is not None:
            await in_thread(group.close)

    async def _connect(self, fleet: Fleet) -> None:
        if self._group is not None and self._members == [client.url for client in fleet.clients]:
            return
        for attempt in range(2):
            await self._leave(fleet)
            try:
                self._group = await self._join(fleet)
                break
            except WeightSyncError:
                if attempt:
                    raise
        self._members = [client.url for client in fleet.clients]

    async def _join(self, fleet: Fleet) -> BroadcastGroup:
        sizes = await fleet.ask(_num_ranks)  # dead servers drop out here: a group waits for all members
        fleet.check_some_left()
        offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1), strict=False))
        world_size = 1 + sum(sizes.values())
        name, listener = f"lightrl-{os.getpid()}-{next(_GROUP_NUMBERS)}", listen(_HOST)
        port = listener.getsockname()[1]
        backend = "gloo" if self.device == "cpu" else "nccl"
        joining = asyncio.ensure_future(
            in_thread(
                lambda: BroadcastGroup(
                    _HOST, port, rank=0, world_size=world_size, name=name, backend=backend,
                    timeout_s=self.transfer_timeout_s, listener=listener,
                )
            )
        )  # fmt: skip
        trying = Fleet(fleet.clients, fleet.timeout_s)  # one that does not join makes all others fail
        await trying.ask(
            lambda client: client.init_weights_group(
                name, master_address=_HOST, master_port=port, rank_offset=offsets[client.url],
                world_size=world_size, backend=backend, timeout_s=self.transfer_timeout_s + _SERVER_GRACE_S,
            )
        )  # fmt: skip
        group = await joining
        if trying.lost:
            await in_thread(group.close)
            raise WeightSyncError("; ".join(f"{url}: {what}" for url, what in trying.lost.items()))
        return group

    async def _leave(self, fleet: Fleet) -> None:
        group, members = self._group, self._members
        await self.close()
        if group is None:
            return
        for client in fleet.clients:
            if client.url in members:
                with contextlib.suppress(EngineError):  # it may have been restarted
                    await client.destroy_weights_group(group.name)

    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        group = self._group
        assert group is not None
        layout = self.form.layout(bucket)

        def send() -> None:
            try:
                group.broadcast(tensor.to(self.device) for _, tensor in self.form.tensors(bucket))
            except WeightSyncError:
                group.close()  # now, so that servers waiting for a dead one notice before their own deadline
                raise

        failed: list[str] = []  # addresses, in order of failure

        async def tell(client: SGLangClient) -> None:
            try:
                timeout_s = self.transfer_timeout_s + _SERVER_GRACE_S
                await client.update_weights_from_distributed(layout, group.name, version, timeout_s=timeout_s)
            except EngineError:
                failed.append(client.url)
                raise

        sending = asyncio.ensure_future(in_thread(send))
        telling = Fleet(fleet.clients, fleet.timeout_s)
        await telling.ask(tell)
        with contextlib.suppress(WeightSyncError):
            await sending
        if not failed and sending.exception() is None:
            return
        # The silent ones are lost, else the one that failed first; the others failed because of it.
        for url in telling.silent or failed[:1]:
            fleet.lose(url, telling.lost[url])
        fleet.silent |= telling.silent
        await self._leave(fleet)
        raise WeightSyncError(
            f"the group broke: {'; '.join(telling.lost.values()) or sending.exception()}"
        ) from sending.exception()


class SharedMemoryTransport(_Streaming):
    """Through shared memory to servers of the same host. **SGLang demands a pickle**, see weights/shared_memory.py.

    A bucket is sent in parts of at most `part_bytes`, unless one tensor is larger, so that the shared block is small.
    """

    def __init__(self, form: ServerForm | None = None, *, part_bytes: int = PART_BYTES) -> None:
        super().__init__(form)
        self.part_bytes = part_bytes
        self._shared = SharedBucket(self.form)
        self._sizes: dict[str, int] = {}

    async def _connect(self, fleet: Fleet) -> None:
        self._sizes = await fleet.ask(_num_ranks)

    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        for part in bucketed(bucket.tensors.items(), self.part_bytes):
            await in_thread(self._shared.fill, part)
            await self._send_part(fleet, version if part.is_last else None)

    async def _send_part(self, fleet: Fleet, version: str | None) -> None:
        await fleet.ask(
            lambda client: client.update_weights_from_tensor(
                [self._shared.payload() for _ in range(self._sizes[client.url])],  # one for each rank
                version,
                timeout_s=fleet.timeout_s,
            )
        )


async def _num_ranks(client: SGLangClient) -> int:
    info = await client.server_info()
    return int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)


async def _acknowledge_empty(client: SGLangClient, weight_version: str) -> None:
    await client.set_weight_version(weight_version)
    await client.flush_cache()


async def _copied(copy: HostCopy, buckets: AsyncIterator[Bucket]) -> AsyncIterator[Bucket]:
    async for bucket in buckets:
        await in_thread(copy.add, bucket)
        yield bucket
        del bucket


async def _each(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket
        del bucket


def make_transport(
    name: TransportName, config: PretrainedConfig, *, dtype: torch.dtype | None, folder: Path, sync_s: float
) -> WeightTransport:
    """The transport of this name; it sends `dtype`, or the trainer's own if None."""
    form = ServerForm.of(config, dtype)
    if name == "distributed":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return BroadcastTransport(form, device=device, transfer_timeout_s=min(TRANSFER_TIMEOUT_S, sync_s))
    if name == "tensor":
        return SharedMemoryTransport(form)
    return DiskTransport(WeightFolder(folder, config, form=form, is_durable=False))
