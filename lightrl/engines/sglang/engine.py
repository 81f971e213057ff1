"""SGLangEngine: rollouts by SGLang servers, given by address or started here.

The parts that it is made of:

    generate ─► Writer ──────► Members: pool and clients ◄── fleet or watch: joins, losses, returns
    load_weights ─► Loading ──┘
                       all of it on one event loop, HomeLoop

The loop is the controller's (`attach`, `detach`); without a controller it has one of its own. `start`, `load_weights`,
`score`, `make_room` and `close` are called from other threads and cross over.
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

from lightrl.engines.abilities import LivesOnLoop, NamesDtypes, ScoresTokens, SharesDevices
from lightrl.engines.engine import Completion, RolloutEngine, check_request
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE, addresses_from_environment, as_url
from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.command import usable_token
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.loading import Loading
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.memory import EngineMemory
from lightrl.engines.sglang.open_files import raise_open_files
from lightrl.engines.sglang.pool import ServerPool
from lightrl.engines.sglang.request import RequestPictures
from lightrl.engines.sglang.sync_report import SyncReport
from lightrl.engines.sglang.transports import (
    BroadcastTransport,
    DiskTransport,
    SharedMemoryTransport,
    WeightTransport,
)
from lightrl.engines.sglang.writer import Writer
from lightrl.errors import EngineError
from lightrl.models.pictures import Pictures, data_url, refusal
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, ServerForm, WeightFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.engines.sglang.fleet import ServerFleet

log = logging.getLogger(__name__)

TRANSFER_TIMEOUT_S = 120.0  # of one bucket in a broadcast, where sync_timeout_s allows as much
STOP_GRACE_S = 5.0  # for started servers at the end: they hold nothing that is worth more


class SGLangEngine(RolloutEngine, LivesOnLoop, ScoresTokens, NamesDtypes, SharesDevices):
    """A rollout engine of one or many SGLang servers: token ids in, token ids out, a weight version on each.

    Where the servers are: `urls`; or `servers` of them, started on this machine and restarted when they die; or the
    variable LIGHTRL_SERVER_ADDRS (AREAL_LLM_SERVER_ADDRS is read as well): host:port, with commas between.

    A request goes to the server with the fewest outstanding tokens, a session's turns to the one that has its prefix.
    If a server is lost, hangs or answers with an error of its own (5xx), its requests go on elsewhere with what they
    have; a token is never counted twice. An error in the request (4xx) is raised. If no server is left, the run ends
    with an EngineError that says what became of each.

    Logprobs are those before top-p and top-k, as `Completion` defines them and the trainer recomputes them: SGLang's
    `output_token_logprobs`. With truncated sampling they are not those of the truncated distribution.

    The seed of a request fixes its tokens only where the servers run with `enable_deterministic_inference`.

    Args:
        urls: addresses of servers that run, such as `http://host:30000`.
        servers: how many to start on this machine.
        tp: GPUs of each of these (`tp_size`).
        sglang_python: Python of the environment that has SGLang; where the "sglang" room of the docs looks if None.
        server_args: SGLang's arguments by their own names, such as `{mem_fraction_static: 0.8}`.
        devices: GPUs of the started servers, `tp` for each in turn; None numbers them from 0, or uses none.
        seed: of the started servers; each adds its number.
        token: that the servers ask for; those we start get a random one. None reads LIGHTRL_SERVER_TOKEN.
        transport: how weights travel: `disk`, `distributed` (NCCL, gloo on the CPU) or `tensor` (same host; SGLang
            demands a pickle, see weights/shared_memory.py).
        weight_folder: of the disk transport, seen by trainer and servers; None takes shared memory or a temporary one.
        weights_dtype: that the servers want, such as `bfloat16`; None sends the trainer's own.
        placement: `separate` from the trainer's devices, or `colocated` on them: servers give their memory back while
            the trainer updates. They need `enable_memory_saver: true` for it, and `StalenessControl(0)`.
        interrupt: how requests in flight stop for a sync: `retract` (the server goes on with them) or `abort` (the
            engine asks again with what was written).
        verify_sync: after a sync all servers must acknowledge the version and have the same checksums.
        max_connections: requests in flight per server; more wait here.
        generate_timeout_s: of one request.
        request_timeout_s: of everything else that is quick.
        sync_timeout_s: of each step of a weight sync.
        startup_timeout_s: until a server answers, from its start.
        server_wait_timeout_s: how long a request waits for a server that is being started or synced.
        probe_interval_s: between two looks at each server.
        hang_timeout_s: a server that does not answer for so long is lost.
        max_retries: of a request in a row, without a token in between.
        command: another program for the servers, with `{port}`; for tests.
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
        transport: Literal["disk", "distributed", "tensor"] = "disk",
        weight_folder: str | None = None,
        weights_dtype: str | None = None,
        placement: Literal["separate", "colocated"] = "separate",
        interrupt: Literal["retract", "abort"] = "retract",
        verify_sync: bool = True,
        max_connections: int = 4096,
        generate_timeout_s: float = 3600.0,
        request_timeout_s: float = 60.0,
        sync_timeout_s: float = 600.0,
        startup_timeout_s: float = 900.0,
        server_wait_timeout_s: float = 900.0,
        probe_interval_s: float = 2.0,
        hang_timeout_s: float = 30.0,
        max_retries: int = 8,
        command: Sequence[str] | None = None,
    ) -> None:
        if urls is not None and servers is not None:
            raise ValueError(f"urls={urls} and servers={servers} are both given, expected one of them. Leave one out.")
        if servers is not None and servers < 1:
            raise ValueError(f"servers={servers}, expected at least 1. Raise it, or give urls.")
        if transport not in ("disk", "distributed", "tensor"):
            raise ValueError(f"transport={transport!r}, expected disk, distributed or tensor.")
        if placement not in ("separate", "colocated"):
            raise ValueError(f"placement={placement!r}, expected separate or colocated.")
        if interrupt not in ("retract", "abort"):
            raise ValueError(f"interrupt={interrupt!r}, expected retract or abort.")
        if weights_dtype is not None and not isinstance(getattr(torch, weights_dtype, None), torch.dtype):
            raise ValueError(f"weights_dtype={weights_dtype!r}, expected a torch dtype such as bfloat16, or None.")
        for name, value in (
            ("tp", tp), ("max_connections", max_connections), ("generate_timeout_s", generate_timeout_s),
            ("request_timeout_s", request_timeout_s), ("sync_timeout_s", sync_timeout_s),
            ("startup_timeout_s", startup_timeout_s), ("server_wait_timeout_s", server_wait_timeout_s),
            ("probe_interval_s", probe_interval_s), ("hang_timeout_s", hang_timeout_s),
        ):  # fmt: skip
            if value <= 0:
                raise ValueError(f"{name}={value}, expected more than 0. Raise it.")
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
        self.weight_folder = weight_folder
        self.weights_dtype = weights_dtype
        self.placement = placement
        self.interrupt = interrupt
        self.verify_sync = verify_sync
        self.max_connections = max_connections
        self.generate_timeout_s = generate_timeout_s
        self.request_timeout_s = request_timeout_s
        self.sync_timeout_s = sync_timeout_s
        self.startup_timeout_s = startup_timeout_s
        self.server_wait_timeout_s = server_wait_timeout_s
        self.probe_interval_s = probe_interval_s
        self.hang_timeout_s = hang_timeout_s
        self.max_retries = max_retries
        self.command = list(command) if command is not None else None

        self._home = HomeLoop(self._describe, self._on_new_loop, timeout_s=request_timeout_s)
        self._members: Members | None = None  # these three are of one life, from `start` to the next
        self._writer: Writer | None = None
        self._loading: Loading | None = None
        self._token: str | None = None
        self._vocab_size = 0
        self._pictures: Pictures | None = None  # how the model reads pictures; None if it sees none
        self._max_context: int | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._is_open = False
        self._has_warned = False

    @property
    def last_sync(self) -> SyncReport | None:
        """What became of each server in the last load."""
        return self._loading.last_report if self._loading is not None else None

    @property
    def pool(self) -> ServerPool:
        """The servers and their states; to be changed on the event loop only."""
        return self._members.pool if self._members is not None else ServerPool()

    @property
    def fleet(self) -> ServerFleet | None:
        """The processes of servers that were started here."""
        return self._members.fleet if self._members is not None else None

    # ------------------------------------------------------------------ life

    def start(self, config: PretrainedConfig) -> None:
        """Starts servers or reaches those that run, and waits until all answer.

        Raises:
            ValueError: if there are neither addresses nor a number of servers.
            EngineError: if a server does not get ready.
        """
        if self._is_open:
            raise EngineError("SGLangEngine was started before, expected one start. Close it first.")
        urls = self.urls if self.num_servers is None else None
        if urls is None and self.num_servers is None:
            urls = addresses_from_environment()
        self.weight_version = -1
        text_config = config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        self._max_context = getattr(text_config, "max_position_embeddings", None)
        self._pictures = Pictures.of(config)
        self._token = self.token or os.environ.get(TOKEN_VARIABLE)
        raise_open_files()
        self._scratch = tempfile.TemporaryDirectory(prefix="lightrl-engine-", ignore_cleanup_errors=True)
        members = self._assemble(config)
        self._is_open = True
        try:
            if urls is None:
                members.fleet = self._make_fleet(config, members)
                urls = members.fleet.start()
            for url in urls:
                self._home.call(members.join(as_url(url)), self.request_timeout_s)
            self._home.call(members.reach(), self.startup_timeout_s + self.request_timeout_s)
        except BaseException:
            self.close()
            raise

    async def attach(self) -> None:
        """The engine lives on the running event loop from here on; its connections are made anew."""
        await self._home.move_here(self._leave_loop)

    async def detach(self) -> None:
        """Ends what runs on this event loop, which is about to end."""
        await self._leave_loop()
        self._home.forget()

    def close(self) -> None:
        """Ends the servers that were started here; in-flight requests raise EngineError. May be called twice."""
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
        if self._loading is not None:
            self._loading.close_transport()
        if self._scratch is not None:
            self._scratch.cleanup()

    def queue_depths(self) -> dict[str, int]:
        """Completions that servers write (`running`) and that wait for the gate or a server (`waiting`)."""
        writer = self._writer
        return {"running": writer.num_running if writer else 0, "waiting": writer.num_waiting if writer else 0}

    # ------------------------------------------------------------------ generation

    async def generate(
        self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1, images: tuple[str, ...] = ()
    ) -> list[Completion]:
        """`n` completions of one prompt; see `RolloutEngine`.

        Waits for the servers, `generate_timeout_s` for each request at most. On cancellation the server is told.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, or leaves no room in the context.
            EngineError: if there are no weights yet, no server is left, or a server refuses the request.
        """
        self._check(token_ids, sampling, n)
        pictures = self._request_pictures(images, token_ids) if images else None
        assert self._writer is not None
        try:
            return await self._home.across(self._writer.write(token_ids, sampling, session, n, pictures))
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError("SGLangEngine was closed before the completion was finished.") from None

    async def pause(self) -> None:
        """Requests in flight stop at a token; new ones wait here. Waits for the servers that have any."""
        self._check_open()
        assert self._writer is not None
        await self._home.across(self._writer.pause())

    async def resume(self) -> None:
        """Requests go on."""
        self._check_open()
        assert self._writer is not None
        await self._home.across(self._writer.resume())

    # ------------------------------------------------------------------ weights

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Brings a version to all servers; see `RolloutEngine`.

        Raises:
            WeightSyncError: if the parameters are not those of the first load, or no server has them afterwards.
            EngineError: if no server is left, or the engine is closed.
        """
        self._check_open()
        assert self._loading is not None
        try:
            self._loading.load(buckets, weight_version)
        finally:
            self.weight_version = self._loading.weight_version

    def make_room(self) -> None:
        """Colocated servers give their memory to the trainer until the next load; others do nothing."""
        self._check_open()
        assert self._loading is not None
        self._loading.make_room()

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of each token given those before, 0 for the first; called from another thread.

        Empty where the server gives none. Waits for a server, as a request does.
        """
        self._check_open()
        assert self._writer is not None
        return self._home.call(self._writer.score(token_ids), self.generate_timeout_s)

    def dtypes(self) -> set[str]:
        """Of the weights that are sent, and of the servers as far as `server_args` says."""
        return {self.weights_dtype or "float32", str(self.server_args.get("dtype", "auto"))}

    # ------------------------------------------------------------------ what it is made of

    def _assemble(self, config: PretrainedConfig) -> Members:
        self._members = Members(
            self._home,
            self._make_client,
            lambda url: self._loading.give(url) if self._loading is not None else None,
            request_timeout_s=self.request_timeout_s,
            startup_timeout_s=self.startup_timeout_s,
            probe_interval_s=self.probe_interval_s,
            hang_timeout_s=self.hang_timeout_s,
        )
        self._writer = Writer(
            self._home,
            self._members,
            max_retries=self.max_retries,
            server_wait_timeout_s=self.server_wait_timeout_s,
        )
        self._loading = Loading(
            self._home,
            self._members,
            self._writer,
            self._make_transport(config),
            is_aborting=self.interrupt == "abort",
            memory=EngineMemory() if self.placement == "colocated" else None,
            verify=self.verify_sync,
            request_timeout_s=self.request_timeout_s,
            sync_timeout_s=self.sync_timeout_s,
        )
        return self._members

    def _make_client(self, url: str) -> SGLangClient:
        return SGLangClient(
            url,
            token=self._token,
            request_timeout_s=self.request_timeout_s,
            generate_timeout_s=self.generate_timeout_s,
            max_connections=self.max_connections,
        )

    def _make_transport(self, config: PretrainedConfig) -> WeightTransport:
        dtype = getattr(torch, self.weights_dtype) if self.weights_dtype is not None else None
        form = ServerForm.of(config, dtype)
        if self.transport == "distributed":
            is_cuda = torch.cuda.is_available()
            return BroadcastTransport(
                form,
                backend="nccl" if is_cuda else "gloo",
                device="cuda" if is_cuda else "cpu",
                transfer_timeout_s=min(TRANSFER_TIMEOUT_S, self.sync_timeout_s),
            )
        if self.transport == "tensor":
            return SharedMemoryTransport(form)
        assert self._scratch is not None
        folder = Path(self.weight_folder) if self.weight_folder is not None else Path(self._scratch.name) / "weights"
        return DiskTransport(WeightFolder(folder, config, form=form, is_durable=False))

    def _make_fleet(self, config: PretrainedConfig, members: Members) -> ServerFleet:
        from lightrl.engines.sglang.fleet import ServerFleet
        from lightrl.engines.sglang.server import SGLangServer, write_model_folder

        assert self.num_servers is not None
        assert self._scratch is not None
        folder = write_model_folder(config, Path(self._scratch.name) / "model")
        self._token = usable_token(self._token)
        saver = {"enable_memory_saver": True} if self.placement == "colocated" and torch.cuda.is_available() else {}
        args = {"load_format": "dummy", **saver, **self.server_args}
        if self.tp > 1:
            args = {"tp_size": self.tp, **args}
        num_gpus = torch.cuda.device_count()
        devices = self.devices if self.devices is not None else list(range(num_gpus)) or None
        servers = [
            SGLangServer(
                folder,
                name=f"server {number}",
                python=self.sglang_python,
                token=self._token,
                args=args,
                devices=None if devices is None else devices[number * self.tp : (number + 1) * self.tp],
                seed=self.seed + number,
                command=self.command,
                startup_timeout_s=self.startup_timeout_s,
            )
            for number in range(self.num_servers)
        ]
        return ServerFleet(
            servers,
            on_lost=members.on_lost,
            on_started=members.on_started,
            on_given_up=members.on_given_up,
            silent_s=members.silent_s,
            hang_timeout_s=self.hang_timeout_s,
            probe_interval_s=self.probe_interval_s,
        )

    def _check(self, token_ids: list[int], sampling: Sampling, n: int) -> None:
        self._check_open()
        check_request(token_ids, sampling, n, vocab_size=self._vocab_size, max_context=self._max_context)
        if self.weight_version < 0:
            raise EngineError(
                "SGLangEngine has no weights yet, expected a load before the first request. Call load_weights first."
            )
        if (sampling.top_p < 1 or sampling.top_k > 1) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "top_p=%g and top_k=%d truncate the sampling; behavior logprobs are those before the truncation.",
                sampling.top_p,
                sampling.top_k,
            )

    def _request_pictures(self, images: tuple[str, ...], token_ids: list[int]) -> RequestPictures:
        if self._pictures is None:
            raise ValueError(refusal(len(images)))
        self._pictures.check(images, token_ids)
        prompt = self._pictures.collapsed(token_ids, len(images))
        return RequestPictures(prompt, [data_url(image) for image in images])

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineError("SGLangEngine is closed, expected a started one. Start it, or make a new one.")

    async def _leave_loop(self) -> None:
        """Ends requests, watches and connections."""
        await self._home.end_tasks()
        if self._members is not None:
            await self._members.disconnect()

    def _on_new_loop(self) -> None:
        if self._members is not None:
            self._members.watch_all()

    def _describe(self) -> str:
        return self.pool.describe()
