"""ServerEngine: rollouts on servers, given by address or started here; each kind of server has a subclass.

Its parts, each built from those above it:

    ServerFleet, HomeLoop     the servers, and the event loop of everything below
    Members, Leader           changes of single servers; requests of other processes
    RequestLoop               generate ─► a server, despite failures
    WeightLoader              load_weights ─► all servers, verified
    Watch                     losses, returns, joins

The loop is the controller's (`attach`, `detach`); without a controller the engine runs its own. `start`,
`load_weights`, `score`, `release_memory` and `close` are called from other threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers import PretrainedConfig

from lightrl.checks.bounds import check_bounds, check_choice
from lightrl.checks.entry_points import entry_point
from lightrl.checks.files import check_local
from lightrl.checks.printable import count_text
from lightrl.columns import ROUTES
from lightrl.concurrency.in_thread import call_all
from lightrl.engines.engine import Completion, PlannedEngine, RolloutEngine, Verification
from lightrl.engines.servers.addresses import TOKEN_VARIABLE, addresses_from_environment, as_url, check_routes
from lightrl.engines.servers.client import ServerClient
from lightrl.engines.servers.connection import MAX_CONNECTIONS, Connection, connections_to_each
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.follower import Follower
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.leader import Leader, Traffic
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.processes.command import gpus_of_servers, visible
from lightrl.engines.servers.processes.keeper import keep
from lightrl.engines.servers.processes.model_process import ModelProcess
from lightrl.engines.servers.processes.own_processes import OwnProcesses
from lightrl.engines.servers.processes.process import usable_token
from lightrl.engines.servers.registry import registry_at
from lightrl.engines.servers.request import Encode
from lightrl.engines.servers.request_loop import RequestLimits, RequestLoop, ServedVersions
from lightrl.engines.servers.router import Router
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.adapter_versions import AdapterVersions
from lightrl.engines.servers.sync.cache_canary import CacheCanary
from lightrl.engines.servers.sync.loader import WeightLoader
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.served_adapters import AdapterLoader
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import (
    BroadcastTransport,
    CudaIpcTransport,
    DeltaTransport,
    DiskTransport,
    SharedMemoryTransport,
    TransportName,
    WeightTransport,
)
from lightrl.engines.servers.sync.verification import WeightVerifier
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.engines.servers.watch import Watch
from lightrl.errors import EngineError
from lightrl.models.routes import RouteLayout
from lightrl.models.tuning import Part, ServedForm, tuning_of
from lightrl.trajectory import JsonObject, Sampling
from lightrl.weights import Bucket, ServerForm, SharedFolder, WeightFolder, block_fp8

log = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 120.0  # to broadcast one bucket


@dataclass(frozen=True)
class Parts:
    """Parts of a started engine, each built from those before it."""

    home: HomeLoop
    members: Members
    leader: Leader
    requests: RequestLoop
    loader: WeightLoader


class ServerEngine(RolloutEngine):
    """A rollout engine on one or more servers of one kind.

    The servers are those at `urls`; or `servers` of them, started on this machine and restarted when they die; or, with
    neither, those in LIGHTRL_SERVER_ADDRS (or AREAL_LLM_SERVER_ADDRS): host:port, separated by commas. An address such
    as `file:///shared/servers` is a registry: servers that announce themselves there join and leave during the run.
    Started servers get the GPUs that the trainer does not use, or the trainer's GPUs if colocated.

    A request goes to the server with the fewest outstanding tokens, a session's turns to the one that has its prefix.
    If a server is lost, hangs or fails (5xx), its requests continue on other servers with their tokens so far; no token
    is counted twice. An error in the request (4xx) is raised. If no server is left, the EngineError says what happened
    to each.

    Args:
        urls: addresses of running servers, such as `http://host:30000`, or the address of a registry.
        servers: how many to start on this machine.
        tp: number of GPUs of each started server.
        server_args: arguments for started servers, by the server's own names.
        transport: how weights are sent: `disk`, `distributed` (NCCL, or gloo on the CPU), `tensor` (same host; uses a
            pickle, see weights/shared_memory.py), `delta` (only what changed, through weight receivers) or `cuda_ipc`
            (same GPUs; also a pickle; not tested yet). They are sent in the servers' dtype if all report the same.
        router: chooses the server of a request: `smg` starts SGLang's gateway on this machine (pip install smg); an
            address is that of a running gateway that no other run uses; None lets the engine choose. Only generations
            go through it.
        weight_folder: folder of the disk transport, visible to trainer and servers under this path; None uses a
            temporary folder on this machine.
        trainer_host: address of this machine that remote servers connect to for `distributed`; None uses the one on the
            route to them.
        placement: `separate` from the trainer's devices, or `colocated` on them: servers release their memory while the
            trainer updates. This needs `StalenessControl(0)`.
        adapters: with LoRA, `merged` sends whole weights with the adapters merged in; `served` sends the base once and
            then only adapters, one per version; a request keeps its version until it ends (sync/served_adapters.py).
        record_routes: records the experts of each token, so that the trainer uses the same (models/routes.py). None
            records them for models with experts if every server can: those started here, and others with SGLang's
            `enable_return_routed_experts`.
        timeouts: deadlines.
    """

    continues_completions = can_drop_replicas = True
    probe_every_n_loads = 1
    parameter_names = "checkpoint"
    is_quantized: bool = False  # the servers get linear weights in block FP8
    client_type: type[ServerClient]  # set by each kind
    process_type: type[ModelProcess]
    broadcast_type: type[BroadcastTransport] = BroadcastTransport
    gpu_transports: tuple[TransportName, ...] = ("cuda_ipc",)

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
        if urls is not None and servers is not None:
            raise ValueError(f"Set urls or servers, not both (urls={urls}, servers={servers}).")
        check_bounds(1, servers=servers, tp=tp)
        check_choice(("disk", "distributed", "tensor", "delta", "cuda_ipc"), transport=transport)
        check_choice(("separate", "colocated"), placement=placement)
        check_choice(("merged", "served"), adapters=adapters)
        if adapters == "served" and placement == "colocated":
            raise ValueError(
                "adapters='served' needs placement='separate': colocated servers release their base before each "
                "update, so loading only the adapters is not enough. Set adapters to merged."
            )
        if router is not None:
            entry_point("gateway").check_setting(router)
        check_local(weight_folder=weight_folder)
        self.urls = list(urls) if urls is not None else None
        self.num_servers = servers
        self.tp = tp
        self.python: str | None = None  # of the servers' environment; set by each kind
        self.server_args = dict(server_args or {})
        self.trainer_devices: Sequence[torch.device] = ()  # set before `start`
        self.token: str | None = None  # set before `start`; default: LIGHTRL_SERVER_TOKEN, or random for started ones
        self.transport = transport
        self.router = router
        self.weight_folder = weight_folder
        self.trainer_host = trainer_host
        self.placement = placement
        self.adapters: Literal["merged", "served"] = adapters
        if router is not None:
            self.check_loads_whole("router")
        self.record_routes = record_routes
        self.timeouts = timeouts

        self.fleet = ServerFleet()  # the servers and their states; a new one at each start
        self.served_form: ServedForm | None = None  # with adapters="served": their form on servers
        self._config: PretrainedConfig | None = None  # the servers'
        self._encoders: dict[str, Encode] = {}  # for the further columns to request from servers
        self._token: str | None = None
        self._num_connections = MAX_CONNECTIONS  # to each server, within the limit of open files
        self._receivers = Receivers()
        self._home = HomeLoop(self.fleet.describe)  # this and the next three belong to one start
        self._own: OwnProcesses | None = None
        self._members: Members | None = None
        self._parts: Parts | None = None
        self._is_open = False

    @property
    def last_sync(self) -> SyncReport | None:
        """The outcome of the last load for each server."""
        return self._parts.loader.last_report if self._parts is not None else None

    @property
    def parts(self) -> Parts:
        """The parts of the started engine; raises EngineError if it is closed."""
        if not self._is_open or self._parts is None:
            raise EngineError(f"{type(self).__name__} is closed. Start it, or create a new one.")
        return self._parts

    def gpus(self) -> list[int] | None:
        """Returns torch's indices of the GPUs for servers started here; None if this machine has no GPU.

        Raises:
            ValueError: if there are too few.
        """
        return gpus_of_servers(
            (self.num_servers or 0) * self.tp,
            available=torch.cuda.device_count(),
            trainer=[device.index or 0 for device in self.trainer_devices if device.type == "cuda"],
            placement=self.placement,
        )

    @property
    def records_columns(self) -> bool:
        return self.record_routes is not False

    @property
    def is_colocated(self) -> bool:
        return self.placement == "colocated"

    def place(self, trainer_devices: Sequence[torch.device]) -> str:
        self.trainer_devices = trainer_devices
        if not self.num_servers:
            return "on servers that run elsewhere"
        gpus = self.gpus()
        if gpus is None:  # a plan may be for another machine
            is_for_gpus = any(device.type == "cuda" for device in trainer_devices)
            where = "GPUs, of which this machine has none" if is_for_gpus else "the CPU"
        else:
            where = ", ".join(f"cuda:{gpu}" for gpu in gpus)
        return f"{count_text(self.num_servers, 'server')} with tp={self.tp} on {where}, {self.placement}"

    def planned(self, trainer_device: torch.device, num_parameters: int) -> PlannedEngine:
        num = self.num_servers or len(self.urls or ()) or 1
        return PlannedEngine(type(self).__name__, "servers", num, self.tp, is_block_fp8=self.is_quantized)

    def check_loads_whole(self, setting: str) -> None:
        """Raises ValueError with served adapters, for a setting that needs whole weights in each load."""
        if self.adapters == "served":
            raise ValueError(f"{setting} needs adapters='merged'. Set that, or omit {setting}.")

    def expect_policy(self, policy: transformers.PreTrainedModel, *, num_versions: int) -> None:
        if self.adapters != "served":
            return
        tuning = tuning_of(policy)
        if not tuning.keeps_base:
            raise ValueError("engine.adapters='served' needs a policy with lora. Add lora to it, or set 'merged'.")
        self.served_form = tuning.served_form(policy, num_versions)

    def parts_to_load(self) -> list[Part]:
        if self.served_form is None:
            return super().parts_to_load()
        return ["added"] if self.fleet.weight_version >= 0 else ["added", "base"]  # the fleet's version is the base's

    def check(self) -> None:
        """Raises ValueError if servers cannot be started or reached with these settings on this machine."""
        urls = self._given_urls()
        if urls is None:
            self.process_type.find_python(self.python)
            self.process_type.named(self.server_args)
            usable_token(self.token or os.environ.get(TOKEN_VARIABLE))
        if registry_at(urls) is None:
            self._check_routes(urls or ())
        if self.transport in self.gpu_transports and not torch.cuda.is_available():
            raise ValueError(
                f"transport={self.transport!r} needs a GPU, and torch sees none here. Use another, such as disk."
            )
        if self.router is not None:
            entry_point("gateway").check_installed(self.router)

    def start_args(self) -> dict[str, Any]:
        """Returns arguments for started servers that follow from this engine's settings."""
        return {}

    def dtype_of_auto(self, config: PretrainedConfig | None) -> torch.dtype:
        """Returns the dtype that these servers use for a model of this config if their dtype is `auto`."""
        return getattr(config, "dtype", None) or torch.float32

    def _given_urls(self) -> list[str] | None:
        """Returns the servers' addresses, or None if the engine starts them."""
        return self.urls if self.urls is not None or self.num_servers is not None else addresses_from_environment()

    def _check_routes(self, urls: Sequence[str]) -> None:
        urls = [as_url(url) for url in urls]
        check_routes(urls, transport=self.transport, trainer_host=self.trainer_host, weight_folder=self.weight_folder)

    def start(self, config: PretrainedConfig) -> None:
        """Starts servers or connects to running ones, and waits until all answer."""
        if self._is_open:
            raise EngineError(f"{type(self).__name__} is already started. Close it first.")
        self.check()
        config = self.process_type.served_config(config, self.server_args, self.tp)
        urls = self._given_urls()
        receiver_urls: list[str] = []
        if (registry := registry_at(urls)) is not None:
            entries = registry.wait_for_servers(self.timeouts.startup_s)
            urls = [entry.url for entry in entries]
            receiver_urls = [entry.receiver for entry in entries if entry.receiver]
            self._check_routes(urls)
        urls = None if urls is None else [as_url(url) for url in urls]
        layout = None if self.record_routes is False else RouteLayout.of(config)
        self._encoders = {} if layout is None else {ROUTES.name: layout.encode_sent}
        self._config, self.weight_version = config, -1
        self._members = self._parts = None
        self._token = self.token or os.environ.get(TOKEN_VARIABLE)
        self._num_connections = connections_to_each(len(urls) if urls is not None else self.num_servers or 1)
        self.fleet = fleet = ServerFleet(may_grow=registry is not None)
        self._home = home = HomeLoop(fleet.describe, timeout_s=self.timeouts.request_s)
        self._own = own = OwnProcesses(home)
        self._is_open = True
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if urls is None:
                self._start_servers(config, own)
            else:
                for url in urls:
                    fleet.join(Server(self._client(url)))
                if self.transport == "delta":
                    self._receivers.connect(receiver_urls, urls)
            self._members = members = Members(home, fleet, self._make_router(own), self.timeouts)
            home.call(members.reach_all(), self.timeouts.startup_s + self.timeouts.request_s)
            home.call(members.identify_all(), self.timeouts.request_s * 2)
            self._parts = parts = self._assemble(config, members, own.folder)
            if self.should_verify:
                home.call(parts.loader.check_models(fleet.in_state()), self.timeouts.sync_s)
            watch = Watch(home, members, parts.loader, self._receivers, registry, self._client, self.timeouts)
            home.keep(watch.run)
            undo.pop_all()

    def check_workers(self, num: int) -> None:
        if self.adapters == "served":
            raise ValueError(f"workflow_workers={num} needs adapters='merged'. Set that, or workflow_workers to 0.")

    async def attach(self) -> None:
        """Moves the engine to the running event loop, the controller's; it opens new connections there."""
        await self._home.move_here(self._leave_loop)

    async def detach(self) -> None:
        """Ends the engine's tasks on this event loop, which is about to end."""
        await self._leave_loop()
        self._home.forget()

    def close(self) -> None:
        """Ends requests in flight and the servers that were started here; an error in one step skips no other."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        parts, own = self._parts, self._own
        assert own is not None
        call_all(
            *([] if parts is None else [parts.loader.close]),
            lambda: self._home.close(lambda: self._leave_loop(for_good=True)),
            own.end,
            self._receivers.stop,
            *([] if parts is None else [parts.loader.close_transport]),
            own.remove_folder,
        )

    def queue_depths(self) -> dict[str, int]:
        traffic = self._parts.requests.traffic if self._parts is not None else Traffic()
        return {"running": traffic.num_running, "waiting": traffic.num_waiting}

    async def generate(self, token_ids: list[int], sampling: Sampling, **request: Any) -> list[Completion]:
        """Generates as RolloutEngine says; waits at most `timeouts.generate_s` for each request to a server."""
        requests = self.parts.requests
        if self.weight_version < 0:
            raise EngineError(f"{type(self).__name__} has no weights yet. Call load_weights before the first request.")
        try:
            return await self._home.across(requests.generate(token_ids, sampling, **request))
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError(f"{type(self).__name__} was closed before the completion was finished.") from None

    def open_to_workers(self, num: int) -> tuple[Leader, Follower]:
        """Returns a leader for use on the controller's loop, and a follower to pickle and open in each worker."""
        parts = self.parts
        share = min(self._num_connections, max(1, MAX_CONNECTIONS // num))
        settings = self._token, self.timeouts, share, parts.requests.limits, parts.members.router.for_followers()
        return parts.leader, Follower(self.client_type, self.fleet.salt, *settings)

    def server_states(self) -> list[JsonObject]:
        return [dataclasses.asdict(server.status()) for server in self.fleet.in_state()]

    async def unfinished(self) -> dict[int, Completion]:
        """Aborts requests in flight, since servers return partial tokens only then; they continue after the pause."""
        return await self._home.across(self.parts.requests.unfinished())

    async def pause(self) -> None:
        await self._home.across(self.parts.requests.pause())

    async def resume(self) -> None:
        await self._home.across(self.parts.requests.resume())

    def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Returns logprobs by address of each server; waits for the slowest, as a request does."""
        return self._home.call(self.parts.requests.score(sequences), self.timeouts.generate_s)

    def drop_replica(self, name: str, reason: str) -> None:
        """Sends no more requests to the server at this address until it has loaded the weights again."""
        members, server = self.parts.members, self.fleet.servers.get(name)
        if server is not None:
            self._home.soon(lambda: members.lose(server, reason))

    def verified_by(self) -> dict[str, Verification]:
        """Returns the check by address of each routable server; adapters have no digests."""
        routable = self.fleet.in_state("routable")
        return {server.url: server.verified_by if self.served_form is None else "version" for server in routable}

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Raises WeightSyncError only if no server has the new weights; `last_sync` says what happened to each."""
        loader = self.parts.loader
        try:
            loader.load(buckets, weight_version)
        finally:
            self.weight_version = loader.weight_version

    def release_memory(self) -> None:
        """Makes colocated servers release their memory until the next load; does nothing for others."""
        self.parts.loader.release_memory()

    def shared_folder(self) -> SharedFolder | None:
        return self.parts.loader.shared_folder()

    def dtypes(self) -> set[str]:
        names = self._home.call(self.parts.members.dtypes(), self.timeouts.request_s * 2)
        auto = str(self.dtype_of_auto(self._config)).removeprefix("torch.")
        quantized = {"float8_e4m3fn"} if self._config is not None and block_fp8.is_block_fp8(self._config) else set()
        return {auto if name == "auto" else name for name in names} | quantized

    def _client(self, url: str) -> ServerClient:
        return self.client_type(url, token=self._token, timeouts=self.timeouts, max_connections=self._num_connections)

    def _start_servers(self, config: PretrainedConfig, own: OwnProcesses) -> None:
        """Starts servers without weights on this machine, and a weight receiver for the delta transport."""
        assert self.num_servers is not None
        self._token = usable_token(self._token)
        gpus = self.gpus()
        processes = own.start_servers(
            self.process_type,
            self.num_servers,
            config,
            args={"load_format": "dummy", **self.start_args(), **self.server_args},
            python=self.python,
            tp=self.tp,
            devices=None if gpus is None else visible(gpus),
            token=self._token,
            startup_timeout_s=self.timeouts.startup_s,
        )
        for process in processes:
            self.fleet.join(Server(self._client(process.url), process))
        if self.transport == "delta":
            receiver = self._receivers.start(processes[0].host, self._token)
            self._home.keep(functools.partial(keep, receiver))

    def _make_router(self, own: OwnProcesses) -> Router:
        if self.router is None:
            return Router(self.fleet, timeouts=self.timeouts)
        gateway: Router
        gateway, process = entry_point("gateway").opened(self.router, self._token, self.fleet, self.timeouts)
        if process is not None:
            own.keep(process, self.timeouts.hang_s)
        return gateway

    def _assemble(self, config: PretrainedConfig, members: Members, folder: Path) -> Parts:
        home, timeouts, fleet = self._home, self.timeouts, self.fleet
        limits = RequestLimits.of(config, self._encoders_of_servers())
        dtype = members.sent_dtype(self.dtype_of_auto(config))
        form = ServerForm.of(config, dtype)
        canary = CacheCanary(
            fleet, vocab_size=limits.vocab_size, max_context=limits.max_context, timeout_s=timeouts.generate_s
        )
        sync = ServerSync(
            self._make_transport(config, form, folder),
            timeout_s=timeouts.sync_s,
            verify=self.should_verify,
            verifier=WeightVerifier(config, form, timeout_s=timeouts.sync_s),
            canary=canary if self.should_verify else None,
        )
        versions = ServedVersions()
        make: Callable[..., WeightLoader] = WeightLoader
        if self.served_form is not None:
            versions = AdapterVersions(fleet, self.served_form, timeout_s=timeouts.sync_s)
            make = functools.partial(AdapterLoader, versions=versions, form=ServerForm(dtype))
        traffic = Traffic()
        leader = Leader(home, members, traffic)
        requests = RequestLoop(home, members, traffic, leader, limits=limits, timeouts=timeouts, versions=versions)
        used = {"home": home, "members": members, "requests": requests, "sync": sync, "timeouts": timeouts}
        return Parts(home, members, leader, requests, make(**used, config=config, is_colocated=self.is_colocated))

    def _make_transport(self, config: PretrainedConfig, form: ServerForm, folder: Path) -> WeightTransport:
        if self.transport == "distributed":
            device = "cuda" if torch.cuda.is_available() else "cpu"
            timeout_s = min(TRANSFER_TIMEOUT_S, self.timeouts.sync_s)
            return self.broadcast_type(
                form, device=device, transfer_timeout_s=timeout_s, trainer_host=self.trainer_host
            )
        if self.transport == "cuda_ipc":
            return CudaIpcTransport(form)
        if self.transport == "tensor":
            return SharedMemoryTransport(form)
        if self.transport == "delta":
            connect = functools.partial(Connection, token=self._token, timeouts=self.timeouts)
            receiver_of, wait_s = self._receivers.of, self.timeouts.request_s
            return DeltaTransport(form, config, connect=connect, receiver_of=receiver_of, wait_s=wait_s)
        return DiskTransport(WeightFolder(Path(self.weight_folder or folder / "weights"), config, form=form))

    def _encoders_of_servers(self) -> dict[str, Encode]:
        """Returns encoders of the further columns to ask for: those wanted that every server returns.

        Raises:
            ValueError: if `record_routes` is true, and the model has no experts or a server does not return them.
        """
        infos = [(server.url, server.info) for server in self.fleet.in_state()]
        without = [url for url, info in infos if info is None or ROUTES.name not in info.returned_columns]
        if self.record_routes and not self._encoders:
            raise ValueError("record_routes is true, but the model has no experts. Omit record_routes.")
        if self.record_routes and without:
            raise ValueError(
                f"record_routes is true, but {without[0]} does not return the experts of tokens. Start it "
                "with SGLang's enable_return_routed_experts, or omit record_routes."
            )
        if self._encoders and without:
            log.warning(
                "The trainer's router chooses the experts of each token, since %s does not return them. SGLang "
                "returns them if it was started with enable_return_routed_experts.",
                without[0],
            )
        return {} if without else self._encoders

    async def _leave_loop(self, *, for_good: bool = False) -> None:
        """Ends requests, watches and connections."""
        try:
            await self._home.end_tasks()
        finally:
            if self._members is not None:
                await self._members.disconnect(for_good=for_good)
