"""Loading: the trainer's weights, checked, to all servers of an engine, and to one that comes back.

The calling thread holds `lock` during a load; server_sync.py pauses, loads and resumes servers on the home loop. With a
colocated engine, `make_room` gives the servers' memory to the trainer until the next load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from lightrl.engines.abilities import Proof
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.servers.server_process import other_model
from lightrl.engines.sglang.sync.memory import EngineMemory
from lightrl.engines.sglang.sync.report import Fleet, SyncFailed, SyncReport
from lightrl.engines.sglang.sync.server_sync import ServerSync, checksums
from lightrl.engines.sglang.sync.weight_proofs import target_digests
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.engines.sglang.writer import Writer
from lightrl.errors import EngineError, WeightSyncError
from lightrl.weights import Bucket, SharedFolder
from lightrl.weights.rank_share import read_back

if TYPE_CHECKING:
    from transformers import PretrainedConfig

log = logging.getLogger(__name__)


class Loading:
    """Loads weight versions into the servers, and knows which one they have.

    With `is_aborting`, requests in flight return for a load, instead of waiting in the paused server.
    """

    def __init__(
        self,
        home: HomeLoop,
        members: Members,
        writer: Writer,
        sync: ServerSync,
        *,
        timeouts: Timeouts,
        is_aborting: bool = False,
        config: PretrainedConfig | None = None,
    ) -> None:
        self.weight_version = -1  # of all routable servers
        self.last_report: SyncReport | None = None
        self._proofs: dict[str, Proof] = {}  # of the latest load of each server
        self.lock = threading.Lock()  # one load at a time
        # What a server that is back needs besides.
        self.before_admit: Callable[[str], Coroutine[Any, Any, None]] | None = None
        self._home = home
        self._members = members
        self._writer = writer
        self._sync = replace(sync, hold_requests=writer.close_gate, track=home.track)
        self._memory = sync.memory
        self._timeouts = timeouts
        self._is_aborting = is_aborting
        self._config = config  # of the trainer's model; None compares no models
        self._shapes: dict[str, list[int]] | None = None  # of the first load
        self._is_over = False

    def check_models(self) -> None:
        """From another thread: raises EngineError if a server has another model than the trainer."""
        self._home.call(self._check_models(self._members.pool.urls()), self._timeouts.sync_s)

    def load(self, buckets: Iterable[Bucket], weight_version: int) -> None:
        """From the thread that gathers the buckets: loads a version into all servers; returns when they have it."""
        with self.lock:
            limit_s = self._timeouts.server_wait_s + self._timeouts.sync_s + self._timeouts.request_s
            urls, absent = self._home.call(self._begin(), limit_s)
            report: SyncReport | None = None
            try:
                report = self._sync.load_from_thread(
                    self._home.loop,
                    [self._members.clients[url] for url in urls],
                    self._checked(buckets, weight_version, urls),
                    weight_version=weight_version,
                    previous_version=self.weight_version if self.weight_version >= 0 else None,
                    report=SyncReport(weight_version, absent=absent),
                )
                self.weight_version = weight_version
            except SyncFailed as error:
                report = error.report
                raise
            finally:
                self.last_report = report or self.last_report
                self._home.call(self._end(urls, report), self._timeouts.request_s * 2)

    def give(self, url: str) -> None:
        """From a thread: loads the current version into a server that is back, or leaves it to the next load."""
        with self.lock:
            is_due = url in self._members.clients and self.weight_version >= 0 and not self._is_over
            if not is_due or not self._sync.transport.holds(self.weight_version):
                return
            self._home.call(self._check_models([url]), self._timeouts.sync_s)
            # It has released nothing, and the others go on.
            sync = replace(self._sync, memory=None, hold_requests=None)
            clients = [self._members.clients[url]]
            report = sync.load_from_thread(self._home.loop, clients, None, weight_version=self.weight_version)
            if self.before_admit is not None:
                self._home.call(self.before_admit(url), self._timeouts.sync_s)
            self._home.call(self._end([url], report), self._timeouts.request_s)

    def let_go(self, url: str) -> None:
        """From a thread: drains a server that leaves and forgets it, between two loads."""
        with self.lock:
            if url in self._members.clients:
                self._home.call(self._let_go(url), self._timeouts.request_s * 2)

    def proofs(self) -> dict[str, Proof]:
        """How the weights of each routable server were checked."""
        return {url: self._proofs.get(url, "version") for url in self._members.pool.urls("routable")}

    def shared_folder(self) -> SharedFolder | None:
        """Into which all ranks may write; None if the transport takes no files of others."""
        folder = self._sync.transport.shared_folder()
        if folder is None:
            return None
        folder.root.mkdir(parents=True, exist_ok=True)
        dtype = None if folder.form.dtype is None else str(folder.form.dtype).removeprefix("torch.")
        return SharedFolder(str(folder.root), dtype, sorted(folder.form.skip_names), self._timeouts.sync_s)

    def make_room(self) -> None:
        """From another thread: servers release the memory of weights and key-values, until the next load.

        Requests in flight stop at a token and continue after the load.
        """
        if self._memory is not None:
            with self.lock:
                self._home.call(self._make_room(self._memory), self._timeouts.sync_s)

    def close(self) -> None:
        """From another thread: ends loads; colocated servers that outlive the engine get their memory back."""
        self._is_over = True
        if self._memory is not None:
            with contextlib.suppress(EngineError):  # it is their end too, or `lose` has reported it
                self._home.call(self._take_back(self._memory), self._timeouts.request_s)

    def close_transport(self) -> None:
        """After the last load."""
        if self._sync.proofs is not None:
            self._sync.proofs.close()
        closing = threading.Thread(target=asyncio.run, args=(self._sync.transport.close(),), daemon=True)
        closing.start()
        closing.join(self._timeouts.request_s)

    def _checked(self, buckets: Iterable[Bucket], weight_version: int, urls: Sequence[str]) -> Iterator[Bucket]:
        """The buckets; raises if they are not the parameters of the first load, or not finite.

        Their digests are computed meanwhile, those of files that other ranks wrote from the files.
        """
        shapes: dict[str, list[int]] = {}
        proofs = self._sync.proofs if self._sync.verify else None
        digests = proofs.begin(weight_version, urls) if proofs is not None else None
        for bucket in buckets:
            self._check_tensors(bucket, shapes)
            # The last one carries the version: it is sent only if all is right.
            if bucket.is_last and self._shapes is not None and (missing := sorted(set(self._shapes) - set(shapes))):
                raise WeightSyncError(f"Parameters {missing[:4]} are missing; the first load had them.")
            if digests is not None:
                for part in (*read_back(bucket.written), bucket):
                    digests.add(part)
            yield bucket
        self._shapes = shapes

    def _check_tensors(self, bucket: Bucket, shapes: dict[str, list[int]]) -> None:
        """Rejects tensors that the first load did not have; adds the shapes to those of this load."""
        for name, shape in bucket.shapes.items():
            if name in shapes or (self._shapes is not None and self._shapes.get(name) != shape):
                raise WeightSyncError(
                    f"Parameter {name!r} of shape {shape} arrived twice, or was not in the first load in this shape. "
                    "Every load must have the same parameters."
                )
            shapes[name] = shape
        for name, tensor in bucket.tensors.items():  # the ranks that wrote the others have checked them
            if not torch.isfinite(tensor).all():
                raise WeightSyncError(f"Parameter {name!r} has values that are not finite.")

    async def _let_go(self, url: str) -> None:
        self._members.pool.drain(url)
        await self._writer.followers.tell()  # and learn which requests they have there
        await self._members.drain(url)

    async def _begin(self) -> tuple[list[str], dict[str, str]]:
        """The servers that take part, and why the others do not."""
        await self._members.wait_for_any()
        urls = self._members.pool.urls("starting", "routable", "syncing")
        is_known = all(url in self._members.processes for url in urls)
        identifying = asyncio.gather(*(self._identify(url) for url in urls))
        if not is_known:  # else the answer, of a busy scheduler, is needed only for the log
            await identifying
        self._writer.lend(urls)
        await self._writer.followers.tell()  # whether they have a minimum
        if self._is_aborting or self._writer.has_minimum:
            await self._writer.hold(urls, is_aborting=True)
        self._members.is_loading = True
        self._members.pool.sessions.clear()
        return urls, {url: item.reason for url, item in self._members.pool.servers.items() if url not in urls}

    async def _identify(self, url: str) -> None:
        with contextlib.suppress(EngineError):  # the load itself says what is wrong
            if await self._members.identify(url, timeout_s=self._timeouts.request_s):
                log.warning("The server at %s was restarted since the last load; it gets the weights anew.", url)

    async def _check_models(self, urls: Sequence[str]) -> None:
        """Raises EngineError if one of these servers has another model than the trainer's config says."""

        async def check(client: SGLangClient) -> None:
            await self._members.identify(client.url)
            info, answer = await client.model_info(), await checksums(client, self._timeouts.sync_s)
            names = target_digests(answer)[0] if answer is not None else {}
            assert self._config is not None
            problem = other_model(self._config, info, self._members.processes[client.url], names)
            if problem is not None:
                raise EngineError(
                    f"The server at {client.url} has another model: {problem}. Start it with the policy's."
                )

        if self._config is not None:
            await asyncio.gather(*(check(self._members.clients[url]) for url in urls))

    async def _prove_flush(self, url: str, weight_version: int) -> None:
        """After a load: loses a server that kept key-values of the weights before it."""
        canary, client = self._sync.canary, self._members.clients[url]
        problem = await canary.check(client, weight_version) if canary is not None else None
        if problem is not None and self._members.clients.get(url) is client:
            self._members.lose(url, problem)

    async def _end(self, urls: Sequence[str], report: SyncReport | None) -> None:
        self._proofs = {url: proof for url, proof in self._proofs.items() if url in self._members.clients}
        for url in urls:
            self._proofs[url] = report.proofs.get(url, "version") if report is not None else "version"
            if report is not None and url in report.lost:
                self._members.lose(url, report.lost[url])
                if self._memory is not None:
                    self._memory.forget(url)
            elif report is not None and url in report.versions:
                self._members.pool.admit(url, report.versions[url])
            elif self._members.pool.servers[url].state not in ("lost", "restarting"):
                await self._reassess(url)
            if report is None or report.previous_version is None:
                continue
            if url in report.planted and report.versions.get(url) == report.weight_version:
                self._home.spawn(self._prove_flush(url, report.previous_version))
        self._members.is_loading = False
        await self._writer.release(urls)

    async def _reassess(self, url: str) -> None:
        """After an interrupted sync: keeps a server only if it reports the previous version."""
        try:
            info = await self._members.clients[url].model_info()
            await self._members.clients[url].resume()
        except EngineError as error:
            self._members.lose(url, str(error))
            return
        if self.weight_version < 0:
            return
        if str(info.get("weight_version")) == str(self.weight_version):
            self._members.pool.admit(url, self.weight_version)
        else:
            self._members.lose(url, f"it reports version {info.get('weight_version')!r} after an interrupted sync")

    async def _make_room(self, memory: EngineMemory) -> None:
        urls = self._members.pool.urls("routable")
        fleet = Fleet([self._members.clients[url] for url in urls], self._timeouts.sync_s)
        self._writer.lend(urls)
        await self._writer.hold(urls, is_aborting=False)
        await fleet.ask(lambda client: client.pause(timeout_s=fleet.timeout_s))
        await memory.release(fleet.clients, None, fleet.ask)
        for url, reason in fleet.lost.items():
            memory.forget(url)
            self._members.lose(url, reason)

    async def _take_back(self, memory: EngineMemory) -> None:
        urls = [url for url in self._members.pool.urls("routable") if memory.released(url)]
        fleet = Fleet([self._members.clients[url] for url in urls], self._timeouts.request_s)
        await memory.resume(fleet.clients, None, fleet.ask)
        await fleet.ask(lambda client: client.resume())
