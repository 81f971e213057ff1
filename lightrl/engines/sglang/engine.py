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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lightrl.checks.bounds import check_bounds
from lightrl.engines.abilities import LivesOnLoop, NamesDtypes, ScoresTokens, SharesDevices
from lightrl.engines.engine import Completion, RolloutEngine, check_request
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE, addresses_from_environment, as_url
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.command import usable_token
from lightrl.engines.sglang.connection import Connection
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.loading import Loading
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.memory import EngineMemory
from lightrl.engines.sglang.open_files import raise_open_files
from lightrl.engines.sglang.pool import ServerPool
from lightrl.engines.sglang.receivers import Receivers
from lightrl.engines.sglang.request import RequestPictures
from lightrl.engines.sglang.sync import ServerSync
from lightrl.engines.sglang.sync_report import SyncReport
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.engines.sglang.transports import TransportName, make_transport
from lightrl.engines.sglang.writer import Writer
from lightrl.errors import EngineError
from lightrl.models.pictures import Pictures, data_url, refusal
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.engines.sglang.fleet import ServerFleet

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0  # for started servers at the end: they hold nothing that must be saved


class SGLangEngine(RolloutEngine, LivesOnLoop, ScoresTokens, NamesDtypes, SharesDevices):
    """A rollout engine of one or many SGLang servers: token ids in, token ids out, a weight version on each.

    Where the servers are: `urls`; or `servers` of them, started on this machine and restarted when they die; or the
    variable LIGHTRL_SERVER_ADDRS (or AREAL_LLM_SERVER_ADDRS): host:port, separated by commas.

    A request goes to the server with the fewest outstanding tokens, a session's turns to the one that has its prefix.
    If a server is lost, hangs or fails (5xx), its requests continue elsewhere with what they have; no token is counted
    twice. An error in the request (4xx) is raised. If no server is left, the EngineError tells what happened to each.

    Logprobs are SGLang's `output_token_logprobs`: those before top-p and top-k, as `Completion` defines them. The seed
    of a request determines its tokens only if the servers run with `enable_deterministic_inference`.

    Args:
        urls: addresses of running servers, such as `http://host:30000`.
        servers: how many to start on this machine.
        tp: GPUs of each of these (`tp_size`).
        sglang_python: Python of the environment that has SGLang; for None see docs/serve-with-sglang.md.
        server_args: SGLang's arguments by their own names, such as `{mem_fraction_static: 0.8}`.
        devices: GPUs of the started servers, `tp` for each in turn; None numbers them from 0, or uses none.
        seed: of the started servers; each adds its number.
        token: the servers' API key; those we start get a random one. None reads LIGHTRL_SERVER_TOKEN.
        transport: how weights travel: `disk`, `distributed` (NCCL, gloo on the CPU), `tensor` (same host; SGLang
            demands a pickle, see weights/shared_memory.py) or `delta` (only what changed, through `receivers`).
        receivers: addresses of the weight receivers of the delta transport, one on each host of `urls`; None reads
            LIGHTRL_RECEIVER_ADDRS. For servers that are started here one is started too.
        weight_folder: of the disk transport, visible to trainer and servers; None takes a temporary one.
        weights_dtype: that the servers need, such as `bfloat16`; None sends the trainer's own.
        placement: `separate` from the trainer's devices, or `colocated` on them: servers release their memory while the
            trainer updates. This needs `enable_memory_saver: true` and `StalenessControl(0)`.
        interrupt: how requests in flight stop for a sync: `retract` (the server continues them) or `abort` (the engine
            sends them again with what was written).
        verify_sync: after a sync all servers must report the version and have the same checksums.
        max_connections: concurrent generations per server; more queue here.
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
        transport: TransportName = "disk",
        receivers: Sequence[str] | None = None,
        weight_folder: str | None = None,
        weights_dtype: str | None = None,
        placement: Literal["separate", "colocated"] = "separate",
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
            ("transport", transport, ("disk", "distributed", "tensor", "delta")),
            ("placement", placement, ("separate", "colocated")),
            ("interrupt", interrupt, ("retract", "abort")),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be {', '.join(choices[:-1])} or {choices[-1]}, got {value!r}.")
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
        self.seed = seed
        self.token = token
        self.transport = transport
        self.receivers = list(receivers) if receivers is not None else None
        self.weight_folder = weight_folder
        self.weights_dtype = weights_dtype
        self.placement = placement
        self.interrupt = interrupt
        self.verify_sync = verify_sync
        self.max_connections = max_connections
        self.timeouts = timeouts
        self.probe_interval_s = probe_interval_s
        self.max_retries = max_retries
        self.command = list(command) if command is not None else None

        self._home = HomeLoop(lambda: self.pool.describe(), self._on_new_loop, timeout_s=timeouts.request_s)
        self._members: Members | None = None  # these three live from `start` to the next `start`
        self._writer: Writer | None = None
        self._loading: Loading | None = None
        self._token: str | None = None
        self._vocab_size = 0
        self._max_context: int | None = None
        self._pictures: Pictures | None = None  # how the model reads pictures; None if it takes none
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._receivers = Receivers()
        self._is_open = False
        self._has_warned = False

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

    def start(self, config: PretrainedConfig) -> None:
        """Starts servers or connects to running ones, and waits until all answer."""
        if self._is_open:
            raise EngineError("SGLangEngine is already started. Close it first.")
        urls = self.urls if self.urls is not None or self.num_servers is not None else addresses_from_environment()
        self.weight_version = -1
        text_config = config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        self._max_context = getattr(text_config, "max_position_embeddings", None)
        self._pictures = Pictures.of(config)
        self._token = self.token or os.environ.get(TOKEN_VARIABLE)
        raise_open_files()
        self._scratch = tempfile.TemporaryDirectory(prefix="lightrl-engine-", ignore_cleanup_errors=True)
        members = self._assemble(config, Path(self._scratch.name))
        self._is_open = True
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            if urls is None:
                members.fleet = self._make_fleet(config, Path(self._scratch.name), members)
                urls = members.fleet.start()
                if self.transport == "delta":
                    self._receivers.start(members.fleet.servers[0].host, self._token)
            elif self.transport == "delta":
                self._receivers.connect(self.receivers, [as_url(url) for url in urls])
            for url in urls:
                self._home.call(members.join(as_url(url)), self.timeouts.request_s)
            self._home.call(members.reach(), self.timeouts.startup_s + self.timeouts.request_s)
            undo.pop_all()

    async def attach(self) -> None:
        """Moves the engine to the running event loop; it opens new connections there."""
        await self._home.move_here(self._leave_loop)

    async def detach(self) -> None:
        """Ends what runs on this event loop, which is about to end."""
        await self._leave_loop()
        self._home.forget()

    def close(self) -> None:
        """Ends the servers that were started here, and requests in flight."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        fleet = self.fleet
        if self._loading is not None:
            with contextlib.suppress(EngineError):
                self._loading.close()
        self._home.close(self._leave_loop)
        if fleet is not None:
            fleet.stop(STOP_GRACE_S)
        self._receivers.stop()
        if self._loading is not None:
            self._loading.close_transport()
        if self._scratch is not None:
            self._scratch.cleanup()

    def queue_depths(self) -> dict[str, int]:
        writer = self._writer
        return {"running": writer.num_running if writer else 0, "waiting": writer.num_waiting if writer else 0}

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, images: tuple[str, ...] = ()
    ) -> list[Completion]:
        """`n` completions of one prompt; waits at most `timeouts.generate_s` for each request to a server."""
        writer = self._open_writer()
        check_request(token_ids, sampling, n, vocab_size=self._vocab_size, max_context=self._max_context)
        if self.weight_version < 0:
            raise EngineError("SGLangEngine has no weights yet. Call load_weights before the first request.")
        if (sampling.top_p < 1 or sampling.top_k > 1) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "top_p=%g and top_k=%d truncate the sampling; behavior logprobs are those before the truncation.",
                sampling.top_p,
                sampling.top_k,
            )
        pictures = self._request_pictures(images, token_ids) if images else None
        try:
            return await self._home.across(writer.write(token_ids, sampling, session, n, pictures))
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError("SGLangEngine was closed before the completion was finished.") from None

    async def pause(self) -> None:
        await self._home.across(self._open_writer().pause())

    async def resume(self) -> None:
        await self._home.across(self._open_writer().resume())

    def score(self, token_ids: list[int]) -> list[float]:
        """Waits for a server, as a request does; empty if the server gives no logprobs."""
        return self._home.call(self._open_writer().score(token_ids), self.timeouts.generate_s)

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Raises WeightSyncError only if no server has the new weights; `last_sync` tells about each server."""
        self._open_writer()
        assert self._loading is not None
        try:
            self._loading.load(buckets, weight_version)
        finally:
            self.weight_version = self._loading.weight_version

    def make_room(self) -> None:
        """Colocated servers give their memory to the trainer until the next load; others do nothing."""
        self._open_writer()
        assert self._loading is not None
        self._loading.make_room()

    def dtypes(self) -> set[str]:
        """The dtypes of the weights that are sent, and of the servers as far as `server_args` tells."""
        return {self.weights_dtype or "float32", str(self.server_args.get("dtype", "auto"))}

    def _assemble(self, config: PretrainedConfig, scratch: Path) -> Members:
        folder = Path(self.weight_folder) if self.weight_folder is not None else scratch / "weights"
        dtype = getattr(torch, self.weights_dtype) if self.weights_dtype is not None else None
        sync = ServerSync(
            make_transport(
                self.transport,
                config,
                dtype=dtype,
                folder=folder,
                sync_s=self.timeouts.sync_s,
                connect=lambda url: Connection(url, token=self._token, timeouts=self.timeouts),
                receiver_of=self._receivers.of,
                request_s=self.timeouts.request_s,
            ),
            timeout_s=self.timeouts.sync_s,
            verify=self.verify_sync,
            memory=EngineMemory() if self.placement == "colocated" else None,
        )
        members = Members(
            self._home,
            lambda url: SGLangClient(
                url, token=self._token, timeouts=self.timeouts, max_connections=self.max_connections
            ),
            lambda url: loading.give(url),
            timeouts=self.timeouts,
            probe_interval_s=self.probe_interval_s,
        )
        writer = Writer(self._home, members, timeouts=self.timeouts, max_retries=self.max_retries)
        loading = Loading(
            self._home, members, writer, sync, timeouts=self.timeouts, is_aborting=self.interrupt == "abort"
        )
        self._members, self._writer, self._loading = members, writer, loading
        return members

    def _make_fleet(self, config: PretrainedConfig, scratch: Path, members: Members) -> ServerFleet:
        from lightrl.engines.sglang.fleet import ServerFleet
        from lightrl.engines.sglang.server import make_servers, write_model_folder

        assert self.num_servers is not None
        self._token = usable_token(self._token)
        saver = {"enable_memory_saver": True} if self.placement == "colocated" and torch.cuda.is_available() else {}
        devices = self.devices if self.devices is not None else list(range(torch.cuda.device_count())) or None
        servers = make_servers(
            write_model_folder(config, scratch / "model"),
            self.num_servers,
            tp=self.tp,
            devices=devices,
            seed=self.seed,
            args={"load_format": "dummy", **saver, **self.server_args},
            python=self.sglang_python,
            token=self._token,
            command=self.command,
            startup_timeout_s=self.timeouts.startup_s,
        )
        return ServerFleet(
            servers,
            on_lost=members.on_lost,
            on_started=members.on_started,
            on_given_up=members.on_given_up,
            silent_s=members.silent_s,
            hang_timeout_s=self.timeouts.hang_s,
            probe_interval_s=self.probe_interval_s,
        )

    def _request_pictures(self, images: tuple[str, ...], token_ids: list[int]) -> RequestPictures:
        if self._pictures is None:
            raise ValueError(refusal(len(images)))
        self._pictures.check(images, token_ids)
        prompt = self._pictures.collapsed(token_ids, len(images))
        return RequestPictures(prompt, [data_url(image) for image in images])

    def _open_writer(self) -> Writer:
        if not self._is_open or self._writer is None:
            raise EngineError("SGLangEngine is closed. Start it, or create a new one.")
        return self._writer

    async def _leave_loop(self) -> None:
        """Ends requests, watches and connections."""
        await self._home.end_tasks()
        if self._members is not None:
            await self._members.disconnect()

    def _on_new_loop(self) -> None:
        if self._members is not None:
            self._members.watch_all()
