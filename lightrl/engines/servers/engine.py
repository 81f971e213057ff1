"""ServerEngine: rollouts on servers, given by address or started here; each kind of server has a subclass.

ServerSource and WeightDelivery hold the settings. `start` makes the other parts; each part uses those above it:

    ServerSource, WeightDelivery   where the servers come from; how weights reach them
    ServerFleet, HomeLoop          the servers' states; the event loop for everything below
    Members, Leader                change the states of servers; let other processes send requests
    RequestLoop                    sends `generate` to a server, and to another if the first one fails
    WeightLoader                   sends `load_weights` to all servers, and verifies the result
    Watch                          handles servers that are lost, return, join or leave

The event loop belongs to the controller (`attach`, `detach`); without a controller, the engine starts a loop. `start`,
`load_weights`, `score`, `release_memory` and `close` are called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import torch
import transformers
from transformers import PretrainedConfig

from lightrl.checks.bounds import check_choice
from lightrl.checks.entry_points import entry_point
from lightrl.concurrency.in_thread import call_all
from lightrl.engines.engine import Completion, PlannedEngine, RolloutEngine, Verification
from lightrl.engines.servers.client import ServerClient
from lightrl.engines.servers.connection import MAX_CONNECTIONS
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.follower import Follower
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.leader import Leader, Traffic
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.servers.request_loop import RequestLimits, RequestLoop
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import ACTIVE
from lightrl.engines.servers.source import ServerSource
from lightrl.engines.servers.sync.delivery import WeightDelivery
from lightrl.engines.servers.sync.loader import WeightLoader
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.served_adapters import AdapterDelivery
from lightrl.engines.servers.sync.transports import BroadcastTransport, TransportName
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.engines.servers.watch import Watch
from lightrl.errors import EngineError
from lightrl.models.routes import route_encoders
from lightrl.models.tuning import Part
from lightrl.trajectory import JsonObject, Sampling
from lightrl.weights import Bucket, SharedFolder, block_fp8


class ServerSettings(TypedDict, total=False):
    """The arguments to ServerEngine: the type of its subclasses' `settings`."""

    urls: Sequence[str] | None
    servers: int | None
    tp: int
    server_args: Mapping[str, Any] | None
    transport: TransportName
    router: str | None
    weight_folder: str | None
    trainer_host: str | None
    placement: Literal["separate", "colocated"]
    adapters: Literal["merged", "served"]
    record_routes: bool | None
    timeouts: Timeouts


class ServerEngine(RolloutEngine):
    """A rollout engine on one or more servers of one kind.

    With `urls`, the engine uses running servers. With `servers`, it starts servers on this machine, and restarts them
    when they die. With neither, it reads addresses (host:port, separated by commas) from LIGHTRL_SERVER_ADDRS or
    AREAL_LLM_SERVER_ADDRS. An address such as `file:///shared/servers` is a registry, which servers join and leave
    during the run. Started servers get the GPUs that the trainer does not use, or the trainer's GPUs if colocated.

    A request goes to the server with the fewest outstanding tokens; later turns of a session go to the server that
    has the prefix in its cache. If a server is lost, hangs or fails (5xx), its requests continue on other servers and
    keep their tokens; no token is counted twice. An error in the request (4xx) is raised. If no server is left, an
    EngineError says what happened to each server.

    Args:
        urls: addresses of running servers, such as `http://host:30000`, or the address of a registry.
        servers: number of servers to start on this machine.
        tp: number of GPUs per started server.
        server_args: arguments for started servers, keyed by the server's argument names.
        transport: how weights are sent: `disk`, `distributed` (NCCL, or gloo on the CPU), `tensor` (same host; uses a
            pickle, see weights/shared_memory.py), `delta` (only the changes, through weight receivers) or `cuda_ipc`
            (same GPUs; also uses a pickle; not tested yet). If all servers report the same dtype, weights have it.
        router: chooses each request's server. `smg` starts SGLang's gateway on this machine (pip install smg); an
            address names a running gateway that no other run uses; None lets the engine choose. Only generations go
            through a gateway.
        weight_folder: folder for the disk transport, which must have the same path on the trainer and the servers; None
            uses a temporary folder on this machine.
        trainer_host: address of this machine that remote servers connect to for `distributed`; None uses the local end
            of the route to them.
        placement: `separate` from the trainer's devices, or `colocated` on them: servers release their memory while the
            trainer updates. This needs `StalenessControl(0)`.
        adapters: with LoRA, `merged` sends the full weights with the adapters merged in; `served` sends the base once
            and then only adapters, and each request keeps its weight version until it ends (sync/served_adapters.py).
        record_routes: whether to record each token's experts for the trainer (models/routes.py). None does so if every
            server can; a server that was not started here needs `enable_return_routed_experts`.
        timeouts: deadlines for starts, requests and weight syncs.
    """

    continues_completions = can_drop_replicas = returns_topk = True
    probe_every_n_loads = 1
    parameter_names = "checkpoint"
    is_quantized: bool = False  # whether the servers' linear weights are in block FP8
    client_type: type[ServerClient]  # set by each subclass
    process_type: type[ModelProcess]
    broadcast_type: type[BroadcastTransport] = BroadcastTransport
    gpu_transports: tuple[TransportName, ...] = ("cuda_ipc",)
    adapter_delivery: type[AdapterDelivery] = AdapterDelivery

    def __init__(
        self,
        *,
        urls: Sequence[str] | None = None,
        servers: int | None = None,
        tp: int = 1,
        server_args: Mapping[str, Any] | None = None,
        transport: TransportName = "disk",
        router: str | None = None,
        weight_folder: str | None = None,
        trainer_host: str | None = None,
        placement: Literal["separate", "colocated"] = "separate",
        adapters: Literal["merged", "served"] = "merged",
        record_routes: bool | None = None,
        timeouts: Timeouts = Timeouts(),  # noqa: B008  # frozen
    ) -> None:
        if adapters == "served" and placement == "colocated":
            raise ValueError(
                "adapters='served' needs placement='separate': colocated servers release the base weights before each "
                "update, so loading only the adapters is not enough. Set adapters to merged."
            )
        self.source = ServerSource(
            client_type=self.client_type,
            process_type=self.process_type,
            urls=list(urls) if urls is not None else None,
            num=servers,
            tp=tp,
            args=dict(server_args or {}),
            placement=placement,
            timeouts=timeouts,
        )
        self.reads_grammars = self.source.num is None or bool({"tokenizer", "tokenizer_path"} & self.source.args.keys())
        check_choice(("merged", "served"), adapters=adapters)
        self.delivery = (self.adapter_delivery if adapters == "served" else WeightDelivery)(
            transport=transport,
            broadcast_type=self.broadcast_type,
            gpu_transports=self.gpu_transports,
            weight_folder=weight_folder,
            trainer_host=trainer_host,
        )
        if router is not None:
            entry_point("gateway").check_setting(router)
            self.delivery.check_loads_whole("router")
        self.router = router
        self.record_routes = record_routes
        self.timeouts = timeouts
        self.fleet = ServerFleet()  # `start` replaces this and the attributes below
        self._home = HomeLoop(self.fleet.describe)
        self._members: Members | None = None
        self._loader: WeightLoader | None = None
        self._is_open = False

    @property
    def last_sync(self) -> SyncReport | None:
        """The outcome of the last load on each server."""
        return self._loader.last_report if self._loader is not None else None

    @property
    def loader(self) -> WeightLoader:
        """The weight loader, which also has the request loop; raises EngineError if the engine is not running."""
        if not self._is_open or self._loader is None:
            raise EngineError(f"{type(self).__name__} is closed. Start it, or create a new one.")
        return self._loader

    @property
    def records_columns(self) -> bool:
        return self.record_routes is not False

    @property
    def is_colocated(self) -> bool:
        return self.source.placement == "colocated"

    def place(self, trainer_devices: Sequence[torch.device]) -> str:
        self.source.trainer_devices = trainer_devices
        return self.source.describe()

    def planned(self, trainer_device: torch.device, num_parameters: int) -> PlannedEngine:
        num = self.source.num or len(self.source.urls or ()) or 1
        name, tp, starts = type(self).__name__, self.source.tp, self.source.urls is None
        return PlannedEngine(name, "servers", num, tp, is_block_fp8=self.is_quantized, starts_servers=starts)

    def expect_policy(self, policy: transformers.PreTrainedModel, *, num_versions: int) -> None:
        self.delivery.expect_policy(policy, num_versions)

    def parts_to_load(self) -> list[Part]:
        return self.delivery.parts_to_load(self.fleet.weight_version)

    def check(self) -> None:
        """Raises ValueError if servers cannot be started or reached with these settings on this machine."""
        self.source.check(self.delivery.check_reach)
        self.delivery.check()
        if self.router is not None:
            entry_point("gateway").check_installed(self.router)

    def start_args(self, columns: Collection[str]) -> dict[str, Any]:
        """Returns the arguments to start servers with, so that they support the settings and return these columns."""
        return {}

    def dtype_of_auto(self, config: PretrainedConfig) -> torch.dtype:
        """Returns the dtype that `auto` means on these servers, for a model with this config."""
        return getattr(config, "dtype", None) or torch.float32

    def start(self, config: PretrainedConfig) -> None:
        """Starts servers or connects to running ones, and waits until all answer."""
        if self._is_open:
            raise EngineError(f"{type(self).__name__} is already started. Close it first.")
        self.check()
        source, timeouts = self.source, self.timeouts
        config = source.process_type.served_config(config, source.args, source.tp)
        self.weight_version = -1
        self._members = self._loader = None
        self.fleet = fleet = ServerFleet()
        self._home = home = HomeLoop(fleet.describe, timeout_s=timeouts.request_s)
        self._is_open = True
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            source.open(
                fleet,
                home,
                config,
                start_args=self.start_args(route_encoders(config, self.record_routes, {})),
                needs_receivers=self.delivery.transport == "delta",
                check_reach=self.delivery.check_reach,
            )
            router = Router(fleet, timeouts=timeouts)
            if self.router is not None:
                router = entry_point("gateway").opened(self.router, source, fleet, timeouts)
            self._members = members = Members(home, fleet, router, timeouts)
            home.call(members.reach_all(), timeouts.startup_s + timeouts.request_s)
            home.call(members.identify_all(), timeouts.request_s * 2)
            self._loader = loader = self._make_loader(config, members)
            if self.should_verify:
                home.call(loader.check_models(fleet.in_state()), timeouts.sync_s)
            home.keep(Watch(home, members, loader, source, timeouts).run)
            undo.pop_all()

    def _make_loader(self, config: PretrainedConfig, members: Members) -> WeightLoader:
        servers = self.fleet.in_state()
        columns_of = {server.url: server.info.returned_columns if server.info else () for server in servers}
        traffic = Traffic()
        requests = RequestLoop(
            members.home,
            members,
            traffic,
            Leader(members.home, members, traffic),
            limits=RequestLimits.of(config, route_encoders(config, self.record_routes, columns_of)),
            timeouts=self.timeouts,
            versions=self.delivery.versions(self.fleet, self.source),
        )
        dtype = members.sent_dtype(self.dtype_of_auto(config))
        return self.delivery.loader(requests, self.source, config, dtype, verify=self.should_verify)

    def check_workers(self, num: int) -> None:
        if isinstance(self.delivery, AdapterDelivery):
            raise ValueError(f"workflow_workers={num} needs adapters='merged'. Set that, or workflow_workers to 0.")

    async def attach(self) -> None:
        await self._home.move_here(self._leave_loop)

    async def detach(self) -> None:
        await self._leave_loop()
        self._home.forget()

    def close(self) -> None:
        """Stops requests in flight and the servers started here; every step runs, even if an earlier one fails."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        loaders = [] if self._loader is None else [self._loader]
        call_all(
            *(loader.close for loader in loaders),
            lambda: self._home.close(lambda: self._leave_loop(for_good=True)),
            self.source.end,
            *(loader.close_transport for loader in loaders),
            self.source.remove_folder,
        )

    async def _leave_loop(self, *, for_good: bool = False) -> None:
        """Stops all tasks (requests and server checks) and closes connections."""
        try:
            await self._home.end_tasks()
        finally:
            if self._members is not None:
                await self._members.disconnect(for_good=for_good)

    def queue_depths(self) -> dict[str, int]:
        traffic = self._loader.requests.traffic if self._loader is not None else Traffic()
        return {"running": traffic.num_running, "waiting": traffic.num_waiting}

    async def generate(self, token_ids: list[int], sampling: Sampling, **request: Any) -> list[Completion]:
        """Implements `RolloutEngine.generate`; waits at most `timeouts.generate_s` for each request to a server."""
        requests = self.loader.requests
        if self.weight_version < 0:
            raise EngineError(f"{type(self).__name__} has no weights yet. Call load_weights before the first request.")
        try:
            return await self._home.run(requests.generate(token_ids, sampling, **request))
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError(f"{type(self).__name__} was closed before the completion finished.") from None

    def open_to_workers(self, num: int) -> tuple[Leader, Follower]:
        """Returns a leader for the controller's loop, and a follower to pickle and open in each worker."""
        requests, source = self.loader.requests, self.source
        return requests.leader, Follower(
            source.client_type,
            self.fleet.salt,
            source.token,
            self.timeouts,
            min(source.num_connections, max(1, MAX_CONNECTIONS // num)),
            requests.limits,
            requests.members.router.for_followers(),
            self.reads_grammars,
        )

    def server_states(self) -> list[JsonObject]:
        return [dataclasses.asdict(server.status()) for server in self.fleet.in_state()]

    async def unfinished(self) -> dict[int, Completion]:
        """Aborts requests in flight, because only then do servers return partial tokens; `resume` continues them."""
        return await self._home.run(self.loader.requests.unfinished())

    async def pause(self) -> None:
        await self._home.run(self.loader.requests.pause())

    async def resume(self) -> None:
        await self._home.run(self.loader.requests.resume())

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Returns logprobs by server address; waits up to `timeouts.generate_s` for the slowest server."""
        return self._home.call(self.loader.requests.score(sequences), self.timeouts.generate_s)

    def drop_replica(self, name: str, reason: str) -> None:
        members, server = self.loader.members, self.fleet.servers.get(name)
        if server is not None:
            self._home.soon(lambda: members.lose(server, reason))

    def verified_by(self) -> dict[str, Verification]:
        return self.loader.verified_by()

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Raises WeightSyncError only if no server loads the weights; `last_sync` has the outcome for each server."""
        loader = self.loader
        try:
            loader.load(buckets, weight_version)
        finally:
            self.weight_version = loader.weight_version

    def release_memory(self) -> None:
        self.loader.release_memory()

    def shared_folder(self) -> SharedFolder | None:
        return self.loader.shared_folder()

    def dtypes(self) -> set[str]:
        config = self.loader.config
        infos = [server.info for server in self.fleet.in_state(*ACTIVE)]
        auto = str(self.dtype_of_auto(config)).removeprefix("torch.")
        names = {auto if info is None or info.computes_in == "auto" else info.computes_in for info in infos} or {auto}
        return names | ({"float8_e4m3fn"} if block_fp8.is_block_fp8(config) else set())
