"""SGLangEngine: rollouts by SGLang servers, given by address or started here.

Its parts:

    generate ─► Writer ──────► Members: pool and clients ◄── fleet or watch: joins, losses, returns
    load_weights ─► Loading ──┘
                       everything on one event loop, HomeLoop

The loop is the controller's (`attach`, `detach`); without a controller it has one of its own. `start`, `load_weights`,
`score`, `make_room` and `close` are called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightrl.checks.bounds import check_bounds
from lightrl.checks.disk_errors import check_local
from lightrl.concurrency.in_thread import call_all
from lightrl.concurrency.owner import own_prefix
from lightrl.engines.abilities import (
    ContinuesCompletions,
    DropsReplicas,
    LeadsFollowers,
    LivesOnLoop,
    NamesDtypes,
    Proof,
    ProvesWeights,
    ScoresTokens,
    ServesAdapters,
    SharesDevices,
    SharesFolder,
    ShowsServers,
)
from lightrl.engines.engine import Completion, RolloutEngine
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE, addresses_from_environment, as_url
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.connection import Connection
from lightrl.engines.sglang.following import Leader, SGLangFollower
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.open_files import connections_within, raise_open_files
from lightrl.engines.sglang.pool import ServerPool
from lightrl.engines.sglang.routes import check_routes
from lightrl.engines.sglang.servers.command import check_server_args, dtype_of_auto, find_python, usable_token
from lightrl.engines.sglang.servers.own_fleet import fleet_of
from lightrl.engines.sglang.servers.own_gateway import Router
from lightrl.engines.sglang.servers.registry import ServerEntry, registry_at
from lightrl.engines.sglang.sync.cache_canary import CacheCanary
from lightrl.engines.sglang.sync.loading import Loading
from lightrl.engines.sglang.sync.memory import EngineMemory
from lightrl.engines.sglang.sync.receivers import Receivers
from lightrl.engines.sglang.sync.report import SyncReport
from lightrl.engines.sglang.sync.served_adapters import ServedAdapters
from lightrl.engines.sglang.sync.server_sync import ServerSync
from lightrl.engines.sglang.sync.transports import TransportName, make_transport
from lightrl.engines.sglang.sync.weight_proofs import WeightProofs
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.engines.sglang.writer import RequestLimits, Writer
from lightrl.errors import EngineError
from lightrl.models import context_tokens
from lightrl.models.lora import AdapterShape
from lightrl.models.pictures import Pictures
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, ServerForm, SharedFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.engines.sglang.servers.fleet import ServerFleet

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0  # for started servers at the end: they hold nothing that must be saved


class SGLangEngine(
    RolloutEngine,
    ContinuesCompletions,
    LivesOnLoop,
    LeadsFollowers,
    ScoresTokens,
    DropsReplicas,
    NamesDtypes,
    SharesDevices,
    ProvesWeights,
    SharesFolder,
    ServesAdapters,
    ShowsServers,
):
    """A rollout engine of one or many SGLang servers: token ids in, token ids out, a weight version on each.

    Where the servers are: `urls`; or `servers` of them, started on this machine and restarted when they die; or the
    variable LIGHTRL_SERVER_ADDRS (or AREAL_LLM_SERVER_ADDRS): host:port, separated by commas. An address such as
    `file:///shared/servers` is a registry: servers that announce themselves there join and leave amid the run.

    A request goes to the server with the fewest outstanding tokens, a session's turns to the one that has its prefix.
    If a server is lost, hangs or fails (5xx), its requests continue elsewhere with what they have; no token is counted
    twice. An error in the request (4xx) is raised. If no server is left, the EngineError tells what happened to each.

    Logprobs are SGLang's `output_token_logprobs`, with top-p or top-k those within the token's support, as `Completion`
    defines them. The seed of a request determines its tokens only if the servers run with
    `enable_deterministic_inference`.

    Args:
        urls: addresses of running servers, such as `http://host:30000`, or one of a registry.
        servers: how many to start on this machine.
        tp: GPUs of each of these (`tp_size`).
        sglang_python: Python of the environment that has SGLang; for None see docs/serve-with-sglang.md.
        server_args: SGLang's arguments by their own names, such as `{mem_fraction_static: 0.8}`.
        devices: GPUs of the started servers, `tp` for each in turn; None takes those that the trainer does not use, or
            the trainer's if colocated.
        seed: of the started servers; each adds its number.
        token: the servers' API key; those we start get a random one. None reads LIGHTRL_SERVER_TOKEN.
        transport: how weights travel: `disk`, `distributed` (NCCL, gloo on the CPU), `tensor` (same host; SGLang
            demands a pickle, see weights/shared_memory.py), `delta` (only what changed, through `receivers`) or
            `cuda_ipc` (same GPUs; a pickle too, and not run yet).
        router: who chooses the server of a request: `smg` starts SGLang's gateway on this machine (pip install smg), an
            address is that of a running one, for this run alone; None chooses here. All else goes to each server.
        receivers: addresses of the weight receivers of the delta transport, one on each host of `urls`; None reads
            LIGHTRL_RECEIVER_ADDRS. For servers that are started here one is started too.
        weight_folder: of the disk transport, visible to trainer and servers under this path; None takes a temporary
            one of this machine.
        trainer_host: address of this machine that servers elsewhere connect to for `distributed`; None is that of the
            route to them.
        weights_dtype: that the servers need, such as `bfloat16`; None sends the trainer's own.
        placement: `separate` from the trainer's devices, or `colocated` on them: servers release their memory while the
            trainer updates. This needs `enable_memory_saver: true` and `StalenessControl(0)`.
        adapters: with LoRA, `merged` sends whole weights with the adapters in them; `served` sends the base once and
            then only adapters, one per version, which a request keeps until its end; see sync/served_adapters.py.
        interrupt: how requests in flight stop for a sync: `retract` (the server continues them) or `abort` (the engine
            sends them again with what was written). Those with `min_new_tokens` are always aborted.
        verify_sync: compares models at the start, and after a sync each server's version and parameters with the
            trainer's; see docs/serve-with-sglang.md.
        max_connections: concurrent generations per server; more queue here. Fewer if the limit of open files is low.
        timeouts: how long to wait for what.
        probe_interval_s: between two health checks of a server.
        max_retries: of a request in a row, without a token in between.
        command: a program to run instead of SGLang, with `{port}`; for tests.
    """

    probe_every_n_loads = 1

    def __init__(
        self,
        *,
        urls: Sequence[str] | None = None,
        servers: int | None = None,
        tp: int = 1,
        sglang_python: str | None = None,
        server_args: Mapping[str, Any] | None = None,
        devices: Sequence[int] | None = None,
        seed: int = 0,
        token: str | None = None,
        router: str | None = None,
        transport: TransportName = "disk",
        receivers: Sequence[str] | None = None,
        weight_folder: str | None = None,
        trainer_host: str | None = None,
        weights_dtype: str | None = None,
        placement: Literal["separate", "colocated"] = "separate",
        adapters: Literal["merged", "served"] = "merged",
        interrupt: Literal["retract", "abort"] = "retract",
        verify_sync: bool = True,
        max_connections: int = 4096,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
        probe_interval_s: float = 2.0,
        max_retries: int = 8,
        command: Sequence[str] | None = None,
    ) -> None:
        if urls is not None and servers is not None:
            raise ValueError(f"Set urls or servers, not both (urls={urls}, servers={servers}).")
        check_bounds(1, servers=servers, tp=tp, max_connections=max_connections)
        for name, value, choices in (
            ("transport", transport, ("disk", "distributed", "tensor", "delta", "cuda_ipc")),
            ("placement", placement, ("separate", "colocated")),
            ("adapters", adapters, ("merged", "served")),
            ("interrupt", interrupt, ("retract", "abort")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}.")
        if adapters == "served" and placement == "colocated":
            raise ValueError(
                "adapters='served' needs placement='separate': colocated servers give up their base before each "
                "update, so a load of the adapters alone is not enough. Set adapters to merged."
            )
        if weights_dtype is not None and not isinstance(getattr(torch, weights_dtype, None), torch.dtype):
            raise ValueError(f"weights_dtype must be a torch dtype such as bfloat16, or None, got {weights_dtype!r}.")
        if probe_interval_s <= 0:
            raise ValueError(f"probe_interval_s must be > 0 seconds, got {probe_interval_s}.")
        self.weight_version = -1  # that all routable servers have acknowledged
        self.urls = list(urls) if urls is not None else None
        self.num_servers = servers
        self.tp = tp
        self.sglang_python = sglang_python
        self.server_args = dict(server_args or {})
        self.devices = list(devices) if devices is not None else None
        self.trainer_devices: Sequence[torch.device] = ()  # set before `start`
        self.seed = seed
        self.token = token
        self.transport = transport
        self.receivers = list(receivers) if receivers is not None else None
        check_local(weight_folder=weight_folder)
        self.weight_folder = weight_folder
        self.trainer_host = trainer_host
        self.weights_dtype = weights_dtype
        self.placement = placement
        self.adapters: Literal["merged", "served"] = adapters
        self.interrupt = interrupt
        self.verify_sync = verify_sync
        self.max_connections = max_connections
        self._num_connections = max_connections  # within the limit of open files
        self.timeouts = timeouts
        self.probe_interval_s = probe_interval_s
        self.max_retries = max_retries
        self.command = list(command) if command is not None else None

        self._home = HomeLoop(
            lambda: self.pool.describe(),
            lambda: self._members.watch_all() if self._members is not None else None,
            timeout_s=timeouts.request_s,
        )
        self._members: Members | None = None  # these three live from `start` to the next `start`
        self._writer: Writer | None = None
        self._loading: Loading | None = None
        self._expected_adapters: tuple[AdapterShape, int] | None = None  # shape, number of versions
        self._served: ServedAdapters | None = None  # None: the policy is merged
        self._token: str | None = None
        self._config: PretrainedConfig | None = None
        self._limits = RequestLimits(0, None, None)
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._receivers = Receivers()
        self._router = Router(router, adapters=adapters)
        self._is_open = False

    @property
    def last_sync(self) -> SyncReport | None:
        """What happened to each server in the last load."""
        return self._loading.last_report if self._loading is not None else None

    @property
    def pool(self) -> ServerPool:
        """The servers and their states; change it on the event loop only."""
        return self._members.pool if self._members is not None else ServerPool()

    @property
    def fleet(self) -> ServerFleet | None:
        """The processes of servers that were started here."""
        return self._members.fleet if self._members is not None else None

    def expect_adapters(self, shape: AdapterShape, *, num_versions: int) -> None:
        """Servers that are started here get SGLang's arguments for these adapters."""
        self._expected_adapters = (shape, num_versions)

    def needs_base(self) -> bool:
        return self._served is not None and self._served.needs_base

    def check(self) -> None:
        """Raises ValueError if servers cannot be started or reached with these settings on this machine."""
        urls = self._given_urls()
        if urls is None and self.command is None:
            find_python(self.sglang_python)
            check_server_args(self.server_args)
        if urls is None:
            usable_token(self.token or os.environ.get(TOKEN_VARIABLE))
        if registry_at(urls) is None:
            self._check_routes(urls or ())
        if self.transport == "cuda_ipc" and not torch.cuda.is_available():
            raise ValueError("transport='cuda_ipc' needs a GPU, and torch sees none here. Set tensor or disk.")
        self._router.check()

    def _given_urls(self) -> list[str] | None:
        """None if the engine starts its servers."""
        return self.urls if self.urls is not None or self.num_servers is not None else addresses_from_environment()

    def _check_routes(self, urls: Sequence[str]) -> None:
        check_routes(
            [as_url(url) for url in urls],
            transport=self.transport,
            trainer_host=self.trainer_host,
            weight_folder=self.weight_folder,
        )

    def start(self, config: PretrainedConfig) -> None:
        """Starts servers or connects to running ones, and waits until all answer."""
        if self._is_open:
            raise EngineError("SGLangEngine is already started. Close it first.")
        self.check()
        urls = self._given_urls()
        found: list[ServerEntry] = []
        if (registry := registry_at(urls)) is not None:
            found = registry.wait_for_servers(self.timeouts.startup_s)
            urls = [entry.url for entry in found]
            self._check_routes(urls)
        self.weight_version = -1
        text_config = config.get_text_config()
        self._config = config
        self._limits = RequestLimits(int(text_config.vocab_size), context_tokens(config), Pictures.of(config))
        self._token = self.token or os.environ.get(TOKEN_VARIABLE)
        num_servers = len(urls) if urls is not None else self.num_servers or 1
        limit = raise_open_files()
        self._num_connections = min(self.max_connections, connections_within(limit, num_servers))
        if self._num_connections < self.max_connections:
            log.warning(
                "This process may open %d files (ulimit -n, LimitNOFILE), so at most %d requests go to each server at "
                "once instead of max_connections=%d; more queue here.", limit, self._num_connections,
                self.max_connections,
            )  # fmt: skip
        self._scratch = tempfile.TemporaryDirectory(prefix=own_prefix("lightrl-engine-"), ignore_cleanup_errors=True)
        members = _assemble(self, config, Path(self._scratch.name))
        members.registry, members.may_grow = registry, registry is not None
        members.on_found = lambda entry: self._receivers.add(entry.receiver)
        self._home.open()
        self._is_open = True
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if urls is None:
                self._token = usable_token(self._token)
                adapters = self._expected_adapters if self._served is not None else None
                members.fleet = fleet_of(
                    self, config, Path(self._scratch.name) / "model", members, adapters, self._token
                )
                urls = members.fleet.start()
                if self.transport == "delta":
                    self._receivers.start(members.fleet.servers[0].host, self._token)
            elif self.transport == "delta":
                receivers = self.receivers or [entry.receiver for entry in found if entry.receiver] or None
                self._receivers.connect(receivers, [as_url(url) for url in urls])
            self._router.start(members, Path(self._scratch.name), self._token, self.timeouts)
            for url in urls:
                self._home.call(members.join(as_url(url)), self.timeouts.request_s)
            self._home.call(members.reach(), self.timeouts.startup_s + self.timeouts.request_s)
            assert self._loading is not None
            if self.verify_sync:
                self._loading.check_models()
            undo.pop_all()

    async def attach(self) -> None:
        """Moves the engine to the running event loop; it opens new connections there."""
        await self._home.move_here(self._leave_loop)

    async def detach(self) -> None:
        """Ends what runs on this event loop, which is about to end."""
        await self._leave_loop()
        self._home.forget()

    def close(self) -> None:
        """Ends the servers that were started here, and requests in flight; each step whatever the others raise."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        steps: list[Callable[[], object]] = [lambda: self._home.close(lambda: self._leave_loop(for_good=True))]
        if (fleet := self.fleet) is not None:
            steps.append(lambda: fleet.stop(STOP_GRACE_S))
        steps += [self._receivers.stop, self._router.stop]
        if (loading := self._loading) is not None:
            steps = [loading.close, *steps, loading.close_transport]
        if (scratch := self._scratch) is not None:
            steps.append(scratch.cleanup)
        call_all(*steps)

    def queue_depths(self) -> dict[str, int]:
        writer = self._writer
        return {"running": writer.num_running if writer else 0, "waiting": writer.num_waiting if writer else 0}

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        images: tuple[str, ...] = (),
        written: Completion | None = None,
    ) -> list[Completion]:
        """`n` completions of one prompt; waits at most `timeouts.generate_s` for each request to a server."""
        writer = self._open_writer()
        if self.weight_version < 0:
            raise EngineError("SGLangEngine has no weights yet. Call load_weights before the first request.")
        try:
            return await self._home.across(writer.write(token_ids, sampling, session, n, images, written))
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError("SGLangEngine was closed before the completion was finished.") from None

    def leader(self, num_followers: int) -> Leader:
        writer = self._open_writer()
        assert self._members is not None
        assert self._loading is not None
        share = min(self._num_connections, max(1, self.max_connections // num_followers))
        gateway = None if (one := self._members.gateway) is None else (one.url, one.token)
        follower = SGLangFollower(
            self._members.salt, self._token, self.timeouts, share, self.max_retries, self._limits, gateway
        )
        return Leader(self._home, self._members, writer, self._loading, follower)

    async def unfinished(self) -> dict[int, Completion]:
        """Requests in flight are aborted, which is how servers tell what they have, and continue after the pause."""
        return await self._home.across(self._open_writer().unfinished())

    async def pause(self) -> None:
        await self._home.across(self._open_writer().pause())

    async def resume(self) -> None:
        await self._home.across(self._open_writer().resume())

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """By address of each server; waits for the slowest, as a request does."""
        return self._home.call(self._open_writer().score(sequences), self.timeouts.generate_s)

    def drop_replica(self, name: str, reason: str) -> None:
        """The server at this address gets no more requests until it has loaded the weights again."""
        self._open_writer()
        assert self._members is not None
        self._members.on_lost(name, reason)

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Raises WeightSyncError only if no server has the new weights; `last_sync` tells about each server."""
        self._open_writer()
        assert self._loading is not None
        loading = self._served or self._loading
        try:
            loading.load(buckets, weight_version)
        finally:
            self.weight_version = loading.weight_version

    def make_room(self) -> None:
        """Colocated servers give their memory to the trainer until the next load; others do nothing."""
        self._open_writer()
        assert self._loading is not None
        self._loading.make_room()

    def shared_folder(self) -> SharedFolder | None:
        """Of the disk transport."""
        self._open_writer()
        assert self._loading is not None
        return self._loading.shared_folder()

    def dtypes(self) -> set[str]:
        """The dtype of the weights that are sent, unless it is the trainer's, and those of the servers."""
        self._open_writer()
        assert self._members is not None
        servers = self._home.call(self._members.dtypes(), self.timeouts.request_s * 2)
        auto = str(dtype_of_auto(self._config)).removeprefix("torch.")
        sent = {self.weights_dtype} if self.weights_dtype is not None else set()
        return {auto if name == "auto" else name for name in servers} | sent

    def proofs(self) -> dict[str, Proof]:
        """How the last load of each serving server was checked, by address; SGLang has no digests of adapters."""
        proofs = self._loading.proofs() if self._loading is not None else {}
        return proofs if self._served is None else dict.fromkeys(proofs, "version")

    def _open_writer(self) -> Writer:
        if not self._is_open or self._writer is None:
            raise EngineError("SGLangEngine is closed. Start it, or create a new one.")
        return self._writer

    async def _leave_loop(self, *, for_good: bool = False) -> None:
        """Ends requests, watches and connections."""
        try:
            await self._home.end_tasks()
        finally:
            if self._members is not None:
                await self._members.disconnect(for_good=for_good)


def _assemble(engine: SGLangEngine, config: PretrainedConfig, scratch: Path) -> Members:
    folder = Path(engine.weight_folder) if engine.weight_folder is not None else scratch / "weights"
    dtype = getattr(torch, engine.weights_dtype) if engine.weights_dtype is not None else None
    is_aborting = engine.interrupt == "abort"
    members = Members(
        engine._home,
        lambda url: SGLangClient(
            url, token=engine._token, timeouts=engine.timeouts, max_connections=engine._num_connections
        ),
        lambda url: loading.give(url),
        lambda url: loading.let_go(url),
        timeouts=engine.timeouts,
        probe_interval_s=engine.probe_interval_s,
    )
    canary = CacheCanary(
        members.cache_key_of,
        members.page_tokens,
        vocab_size=engine._limits.vocab_size,
        max_context=engine._limits.max_context,
        timeout_s=engine.timeouts.generate_s,
    )
    sync = ServerSync(
        make_transport(
            engine.transport,
            config,
            dtype=dtype,
            folder=folder,
            sync_s=engine.timeouts.sync_s,
            trainer_host=engine.trainer_host,
            connect=lambda url: Connection(url, token=engine._token, timeouts=engine.timeouts),
            receiver_of=engine._receivers.of,
            request_s=engine.timeouts.request_s,
        ),
        timeout_s=engine.timeouts.sync_s,
        verify=engine.verify_sync,
        proofs=WeightProofs(config, ServerForm.of(config, dtype), members.processes, timeout_s=engine.timeouts.sync_s),
        canary=canary if engine.verify_sync else None,
        memory=EngineMemory() if engine.placement == "colocated" else None,
    )
    writer = Writer(
        engine._home,
        members,
        limits=engine._limits,
        timeouts=engine.timeouts,
        max_retries=engine.max_retries,
    )
    loading = Loading(
        engine._home, members, writer, sync, timeouts=engine.timeouts, is_aborting=is_aborting, config=config
    )
    engine._members, engine._writer, engine._loading = members, writer, loading
    engine._served = None
    if engine.adapters == "served" and engine._expected_adapters is not None:
        shape, num_versions = engine._expected_adapters
        writer.adapters = engine._served = ServedAdapters(
            engine._home, members, loading, shape=shape, num_versions=num_versions, form=ServerForm(dtype),
            timeouts=engine.timeouts, is_aborting=is_aborting,
        )  # fmt: skip
    return members
