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
import concurrent.futures
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

from lightrl.engines.sglang.bucket_feed import BucketFeed, wait_while_running
from lightrl.engines.sglang.client import ServerRefused, SGLangClient
from lightrl.engines.sglang.memory import EngineMemory
from lightrl.engines.sglang.sync_report import Fleet, SyncFailed, SyncReport
from lightrl.engines.sglang.transports import WeightTransport
from lightrl.errors import LightRLError, WeightSyncError
from lightrl.weights import Bucket

_NOT_FOUND = 404


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
                _result(future, loop)
            raise
    return _result(future, loop)


def _result(future: concurrent.futures.Future[SyncReport], loop: asyncio.AbstractEventLoop) -> SyncReport:
    wait_while_running(loop, lambda seconds: concurrent.futures.wait([future], seconds).done)
    return future.result()


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


@contextlib.contextmanager
def _timed(report: SyncReport, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = round(time.perf_counter() - start, 6)
