"""load_into_servers: new weights into SGLang servers, so that no token carries a version that did not sample it.

    stage ─► pause(retract) ─► begin ─► load ─► end ─► verify ─► resume
    folder,    no token from     bracket  buckets; the    version and     tokens of the
    group      here on           of 0.5.21 last one has   checksums       new version
                                          the version

A server that fails anywhere stays paused and is named in the report: it leaves the pool, since it may hold a mixture,
and comes back by `load_into_servers` with what the transport holds. If none is left, the version before is restored
where the transport still has it, and SyncFailed says what happened on each server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, LightRLError, WeightSyncError
from lightrl.rollout.sglang.client import ServerRefused, SGLangClient
from lightrl.rollout.sglang.memory import EngineMemory
from lightrl.weights import BroadcastGroup, Bucket, HostCopy, ServerForm, SharedBucket, WeightFolder
from lightrl.weights.broadcast import free_port
from lightrl.weights.disk import is_whole
from lightrl.weights.shared_memory import LOAD_FORMAT

_T = TypeVar("_T")
_NOT_FOUND = 404
_GROUP_NUMBERS = itertools.count()


@dataclass
class SyncReport:
    """What became of each server: it serves a version again, or it is lost."""

    weight_version: int  # that was to be loaded
    versions: dict[str, int] = field(default_factory=dict)  # address → the version it serves now
    lost: dict[str, str] = field(default_factory=dict)  # address → what happened; paused or gone, not to be routed to
    rolled_back: dict[str, str] = field(default_factory=dict)  # address → why it serves the version before again
    num_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # stage, pause, load, verify, resume

    def describe(self) -> str:
        serve = [
            f"{url} serves version {version}" + (f" again ({self.rolled_back[url]})" if url in self.rolled_back else "")
            for url, version in self.versions.items()
        ]
        return "; ".join([*serve, *(f"{url}: {what}" for url, what in self.lost.items())])


class SyncFailed(WeightSyncError):
    """No server has the new weights; `report` says which serve the old ones and which are lost."""

    def __init__(self, message: str, report: SyncReport) -> None:
        super().__init__(message)
        self.report = report


class Fleet:
    """The servers of one sync; who fails to answer drops out of `clients` and into `lost`.

    Args:
        clients: one of each server.
        timeout_s: of each question to a server, and of each wait for the trainer's next bucket.
    """

    def __init__(self, clients: Sequence[SGLangClient], timeout_s: float) -> None:
        self.clients = list(clients)
        self.timeout_s = timeout_s
        self.lost: dict[str, str] = {}
        self.silent: set[str] = set()  # those of the lost that do not answer at all

    async def ask(self, question: Callable[[SGLangClient], Awaitable[_T]]) -> dict[str, _T]:
        """The answers by address, of all at once; waits for the slowest."""
        clients = list(self.clients)
        answers = await asyncio.gather(*(question(client) for client in clients), return_exceptions=True)
        found: dict[str, _T] = {}
        for client, answer in zip(clients, answers, strict=True):
            if isinstance(answer, EngineError):
                self.lose(client.url, str(answer))
                if isinstance(answer, (EngineUnreachable, EngineTimeout)):
                    self.silent.add(client.url)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found[client.url] = answer
        return found

    def lose(self, url: str, what: str) -> None:
        self.lost[url] = what
        self.clients = [client for client in self.clients if client.url != url]

    def check_some_left(self) -> None:
        if not self.clients:
            raise WeightSyncError("no server is left")


class WeightTransport(Protocol):
    """How the bytes of a version reach paused servers. It may hold a version, for servers that come late.

    A transport serves one sync at a time.
    """

    needs_bracket: bool  # SGLang's begin_weight_update and end_weight_update

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        """What can be done while the servers still generate. Raises WeightSyncError; they then know of nothing."""
        ...

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        """Every server of the fleet has the version, or has left the fleet; gives the number of bytes."""
        ...

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        """As `load`, with a version that the transport holds; see `holds`."""
        ...

    def holds(self, weight_version: int) -> bool: ...

    async def close(self) -> None: ...


class DiskTransport(WeightTransport):
    """Through a folder that trainer and servers see. Written while they generate; each server loads by itself.

    Args:
        folder: where versions are kept; keep at least 2, so that a failed sync has a version to go back to.
    """

    needs_bracket = False

    def __init__(self, folder: WeightFolder) -> None:
        self.folder = folder

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        writer = await in_thread(self.folder.begin, weight_version)
        try:
            async for bucket in buckets:
                await in_thread(writer.add, bucket)
                del bucket  # else it lives on while the next is gathered
            await in_thread(writer.finish)
        except BaseException:
            writer.discard()
            raise

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        return await self.load_held(fleet, weight_version)

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        place = self.folder.path_of(weight_version)
        if not is_whole(place):  # SGLang's own rollback reads the same folder again, and dies
            raise WeightSyncError(f"The folder {str(place)!r} is not whole, expected all files as they were written.")
        await fleet.ask(
            lambda client: client.update_weights_from_disk(
                str(place), weight_version=str(weight_version), flush_cache=True, timeout_s=fleet.timeout_s
            )
        )
        return _folder_bytes(place)

    def holds(self, weight_version: int) -> bool:
        return is_whole(self.folder.path_of(weight_version))

    async def close(self) -> None:
        return None


class _Streaming(WeightTransport):
    """Bucket by bucket while the servers are paused; a server that fails half-way holds a mixture.

    Args:
        form: dtype and names that the servers want.
        keeps_copy: a copy of the whole model stays in host memory, so that servers that come late, and those of a group
            that broke, get a whole set. Without it they wait for the next sync.
    """

    needs_bracket = True

    def __init__(self, form: ServerForm | None = None, *, keeps_copy: bool = True) -> None:
        self.form = form or ServerForm()
        self.copy = HostCopy(self.form) if keeps_copy else None

    async def stage(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        await self._connect(fleet)

    async def load(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        if self.copy is None:
            return await self._stream(fleet, buckets, weight_version)
        self.copy.begin(weight_version)
        copied = _copied(self.copy, buckets)
        try:
            return await self._stream(fleet, copied, weight_version)
        except WeightSyncError:
            async for _ in copied:  # what is left, also when every server has failed
                pass
            if not fleet.clients or not self.holds(weight_version):
                raise
        while True:  # the group broke: who is left gets the whole again
            num_clients = len(fleet.clients)
            try:
                return await self.load_held(fleet, weight_version)
            except WeightSyncError:
                if not 0 < len(fleet.clients) < num_clients:
                    raise

    async def load_held(self, fleet: Fleet, weight_version: int) -> int:
        assert self.copy is not None
        await self._connect(fleet)
        return await self._stream(fleet, _each(self.copy.buckets()), weight_version)

    def holds(self, weight_version: int) -> bool:
        return self.copy is not None and self.copy.weight_version == weight_version

    async def close(self) -> None:
        return None

    async def _connect(self, fleet: Fleet) -> None:
        """Learns of each server what the transfer needs."""
        raise NotImplementedError

    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        """One bucket to all; `version` is set with the last one, which flushes the cache as well."""
        raise NotImplementedError

    async def _stream(self, fleet: Fleet, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        num_bytes = 0
        async for bucket in buckets:
            fleet.check_some_left()
            layout = self.form.layout(bucket)
            version = str(weight_version) if bucket.is_last else None
            if layout:
                await self._send(fleet, bucket, version)
            elif version is not None:  # nothing but a tied head was in it
                await fleet.ask(lambda client: _acknowledge_empty(client, str(weight_version)))
            num_bytes += sum(shape.numel() * dtype.itemsize for _, dtype, shape in layout)
            del bucket  # else it lives on while the next is gathered
        fleet.check_some_left()
        return num_bytes


class BroadcastTransport(_Streaming):
    """By broadcast in a process group of this process and all servers: NCCL between GPUs, gloo on the CPU.

    The group is made at the first sync and again whenever the servers are others. A server that dies half-way breaks it
    for all, one that hangs after `transfer_timeout_s`; the others get the whole again in a new group, from the copy.

    Args:
        host: address of this process as the servers reach it.
        backend: `nccl` or `gloo`.
        device: of the tensors that are sent; `cuda` for NCCL.
        transfer_timeout_s: of one bucket, and of the group's coming together.
        form, keeps_copy: see `_Streaming`.
    """

    def __init__(
        self,
        form: ServerForm | None = None,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        device: str | torch.device = "cpu",
        transfer_timeout_s: float = 120.0,
        keeps_copy: bool = True,
    ) -> None:
        super().__init__(form, keeps_copy=keeps_copy)
        self.host = host
        self.backend = backend
        self.device = torch.device(device)
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
        sizes = await fleet.ask(_num_ranks)  # who is gone drops out here, for a group waits for all
        fleet.check_some_left()
        offsets = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=1), strict=False))
        world_size = 1 + sum(sizes.values())
        name, port = f"lightrl-{os.getpid()}-{next(_GROUP_NUMBERS)}", free_port(self.host)
        joining = asyncio.ensure_future(
            in_thread(
                lambda: BroadcastGroup(
                    self.host, port, rank=0, world_size=world_size, name=name, backend=self.backend,
                    timeout_s=self.transfer_timeout_s,
                )
            )
        )  # fmt: skip
        trying = Fleet(fleet.clients, fleet.timeout_s)  # one that does not come makes all others fail
        await trying.ask(
            lambda client: client.init_weights_group(
                master_address=self.host, master_port=port, rank_offset=offsets[client.url], world_size=world_size,
                group_name=name, backend=self.backend, timeout_s=self.transfer_timeout_s + 10,
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
                with contextlib.suppress(EngineError):  # it may have been started anew
                    await client.destroy_weights_group(group.name)

    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        group = self._group
        assert group is not None
        layout = self.form.layout(bucket)

        def send() -> None:
            try:
                group.broadcast(tensor.to(self.device) for _, tensor in self.form.tensors(bucket))
            except WeightSyncError:
                group.close()  # now: those who wait for one that is gone see it, else at their own deadline
                raise

        failed: list[str] = []  # addresses, the first to fail first

        async def tell(client: SGLangClient) -> None:
            try:
                await client.update_weights_from_distributed(
                    names=[name for name, _, _ in layout],
                    dtypes=[str(dtype).removeprefix("torch.") for _, dtype, _ in layout],
                    shapes=[list(shape) for _, _, shape in layout],
                    group_name=group.name, weight_version=version, flush_cache=version is not None,
                    timeout_s=self.transfer_timeout_s + 10,
                )  # fmt: skip
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
        # Whoever is silent has left, or the one that failed first; the others failed because of it.
        for url in telling.silent or failed[:1]:
            fleet.lose(url, telling.lost[url])
        fleet.silent |= telling.silent
        await self._leave(fleet)
        raise WeightSyncError(
            f"the group broke: {'; '.join(telling.lost.values()) or sending.exception()}"
        ) from sending.exception()


class SharedMemoryTransport(_Streaming):
    """Through shared memory to servers of the same host. **SGLang wants a pickle**, see weights/shared_memory.py.

    Args:
        form, keeps_copy: see `_Streaming`.
    """

    def __init__(self, form: ServerForm | None = None, *, keeps_copy: bool = True) -> None:
        super().__init__(form, keeps_copy=keeps_copy)
        self._shared = SharedBucket(self.form)
        self._sizes: dict[str, int] = {}

    async def _connect(self, fleet: Fleet) -> None:
        self._sizes = await fleet.ask(_num_ranks)

    async def _send(self, fleet: Fleet, bucket: Bucket, version: str | None) -> None:
        await in_thread(self._shared.fill, bucket)
        await fleet.ask(
            lambda client: client.update_weights_from_tensor(
                [self._shared.payload() for _ in range(self._sizes[client.url])],  # one for each rank
                load_format=LOAD_FORMAT, weight_version=version, flush_cache=version is not None,
                timeout_s=fleet.timeout_s,
            )
        )  # fmt: skip


async def load_into_servers(
    clients: Sequence[SGLangClient],
    transport: WeightTransport,
    buckets: AsyncIterator[Bucket] | None,
    *,
    weight_version: int,
    previous_version: int | None = None,
    timeout_s: float = 600.0,
    verify: bool = True,
    memory: EngineMemory | None = None,
    report: SyncReport | None = None,
) -> SyncReport:
    """Loads a version into all servers; those that have it afterwards serve it, the others are lost.

    Waits for the slowest server; every step has its deadline. On cancellation servers that still have their old weights
    whole go on, the others stay paused.

    Args:
        clients: of the servers that are up.
        buckets: of the trainer; None loads what the transport holds, for servers that come late.
        previous_version: what the servers have now; restored where no server takes the new one.
        timeout_s: of each question and each wait for a bucket.
        verify: asks for the version and, of several servers, for checksums that agree.
        memory: of colocated servers: weights get their memory back before the load, the rest after it.
        report: is filled in as the sync goes on, for a caller that wants it whatever is raised.

    Raises:
        SyncFailed: if no server has the new version; its report says who serves the old one.
    """
    fleet = Fleet(clients, timeout_s)
    report = report or SyncReport(weight_version)
    report.lost = fleet.lost
    is_touched = memory is not None and any(memory.released(client.url) for client in clients)  # weights are gone
    try:
        fleet.check_some_left()
        with _timed(report, "stage"):
            if buckets is not None:
                await transport.stage(fleet, buckets, weight_version)
            elif not transport.holds(weight_version):
                raise WeightSyncError("it is not held any more, sync again")
            fleet.check_some_left()
        with _timed(report, "pause"):
            await fleet.ask(lambda client: client.pause("retract", timeout_s=timeout_s))
            if memory is not None:
                await memory.resume(fleet.clients, ["weights"], fleet.ask)
        with _timed(report, "load"):
            fleet.check_some_left()
            is_touched = True
            report.num_bytes = await _load(fleet, transport, buckets, weight_version)
        with _timed(report, "verify"):
            if verify:
                await _verify(fleet, weight_version)
                fleet.check_some_left()
        with _timed(report, "resume"):
            if memory is not None:
                await memory.resume(fleet.clients, None, fleet.ask)
            report.versions = dict.fromkeys(
                await fleet.ask(lambda client: client.resume(timeout_s=timeout_s)), weight_version
            )
            fleet.check_some_left()
    except WeightSyncError as error:
        if not is_touched and previous_version is not None:  # who is left still has the old weights, untouched
            for url in await fleet.ask(lambda client: client.resume(timeout_s=timeout_s)):
                report.versions[url] = previous_version
        else:
            await _roll_back(fleet, clients, transport, report, previous_version, str(error), memory)
        raise SyncFailed(
            f"Weight version {weight_version} reached no server: {error}. {report.describe()}. Expected at least one "
            "to take it. Look at the servers' logs; a run resumed from the last checkpoint loads its version again.",
            report,
        ) from error
    except BaseException:
        if not is_touched:
            await asyncio.shield(fleet.ask(lambda client: client.resume(timeout_s=10)))
        raise
    return report


def load_from_thread(
    loop: asyncio.AbstractEventLoop,
    clients: Sequence[SGLangClient],
    transport: WeightTransport,
    buckets: Iterable[Bucket] | None,
    *,
    weight_version: int,
    timeout_s: float = 600.0,
    previous_version: int | None = None,
    verify: bool = True,
    memory: EngineMemory | None = None,
    report: SyncReport | None = None,
) -> SyncReport:
    """`load_into_servers` on `loop`, with buckets that are made here, in the calling thread.

    While one bucket is under way the next is made: two live at most. Not to be called from the loop's own thread.
    Whatever the buckets raise ends the sync and goes on.
    """
    feed = BucketFeed(loop, timeout_s=timeout_s) if buckets is not None else None
    future = asyncio.run_coroutine_threadsafe(
        load_into_servers(
            clients, transport, feed, weight_version=weight_version, previous_version=previous_version,
            timeout_s=timeout_s, verify=verify, memory=memory, report=report,
        ),
        loop,
    )  # fmt: skip
    if feed is not None and buckets is not None:
        future.add_done_callback(lambda done: feed.stop())
        try:
            for bucket in buckets:
                goes_on = feed.put(bucket)
                del bucket  # else it lives on while the next is gathered
                if not goes_on:
                    break  # the sync is over, with an error
            feed.end()
        except BaseException as error:
            feed.fail(error)
            with contextlib.suppress(LightRLError):
                future.result()
            raise
    return future.result()


class BucketFeed:
    """Buckets from the thread that makes them to a coroutine: `put` returns when the coroutine has taken it.

    Args:
        loop: of the coroutine.
        timeout_s: the coroutine waits for so long for the next bucket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._loop = loop
        self._changed = asyncio.Event()
        self._taken = threading.Event()
        self._next: Bucket | None = None  # offered, not yet taken
        self._is_over = False  # no bucket comes any more
        self._is_stopped = False  # none is wanted any more
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Hands a bucket over; False if none is wanted any more."""
        self._taken.clear()
        if self._is_stopped:
            return False
        self._next = bucket
        self._loop.call_soon_threadsafe(self._changed.set)
        self._taken.wait()  # `stop` ends it when the coroutine is over, which has deadlines of its own
        return not self._is_stopped

    def end(self) -> None:
        self._is_over = True
        self._loop.call_soon_threadsafe(self._changed.set)

    def fail(self, error: BaseException) -> None:
        """No further bucket comes, because of `error`."""
        self._error = error
        self.end()

    def stop(self) -> None:
        self._is_stopped = True
        self._taken.set()

    def __aiter__(self) -> BucketFeed:
        return self

    async def __anext__(self) -> Bucket:
        """Waits for the next `put`, `end` or `fail`, at most `timeout_s`."""
        while self._next is None:
            if self._error is not None:
                raise WeightSyncError(f"the export of weights failed: {self._error!r}") from self._error
            if self._is_over:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.timeout_s)
            except asyncio.TimeoutError as error:
                raise WeightSyncError(
                    f"the trainer made no bucket for timeout_s={self.timeout_s:g}, expected one; a rank may hang"
                ) from error
        bucket, self._next = self._next, None
        self._taken.set()
        return bucket


async def in_thread(function: Callable[..., _T], *args: object) -> _T:
    """What `function` gives, from a daemon thread: one that hangs keeps neither the loop nor the process.

    Waits for the thread, which has its own deadlines. On cancellation the thread is left to end by itself.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[_T] = loop.create_future()

    def deliver(value: _T | None, error: BaseException | None) -> None:
        if done.done():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(value)  # type: ignore[arg-type]

    def work() -> None:
        outcome: tuple[_T | None, BaseException | None]
        try:
            outcome = (function(*args), None)
        except BaseException as error:  # noqa: BLE001  # nobody is above it in this thread; it is raised where it is awaited
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, *outcome)

    threading.Thread(target=work, name="lightrl-weights", daemon=True).start()
    return await done


async def _load(
    fleet: Fleet, transport: WeightTransport, buckets: AsyncIterator[Bucket] | None, weight_version: int
) -> int:
    has_bracket: dict[str, bool] = {}
    if transport.needs_bracket:
        has_bracket = await fleet.ask(_begin)
        fleet.check_some_left()
    if buckets is not None:
        num_bytes = await transport.load(fleet, buckets, weight_version)
    else:
        num_bytes = await transport.load_held(fleet, weight_version)
    if transport.needs_bracket:

        async def end(client: SGLangClient) -> None:
            if has_bracket[client.url]:
                await client.end_weight_update()

        await fleet.ask(end)
    fleet.check_some_left()
    return num_bytes


async def _begin(client: SGLangClient) -> bool:
    """Opens the bracket; one that a crashed trainer left open is ended first."""
    try:
        return await client.begin_weight_update()
    except ServerRefused:
        await client.end_weight_update()
        return await client.begin_weight_update()


async def _verify(fleet: Fleet, weight_version: int) -> None:
    """Servers that say another version, or whose checksum is not that of most, leave the fleet."""
    infos = await fleet.ask(lambda client: client.model_info(timeout_s=fleet.timeout_s))
    for url, info in infos.items():
        if str(info.get("weight_version")) != str(weight_version):
            fleet.lose(
                url, f"it acknowledged version {info.get('weight_version')!r}, expected {weight_version}: not loaded"
            )
    if len(fleet.clients) < 2:
        return
    checksums = {url: checksum for url, checksum in (await fleet.ask(_checksum)).items() if checksum is not None}
    for num_ranks in {num for num, _ in checksums.values()}:  # what a rank holds depends on how many there are
        votes = Counter(checksum for num, checksum in checksums.values() if num == num_ranks)
        ranked = votes.most_common(2)
        agreed = ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else None
        for url, (num, checksum) in checksums.items():
            if num == num_ranks and checksum != agreed:
                fleet.lose(
                    url, f"its weights have the checksum {checksum[:12]}, expected that of the others: not the same"
                )


async def _checksum(client: SGLangClient) -> tuple[int, str] | None:
    """(ranks, checksum over them); None where the server has none to give."""
    try:
        answer = await client.checksum()
    except ServerRefused as error:
        if error.status == _NOT_FOUND:
            return None
        raise
    checksum = answer.get("per_engine_checksum")
    return (len(answer.get("ranks") or [None]), str(checksum)) if checksum is not None else None


async def _num_ranks(client: SGLangClient) -> int:
    info = await client.server_info()
    return int(info.get("tp_size") or 1) * int(info.get("pp_size") or 1)


async def _roll_back(
    failed: Fleet,
    clients: Sequence[SGLangClient],
    transport: WeightTransport,
    report: SyncReport,
    previous_version: int | None,
    why: str,
    memory: EngineMemory | None,
) -> None:
    """Servers that answer get the version before again and go on with it; the others are lost."""
    for client in list(failed.clients):
        failed.lose(client.url, why)
    if previous_version is None or not transport.holds(previous_version):
        return
    fleet = Fleet([client for client in clients if client.url not in failed.silent], failed.timeout_s)
    with contextlib.suppress(WeightSyncError):
        await fleet.ask(lambda client: client.pause("retract", timeout_s=fleet.timeout_s))
        if memory is not None:
            await memory.resume(fleet.clients, ["weights"], fleet.ask)
        await _load(fleet, transport, None, previous_version)
        await _verify(fleet, previous_version)
        if memory is not None:
            await memory.resume(fleet.clients, None, fleet.ask)
        for url in await fleet.ask(lambda client: client.resume(timeout_s=fleet.timeout_s)):
            report.versions[url] = previous_version
            report.rolled_back[url] = report.lost.pop(url)


async def _acknowledge_empty(client: SGLangClient, weight_version: str) -> None:
    await client.set_weight_version(weight_version)
    await client.flush_cache()


@contextlib.contextmanager
def _timed(report: SyncReport, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = round(time.perf_counter() - start, 6)


async def _copied(copy: HostCopy, buckets: AsyncIterator[Bucket]) -> AsyncIterator[Bucket]:
    async for bucket in buckets:
        await in_thread(copy.add, bucket)
        yield bucket
        del bucket


async def _each(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket
        del bucket


def _folder_bytes(place: Path) -> int:
    return sum(file.stat().st_size for file in place.glob("*.safetensors"))
