"""ServerSync: loads new weights into servers so that each token is tagged with the version that sampled it.

    stage ─► pause(retract) ─► begin ─► load ─► end ─► verify ─► resume
    folder,    no token from     since    buckets; the    version and     tokens of the
    group,     here on           0.5.21   last one has    digests         new version
    canaries                              the version

A server that fails at any step may have a mixture of weights, so it stays paused, counts as lost, and returns only with
another sync. If no server is left, the previous version is restored, if the transport still has it, and SyncFailed
reports what happened on each server.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from lightrl.concurrency.loop_thread import LoopBlocked, LoopEnded, deaths, wait_on_loop, wake_up
from lightrl.engines.servers.connection import ServerRefused
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.cache_canary import CacheCanary
from lightrl.engines.servers.sync.report import SyncFailed, SyncReport, SyncServers, SyncUndone
from lightrl.engines.servers.sync.transports import WeightTransport
from lightrl.engines.servers.sync.verification import WeightVerifier, verify_servers
from lightrl.errors import EngineError, WeightSyncError
from lightrl.trace import span
from lightrl.weights import Bucket

BLOCKED_S = 60.0  # an event loop that does not respond for this long counts as blocked


class BucketFeed:
    """Passes buckets from a thread to a coroutine; `put` returns once the coroutine has taken the bucket.

    The thread puts buckets inside `with feed:`; the coroutine's iteration stops when that block ends or raises. The
    coroutine waits at most `timeout_s` for each bucket.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, timeout_s: float = 600.0) -> None:
        self.timeout_s = timeout_s
        self._loop = loop
        self._changed = asyncio.Event()
        self._taken = threading.Event()
        self._next: Bucket | None = None  # a bucket that was put but has not been taken
        self._taken_bucket = Bucket({})
        self._is_complete = False  # no more buckets will be put
        self._is_stopped = False  # no more buckets will be taken
        self._error: BaseException | None = None

    def put(self, bucket: Bucket) -> bool:
        """Passes a bucket on; returns False if the coroutine takes no more. The coroutine checks the deadlines."""
        self._taken.clear()
        if self._is_stopped:
            return False
        # A copy, because the iterator empties `bucket`.
        self._next = Bucket(dict(bucket.tensors), bucket.is_last, bucket.files)
        wake_up(self._loop, self._changed.set)
        wait_while_running(self._loop, self._taken)  # `stop` ends the wait when the coroutine is done
        return not self._is_stopped

    def stop(self) -> None:
        """Makes a waiting `put` return False; called when the coroutine is done."""
        self._is_stopped = True
        self._taken.set()

    def __enter__(self) -> BucketFeed:
        return self

    def __exit__(
        self, type_: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._error = error
        self._is_complete = True
        wake_up(self._loop, self._changed.set)

    def __aiter__(self) -> BucketFeed:
        return self

    async def __anext__(self) -> Bucket:
        """Empties the previous bucket, then waits up to `timeout_s` for the next `put` or the end of `with`."""
        self._taken_bucket.tensors.clear()
        while self._next is None:
            if self._error is not None:
                raise WeightSyncError(f"the export of weights failed: {self._error!r}") from self._error
            if self._is_complete:
                raise StopAsyncIteration
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), self.timeout_s)
            except TimeoutError as error:
                problem = f"the trainer sent no bucket for {self.timeout_s:g} s; a rank may be stuck"
                raise WeightSyncError(problem) from error
        self._taken_bucket, self._next = self._next, None
        self._taken.set()
        return self._taken_bucket


def wait_while_running(loop: asyncio.AbstractEventLoop, awaited: Future[Any] | threading.Event) -> None:
    """Waits, in another thread, until the loop sets `awaited`; raises WeightSyncError if the loop stops or blocks."""
    try:
        wait_on_loop(loop, awaited, silent_s=BLOCKED_S)
    except LoopEnded as error:
        raise loop_ended(loop) from error
    except LoopBlocked as error:
        raise WeightSyncError(
            f"The engine's event loop did not answer for {BLOCKED_S:g} s during a weight sync. A "
            "workflow, environment or async reward is blocking it. Use await there, or move the work to a thread."
        ) from error


def loop_ended(loop: asyncio.AbstractEventLoop) -> WeightSyncError:
    """Returns the error for a sync during which the event loop stopped."""
    cause = f"The rollout thread died: {deaths[loop]!r}" if loop in deaths else "The log says why"
    problem = f"The engine's event loop stopped during a weight sync. {cause}. Resume from the last checkpoint."
    return WeightSyncError(problem)


log = logging.getLogger(__name__)

_LAST_RESUME_S = 10.0  # deadline for resuming servers after a cancelled sync


@dataclass(eq=False)
class ServerSync:
    """Loads weight versions into servers."""

    transport: WeightTransport
    timeout_s: float = 600.0  # for each request and each bucket
    verify: bool = True  # whether to check each server's version and, where possible, its parameters
    verifier: WeightVerifier | None = None  # has digests of the sent weights; if None, servers' checksums are compared
    canary: CacheCanary | None = None  # checks that a load has emptied the prefix caches

    async def load(
        self,
        servers: Sequence[Server],
        buckets: AsyncIterator[Bucket] | None,
        *,
        weight_version: int,
        previous_version: int | None = None,
        report: SyncReport | None = None,
        before_pause: Callable[[], Awaitable[None]] | None = None,
    ) -> SyncReport:
        """Loads a version into all servers; the report says which servers serve it and which are lost.

        Waits for the slowest server; every step has a deadline. On cancellation, servers resume if their old weights
        are untouched; otherwise they stay paused.

        Args:
            buckets: the trainer's weights; None loads the version that the transport holds, for late servers.
            previous_version: the servers' current version; restored if no server accepts the new one.
            report: filled in during the sync, for a caller that needs it after an error.
            before_pause: holds new requests, because the pause would queue behind them.

        Raises:
            SyncFailed: if no server has the new version.
        """
        sync = SyncServers(servers, self.timeout_s)
        report = report or SyncReport(weight_version)
        report.lost = sync.lost
        report.previous_version = previous_version
        sync.has_old_weights = not any(server.released for server in servers)  # releasing memory destroys the weights
        is_settled = False
        try:
            await self._load(sync, buckets, report, before_pause)
            is_settled = True
        except WeightSyncError as error:
            is_settled = True
            if sync.has_old_weights and previous_version is not None:
                report.versions |= dict.fromkeys(await _resume_servers(sync), previous_version)
            else:
                await self._roll_back(sync, servers, report, previous_version, str(error))
            raise (SyncUndone if report.versions else SyncFailed)(
                f"Weight version {weight_version} reached no server: {error}. {report.describe()}. Check the servers' "
                "logs. A run that resumes from the last checkpoint loads that checkpoint's weights again.",
                report,
            ) from error
        finally:
            if not is_settled and sync.has_old_weights:
                sync.timeout_s = _LAST_RESUME_S
                await asyncio.shield(_resume_servers(sync))
        return report

    def load_from_thread(
        self, home: HomeLoop, servers: Sequence[Server], buckets: Iterable[Bucket] | None, **settings: Any
    ) -> SyncReport:
        """Runs `load` on the home loop, with buckets that the calling thread gathers; called from another thread.

        A bucket is gathered while the previous one is sent, so at most two are in memory. An error from `buckets` ends
        the sync and is raised.
        """
        loop = home.loop
        feed = BucketFeed(loop, timeout_s=self.timeout_s) if buckets is not None else None

        async def load() -> SyncReport:
            with home.cancelled_with_loop():  # cancelled when the engine closes
                return await self.load(servers, feed, **settings)

        future = asyncio.run_coroutine_threadsafe(load(), loop)
        if feed is not None and buckets is not None:
            future.add_done_callback(lambda done: feed.stop())
            try:
                with feed:
                    for bucket in buckets:
                        if not feed.put(bucket):
                            break  # the sync has failed
            finally:
                with contextlib.suppress(WeightSyncError):
                    wait_while_running(loop, future)
        wait_while_running(loop, future)
        try:
            return future.result()
        except concurrent.futures.CancelledError as error:
            raise loop_ended(loop) from error

    async def _load(
        self,
        sync: SyncServers,
        buckets: AsyncIterator[Bucket] | None,
        report: SyncReport,
        before_pause: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Runs all steps; raises WeightSyncError when no server is left."""
        sync.check_some_left()
        with _time_step(report, "stage"):
            async with self._canaries(sync, report), self._check_all_old_weights(sync, report):
                if buckets is not None:
                    await self.transport.stage(sync, buckets, report.weight_version)
                elif not self.transport.holds(report.weight_version):
                    version = report.weight_version
                    raise WeightSyncError(f"the transport no longer holds weight version {version}; run another sync")
            sync.check_some_left()
        with _time_step(report, "pause"):
            if before_pause is not None:
                await before_pause()
            await self._pause(sync)
            sync.check_some_left()
        with _time_step(report, "load"):
            sync.has_old_weights = False
            report.num_bytes = await self._transfer(sync, buckets, report.weight_version)
        with _time_step(report, "verify"):
            if self.verify:
                report.verified_by = await verify_servers(sync, report.weight_version, self.verifier)
                sync.check_some_left()
        with _time_step(report, "resume"):
            report.versions = dict.fromkeys(await self._resume(sync), report.weight_version)
            sync.check_some_left()

    @contextlib.asynccontextmanager
    async def _canaries(self, sync: SyncServers, report: SyncReport) -> AsyncIterator[None]:
        """Context manager in which servers generate canaries, if they have the previous version."""
        starting: dict[str, asyncio.Task[int]] = {}
        if self.canary is not None and report.previous_version is not None and sync.has_old_weights:
            starting = self.canary.start(sync.left, report.previous_version)
        try:
            yield
        finally:
            if self.canary is not None:
                report.canaries = await self.canary.settle(starting)

    @contextlib.asynccontextmanager
    async def _check_all_old_weights(self, sync: SyncServers, report: SyncReport) -> AsyncIterator[None]:
        """Context manager that runs `_check_old_weights` for all servers; the load then repairs wrong weights."""
        checks: list[asyncio.Task[None]] = []
        version = report.previous_version
        is_known = version is not None and version != report.weight_version and sync.has_old_weights
        if self.verify and self.verifier is not None and is_known:
            checks = [asyncio.ensure_future(self._check_old_weights(server, report)) for server in sync.left]
        try:
            yield
            await asyncio.gather(*checks)  # before the load changes the weights
        finally:
            for check in checks:
                check.cancel()

    async def _check_old_weights(self, server: Server, report: SyncReport) -> None:
        """Warns if a server no longer has the weights of the last load."""
        assert self.verifier is not None
        assert report.previous_version is not None
        with contextlib.suppress(EngineError):  # the load reports the problem
            ranks = await server.client.digests(timeout_s=self.timeout_s)
            check, problem = self.verifier.verify(server, report.previous_version, ranks)
            if check is None:
                log.warning(
                    "The weights of %s changed after the last load: %s. Some tokens tagged with the loaded "
                    "version may come from other weights. The server gets the new version now.",
                    server.url,
                    problem,
                )

    async def _pause(self, sync: SyncServers) -> None:
        await sync.ask(lambda server: server.client.pause(timeout_s=sync.timeout_s))
        await sync.ask(lambda server: server.resume_memory(["weights"]))

    async def _resume(self, sync: SyncServers) -> list[str]:
        await sync.ask(lambda server: server.resume_memory())
        return await _resume_servers(sync)

    async def _transfer(self, sync: SyncServers, buckets: AsyncIterator[Bucket] | None, weight_version: int) -> int:
        """Loads the buckets, or the version that the transport holds, into the paused servers."""
        has_bracket: dict[Server, bool] = {}
        if self.transport.needs_bracket:
            has_bracket = await sync.ask(_begin_update)
            sync.check_some_left()
        if buckets is not None:
            num_bytes = await self.transport.load(sync, buckets, weight_version)
        else:
            num_bytes = await self.transport.load_held(sync, weight_version)
        if self.transport.needs_bracket:

            async def end(server: Server) -> None:
                if has_bracket[server]:
                    await server.client.end_weight_update()

            await sync.ask(end)
        sync.check_some_left()
        return num_bytes

    async def _roll_back(
        self,
        failed: SyncServers,
        servers: Sequence[Server],
        report: SyncReport,
        previous_version: int | None,
        reason: str,
    ) -> None:
        """Loads the previous version into the servers that answer, so that they can continue; the others are lost."""
        for server in list(failed.left):
            failed.lose(server, reason)
        if previous_version is None or not self.transport.holds(previous_version):
            return
        sync = SyncServers([server for server in servers if server not in failed.silent], self.timeout_s)
        with contextlib.suppress(WeightSyncError):
            await self._pause(sync)
            await self._transfer(sync, None, previous_version)
            report.verified_by = await verify_servers(sync, previous_version, self.verifier)
            for url in await self._resume(sync):
                report.versions[url] = previous_version
                report.rolled_back[url] = report.lost.pop(url)


async def _resume_servers(sync: SyncServers) -> list[str]:
    return [server.url for server in await sync.ask(lambda server: server.client.resume(timeout_s=sync.timeout_s))]


async def _begin_update(server: Server) -> bool:
    """Begins a weight update; if the server refuses, first ends the update that a crashed trainer left open."""
    try:
        return await server.client.begin_weight_update()
    except ServerRefused:
        await server.client.end_weight_update()
        return await server.client.begin_weight_update()


@contextlib.contextmanager
def _time_step(report: SyncReport, name: str) -> Iterator[None]:
    measured = span(name, "sync", "weight sync")
    try:
        with measured:
            yield
    finally:
        report.seconds[name] = round(measured.seconds, 6)
