"""WeightLoader: checks the trainer's weights and loads them into all servers, or into a single server that returns.

The calling thread holds a lock during a load; server_sync.py pauses, loads and resumes servers on the home loop. In a
colocated engine, `release_memory` frees the servers' memory for the trainer until the next load.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from transformers import PretrainedConfig

from lightrl.engines.engine import Verification
from lightrl.engines.servers.client import other_model
from lightrl.engines.servers.connection import NO_ANSWER
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.request_loop import RequestLoop
from lightrl.engines.servers.server import ACTIVE, Server
from lightrl.engines.servers.sync.report import SyncFailed, SyncReport, SyncServers
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.verification import ParameterCheck
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError
from lightrl.weights import Bucket, ServerForm, SharedFolder
from lightrl.weights.disk import read_back

log = logging.getLogger(__name__)


@dataclass(eq=False, kw_only=True)
class WeightLoader:
    """Loads weight versions into the servers; the fleet records which version they have."""

    home: HomeLoop
    members: Members
    requests: RequestLoop
    sync: ServerSync
    timeouts: Timeouts
    config: PretrainedConfig  # describes the servers' model
    dtype: torch.dtype | None = None  # dtype of the weights that are sent; None means the trainer's dtype
    is_colocated: bool = False  # whether the servers release memory for the trainer between loads
    last_report: SyncReport | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)  # one load at a time
    _parameters: ParameterCheck = field(default_factory=ParameterCheck)
    _refused: set[Server] = field(default_factory=set)  # started without a required argument; excluded from loads
    _is_over: bool = False

    @property
    def fleet(self) -> ServerFleet:
        return self.members.fleet

    @property
    def weight_version(self) -> int:
        """The weight version on all routable servers."""
        return self.fleet.weight_version

    def verified_by(self) -> dict[str, Verification]:
        """Returns which check each routable server's weights passed, keyed by address."""
        return {server.url: server.verified_by for server in self.fleet.in_state("routable")}

    def load(self, buckets: Iterable[Bucket], weight_version: int) -> None:
        """Loads a version into all servers and waits for them; called from the thread that gathers the buckets."""
        with self._lock:
            limit_s = self.timeouts.server_wait_s + self.timeouts.sync_s + self.timeouts.request_s
            servers, absent = self.home.call(self._prepare_load(), limit_s)
            previous = self.fleet.weight_version
            self.fleet.newest_version = weight_version
            report: SyncReport | None = None
            try:
                report = self.sync.load_from_thread(
                    self.home,
                    servers,
                    self._check(buckets, weight_version, servers),
                    weight_version=weight_version,
                    previous_version=previous if previous >= 0 else None,
                    report=SyncReport(weight_version, absent=absent),
                    before_pause=partial(self.requests.hold, servers),
                )
                self.fleet.weight_version = weight_version
            except SyncFailed as error:
                report = error.report
                raise
            finally:
                self.last_report = report or self.last_report
                self.home.call(self._finish_load(servers, report), self.timeouts.request_s * 2)

    def give(self, server: Server) -> None:
        """Loads the current version, if the transport has it, into a returning server; called from a thread."""
        with self._lock:
            version = self.fleet.weight_version
            is_due = self.fleet.has(server) and version >= 0 and not self._is_over
            if not is_due or not self.sync.transport.holds(version):
                return
            self.home.call(self.check_models([server]), self.timeouts.sync_s)
            report = self.sync.load_from_thread(self.home, [server], None, weight_version=version)
            self.home.call(self._before_admit(server), self.timeouts.sync_s)
            self.home.call(self._finish_load([server], report), self.timeouts.request_s)

    def remove(self, server: Server) -> None:
        """Drains and forgets a leaving server, after any load in progress; called from a thread."""
        with self._lock:
            if self.fleet.has(server):
                self.home.call(self._remove(server), self.timeouts.request_s * 2)

    def shared_folder(self) -> SharedFolder | None:
        """Returns the folder that all ranks may write to; None if the transport cannot use files from other ranks."""
        folder = self.sync.transport.shared_folder()
        if folder is None:
            return None
        folder.root.mkdir(parents=True, exist_ok=True)
        form = folder.form
        dtype = None if form.dtype is None else str(form.dtype).removeprefix("torch.")
        return SharedFolder(str(folder.root), dtype, sorted(form.skip_names), self.timeouts.sync_s, form.is_block_fp8)

    def release_memory(self) -> None:
        """Makes colocated servers release their memory until the next load; called from another thread.

        Requests in flight stop between tokens and continue after the load.
        """
        if self.is_colocated:
            with self._lock:
                self.home.call(self._release_memory(), self.timeouts.sync_s)

    def close(self) -> None:
        """Stops loads; colocated servers that outlive the engine allocate memory again. Called from another thread."""
        self._is_over = True
        if self.is_colocated:
            with contextlib.suppress(EngineError):  # the servers are stopping too, or `lose` has reported them
                self.home.call(self._resume_memory(), self.timeouts.request_s)

    def close_transport(self) -> None:
        """Closes the verifier and the transport; called after the last load."""
        if self.sync.verifier is not None:
            self.sync.verifier.close()
        closing = threading.Thread(target=asyncio.run, args=(self.sync.transport.close(),), daemon=True)
        closing.start()
        closing.join(self.timeouts.request_s)

    def _check(self, buckets: Iterable[Bucket], weight_version: int, servers: Sequence[Server]) -> Iterator[Bucket]:
        """Checks the buckets and yields them in the servers' format, quantized if necessary.

        Also computes digests of the buckets, and of files that other ranks wrote, after reading them back.
        """
        form = ServerForm.of(self.config)
        verifier = self.sync.verifier if self.sync.verify else None
        digests = verifier.begin(weight_version, servers) if verifier is not None else None
        for bucket in self._parameters.checked(buckets):
            bucket = form.quantized(bucket)
            if digests is not None:
                for part in (*read_back(bucket.files), bucket):
                    digests.add(part)
            yield bucket
            if form.is_block_fp8:
                bucket.tensors.clear()  # frees the quantized copy before the next bucket is made

    async def _remove(self, server: Server) -> None:
        self.fleet.drain(server)
        await self.requests.leader.notify()  # also updates the request counts from followers
        await self.members.drain(server)

    async def _prepare_load(self) -> tuple[list[Server], dict[str, str]]:
        """Returns the servers to load, and for each other server's address, the reason why the load omits it."""
        await self.members.wait_for_any()
        servers = self.fleet.in_state(*ACTIVE)
        is_known = all(server.info is not None for server in servers)
        identifying = asyncio.gather(*(self._identify(server) for server in servers))
        if not is_known:  # if all are known, the load need not wait for this
            await identifying
            servers = [server for server in servers if server not in self._refused]
        self.requests.leave_to_load(servers)
        self.fleet.is_loading = True
        self.fleet.sessions.clear()
        return servers, {server.url: server.reason for server in self.fleet.in_state() if server not in servers}

    async def _before_admit(self, server: Server) -> None:
        """Loads anything that a returning server needs besides the weights; by default, nothing."""

    async def _identify(self, server: Server) -> None:
        """Updates `info`; a known server that now lacks a required argument is lost, and excluded from loads."""
        is_known = server.info is not None
        self._refused.discard(server)
        try:
            if await server.identify(timeout_s=self.timeouts.request_s):
                log.warning("Server %s was restarted after the last load. It gets the weights again.", server.url)
        except NO_ANSWER:
            pass  # the load reports the problem
        except EngineError as error:  # the server was started without arguments that rollouts need
            if not is_known:
                raise
            self._refused.add(server)
            self.members.lose(server, str(error))

    async def check_models(self, servers: Sequence[Server]) -> None:
        """Raises EngineError if a server's model differs from the trainer's."""

        async def check(server: Server) -> None:
            await server.identify()
            self._refused.discard(server)
            model_info = await server.client.model_info()
            ranks = await server.client.digests(timeout_s=self.timeouts.sync_s)
            names = ranks[0] if ranks is not None else {}
            assert server.info is not None
            problem = other_model(self.config, model_info, server.info, names)
            if problem is not None:
                raise EngineError(
                    f"The server at {server.url} has a different model: {problem}. Start it with the policy's model."
                )

        await asyncio.gather(*(check(server) for server in servers))

    async def _check_flush(self, server: Server, weight_version: int) -> None:
        """Marks a server as lost if the canary shows that the load did not empty its prefix cache."""
        canary = self.sync.canary
        problem = await canary.check(server, weight_version) if canary is not None else None
        if problem is not None:
            self.members.lose(server, problem)

    async def _finish_load(self, servers: Sequence[Server], report: SyncReport | None) -> None:
        """Updates each server's state after a load (no `report` if it was interrupted); lets requests continue."""
        for server in [server for server in servers if server not in self._refused]:  # `give` checks those again
            url = server.url
            server.verified_by = report.verified_by.get(url, "version") if report is not None else "version"
            if report is not None and url in report.lost:
                self.members.lose(server, report.lost[url])
            elif report is not None and url in report.versions:
                self.fleet.admit(server, report.versions[url])
            elif server.state not in ("lost", "restarting"):
                await self._reassess(server)
            if report is None or report.previous_version is None:
                continue
            if url in report.canaries and report.versions.get(url) == report.weight_version:
                self.home.spawn(self._check_flush(server, report.previous_version))
        self.fleet.is_loading = False
        await self.requests.release(servers)

    async def _reassess(self, server: Server) -> None:
        """After an interrupted sync, admits a server that reports the previous version, and marks others as lost."""
        version = self.fleet.weight_version
        try:
            info = await server.client.model_info()
            await server.client.resume()
        except EngineError as error:
            self.members.lose(server, str(error))
            return
        if version < 0:  # no version was loaded before
            return
        if str(info.get("weight_version")) == str(version):
            self.fleet.admit(server, version)
        else:
            self.members.lose(server, f"it reports version {info.get('weight_version')!r} after an interrupted sync")

    async def _release_memory(self) -> None:
        routable = self.fleet.in_state("routable")
        servers = SyncServers(routable, self.timeouts.sync_s)
        self.requests.leave_to_load(routable)
        await self.requests.hold(routable)
        await servers.ask(lambda server: server.client.pause(timeout_s=servers.timeout_s))
        await servers.ask(lambda server: server.release_memory())
        self._lose_failed(routable, servers)

    async def _resume_memory(self) -> None:
        released = [server for server in self.fleet.in_state("routable") if server.released]
        servers = SyncServers(released, self.timeouts.request_s)
        await servers.ask(lambda server: server.resume_memory())
        await servers.ask(lambda server: server.client.resume())

    def _lose_failed(self, candidates: Iterable[Server], servers: SyncServers) -> None:
        for server in candidates:
            if server.url in servers.lost:
                self.members.lose(server, servers.lost[server.url])
