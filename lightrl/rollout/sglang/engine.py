"""SGLangEngine: rollouts by SGLang servers, given by address or started here.

    generate() ─► gate ─► ServerPool.choose ─► SGLangClient.generate ─► CompletionDraft.add ─► Completion
                 (pause)      │                    │ lost, 5xx, no JSON     │ aborted
                              └────────────────────┴────────────────────────┘ goes on elsewhere, with what was written

It lives on the controller's event loop (`attach`, `detach`); without a controller it has a loop of its own. All state
of the pool belongs to that loop; `start`, `load_weights` and `close` are called from other threads and cross over.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, WeightSyncError
from lightrl.rollout.engine import Completion, RolloutEngine
from lightrl.rollout.loop_thread import LoopThread
from lightrl.rollout.sglang.client import ServerRefused, SGLangClient
from lightrl.rollout.sglang.open_files import raise_open_files
from lightrl.rollout.sglang.pool import ServerPool
from lightrl.rollout.sglang.request import CompletionDraft, MalformedAnswer, read_answer
from lightrl.rollout.sglang.sync import (
    BroadcastTransport,
    DiskTransport,
    SharedMemoryTransport,
    SyncFailed,
    SyncReport,
    WeightTransport,
    load_from_thread,
)
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket, ServerForm, WeightFolder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.rollout.sglang.fleet import ServerFleet

log = logging.getLogger(__name__)
_T = TypeVar("_T")

ADDRESS_VARIABLES = ("LIGHTRL_SERVER_ADDRS", "AREAL_LLM_SERVER_ADDRS")
TOKEN_VARIABLE = "LIGHTRL_SERVER_TOKEN"
ABORT_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 5.0
MAX_REJOINS = 3  # of a server given by address, in a row
_SERVER_ERROR = 500


class SGLangEngine(RolloutEngine):
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
        self.weight_version = -1
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
        self.last_sync: SyncReport | None = None

        self.pool = ServerPool()
        self.clients: dict[str, SGLangClient] = {}
        self._token: str | None = None
        self._vocab_size = 0
        self._max_context = 0
        self._weights: WeightTransport | None = None
        self._shapes: dict[str, torch.Size] | None = None  # of the first load
        self._fleet: ServerFleet | None = None
        self._own_thread: LoopThread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loading = threading.Lock()  # one load at a time
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._is_open = False
        self._is_paused = False
        self._is_held = False  # requests wait for a sync that aborts
        self._num_running = 0  # completions that a server writes
        self._num_waiting = 0  # completions that wait for the gate or for a server
        self._has_warned = False
        self._rejoins: dict[str, int] = {}
        self._tasks: set[asyncio.Task[Any]] = set()  # of the loop: aborts, watches
        self._requests: set[asyncio.Task[Any]] = set()  # in `generate`
        self._changed = asyncio.Event()  # of the pool or the gate; made anew for each loop

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
        self._shapes = None
        self._vocab_size = int(config.vocab_size)
        self._max_context = int(getattr(config, "max_position_embeddings", None) or 2**31 - 1)
        self._token = self.token or os.environ.get(TOKEN_VARIABLE)
        self.pool = ServerPool()
        self.clients = {}
        self._is_open = True
        self._is_paused = self._is_held = False
        raise_open_files()
        self._scratch = tempfile.TemporaryDirectory(prefix="lightrl-engine-", ignore_cleanup_errors=True)
        self._weights = self._make_transport(config)
        try:
            self._enter_own_loop()
            if urls is None:
                urls = self._start_servers(config)
            for url in urls:
                self._call(self._join(url), self.request_timeout_s)
            self._call(self._reach(), self.startup_timeout_s + self.request_timeout_s)
        except BaseException:
            self.close()
            raise

    async def attach(self) -> None:
        """The engine lives on the running event loop from here on; its connections are made anew."""
        loop = asyncio.get_running_loop()
        old, thread = self._loop, self._own_thread
        if old is loop:
            return
        if old is not None and thread is not None:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._leave_loop(), old))
            self._own_thread = None
            await asyncio.to_thread(thread.close, _nothing, self.request_timeout_s)
        self._enter_loop(loop)

    async def detach(self) -> None:
        """Ends what runs on this event loop, which is about to end."""
        await self._leave_loop()
        self._loop = None

    def close(self) -> None:
        """Ends the servers that were started here; in-flight requests raise EngineError. May be called twice."""
        was_open, self._is_open = self._is_open, False
        if not was_open:
            return
        loop, thread = self._loop, self._own_thread
        if loop is not None and loop.is_running():
            with contextlib.suppress(EngineError):
                self._call(self._leave_loop(), self.request_timeout_s)
        self._loop = self._own_thread = None
        if thread is not None:
            thread.close(_nothing, self.request_timeout_s)
        if self._fleet is not None:
            self._fleet.stop()
            self._fleet = None
        if self._weights is not None:
            closing = threading.Thread(target=asyncio.run, args=(self._weights.close(),), daemon=True)
            closing.start()
            closing.join(self.request_timeout_s)
            self._weights = None
        if self._scratch is not None:
            self._scratch.cleanup()

    def queue_depths(self) -> dict[str, int]:
        """Completions that servers write (`running`) and that wait for the gate or a server (`waiting`)."""
        return {"running": self._num_running, "waiting": self._num_waiting}

    # ------------------------------------------------------------------ generation

    async def generate(self, token_ids: list[int], sampling: Sampling, *, session: str, n: int = 1) -> list[Completion]:
        """`n` completions of one prompt; see `RolloutEngine`.

        Waits for the servers, `generate_timeout_s` for each request at most. On cancellation the server is told.

        Raises:
            ValueError: if the prompt is empty, has an id outside the vocabulary, or leaves no room in the context.
            EngineError: if there are no weights yet, no server is left, or a server refuses the request.
        """
        self._check(token_ids, sampling, n)
        running = asyncio.get_running_loop()
        if self._loop is None:
            self._enter_own_loop()
        loop = self._loop
        assert loop is not None
        if running is loop:
            return await self._generate(token_ids, sampling, session, n)
        future = asyncio.run_coroutine_threadsafe(self._generate(token_ids, sampling, session, n), loop)
        return await asyncio.wrap_future(future)

    async def pause(self) -> None:
        """Requests in flight stop at a token; new ones wait here. Waits for the servers that have any."""
        self._check_open()
        await self._on_loop(self._pause())

    async def resume(self) -> None:
        """Requests go on."""
        self._check_open()
        await self._on_loop(self._resume())

    async def _generate(self, token_ids: list[int], sampling: Sampling, session: str, n: int) -> list[Completion]:
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            if n == 1:
                return [await self._write(CompletionDraft(token_ids, sampling), session)]
            drafts = [CompletionDraft(token_ids, sampling, sample) for sample in range(n)]
            writing = [asyncio.ensure_future(self._write(draft, session)) for draft in drafts]
            try:
                return list(await asyncio.gather(*writing))
            finally:
                for one in writing:
                    one.cancel()
        except asyncio.CancelledError:
            if self._is_open:
                raise
            raise EngineError("SGLangEngine was closed before the completion was finished.") from None
        finally:
            self._requests.discard(task)

    async def _write(self, draft: CompletionDraft, session: str) -> Completion:
        """Asks until the completion is finished: again after an abort, elsewhere after a loss."""
        failures = 0
        failed: set[str] = set()
        while draft.finish_reason is None:
            url = await self._find_server(draft, session, failed)
            before = len(draft.token_ids)
            try:
                await self._ask(url, draft)
            except ServerRefused as error:
                if error.status < _SERVER_ERROR:
                    raise
                problem: EngineError = error
            except (EngineUnreachable, EngineTimeout, MalformedAnswer) as error:
                problem = error
                if isinstance(error, EngineTimeout):
                    self._lose(url, str(error))
            else:
                if len(draft.token_ids) > before:
                    failures = 0
                    failed.clear()
                continue
            failures += 1
            failed.add(url)
            if failures > self.max_retries:
                raise EngineError(
                    f"A request failed {failures} times in a row, last with: {problem} Servers: {self.pool.describe()}."
                ) from problem
            if isinstance(problem, EngineUnreachable):
                self._spawn(self._probe(url))
            await asyncio.sleep(min(0.05 * 2**failures, MAX_BACKOFF_S))
        return draft.completion()

    async def _ask(self, url: str, draft: CompletionDraft) -> None:
        rid = secrets.token_hex(16)
        client = self.clients[url]
        server = self.pool.start_request(url, draft.max_tokens)
        self._num_running += 1
        try:
            answer = await client.generate(draft.body(rid), num_retries=0, read=read_answer)
        except asyncio.CancelledError:
            self._spawn(self._abort(client, rid))
            raise
        finally:
            self._num_running -= 1
            self.pool.end_request(server, draft.max_tokens)
        draft.add(answer, url)

    async def _abort(self, client: SGLangClient, rid: str) -> None:
        with contextlib.suppress(EngineError, asyncio.TimeoutError):
            await asyncio.wait_for(client.abort(rid), ABORT_TIMEOUT_S)

    async def _find_server(self, draft: CompletionDraft, session: str, failed: set[str]) -> str:
        """Waits for the gate and for a routable server; whoever changes either wakes it."""
        if not (self._is_paused or self._is_held):
            url = self.pool.choose(session, min_version=draft.last_version, excluded=failed)
            if url is not None:
                return url
        self._num_waiting += 1
        since = time.monotonic()
        try:
            while True:
                if self._is_paused or self._is_held:
                    since = time.monotonic()
                else:
                    url = self.pool.choose(session, min_version=draft.last_version, excluded=failed)
                    if url is not None:
                        return url
                if not self.pool.has_hope():
                    raise EngineError(
                        f"No server is left: {self.pool.describe()}. Look at their logs; a run resumed from the last "
                        "checkpoint goes on where this one ends."
                    )
                if time.monotonic() - since > self.server_wait_timeout_s:
                    raise EngineTimeout(
                        f"A request waited server_wait_timeout_s={self.server_wait_timeout_s:g} for a server, expected "
                        f"one to be routable: {self.pool.describe()}."
                    )
                changed = self._changed
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), 1.0)
        finally:
            self._num_waiting -= 1

    def _check(self, token_ids: list[int], sampling: Sampling, n: int) -> None:
        self._check_open()
        if n < 1:
            raise ValueError(f"n={n}, expected at least 1 completion. Raise it.")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._vocab_size:
            raise ValueError(
                f"The prompt of {len(token_ids)} tokens is empty or has an id outside the vocabulary, expected ids "
                f"from 0 to {self._vocab_size - 1}. Do tokenizer and model belong together?"
            )
        if len(token_ids) + sampling.max_new_tokens > self._max_context:
            raise ValueError(
                f"{len(token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} are more than the "
                f"context of {self._max_context} tokens. Shorten the prompt or lower max_new_tokens."
            )
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

    def _check_open(self) -> None:
        if not self._is_open:
            raise EngineError("SGLangEngine is closed, expected a started one. Start it, or make a new one.")

    # ------------------------------------------------------------------ pause

    async def _pause(self) -> None:
        self._is_paused = True
        if self._num_running:
            await self._pause_servers()

    async def _pause_servers(self) -> None:
        async def pause(url: str) -> None:
            try:
                await self.clients[url].pause("retract")
            except EngineError as error:
                self._lose(url, f"it could not be paused: {error}")

        await asyncio.gather(*(pause(url) for url in self.pool.urls("routable", "syncing")))

    async def _resume(self) -> None:
        async def resume(url: str) -> None:
            try:
                await self.clients[url].resume()
            except EngineError as error:
                self._lose(url, f"it could not be resumed: {error}")

        if self._num_running:
            await asyncio.gather(*(resume(url) for url in self.pool.urls("routable")))
        self._is_paused = False
        self._wake()

    # ------------------------------------------------------------------ weights

    def load_weights(self, buckets: Iterable[Bucket], *, weight_version: int) -> None:
        """Brings a version to all servers; see `RolloutEngine`.

        Raises:
            WeightSyncError: if the parameters are not those of the first load, or no server has them afterwards.
            EngineError: if no server is left, or the engine is closed.
        """
        self._check_open()
        with self._loading:
            self._load(self._checked(buckets), weight_version)

    def _load(self, buckets: Iterable[Bucket], weight_version: int) -> None:
        loop = self._home()
        assert self._weights is not None
        urls = self._call(self._begin_load(), self.sync_timeout_s + self.request_timeout_s)
        report: SyncReport | None = None
        try:
            report = load_from_thread(
                loop,
                [self.clients[url] for url in urls],
                self._weights,
                buckets,
                weight_version=weight_version,
                previous_version=self.weight_version if self.weight_version >= 0 else None,
                timeout_s=self.sync_timeout_s,
                verify=self.verify_sync,
            )
            self.weight_version = weight_version
        except SyncFailed as error:
            report = error.report
            raise
        finally:
            self.last_sync = report or self.last_sync
            self._call(self._end_load(urls, report), self.request_timeout_s * 2)

    async def _begin_load(self) -> list[str]:
        """The servers that take part. With `abort`, returns when requests in flight came back with what they have."""
        urls = self.pool.urls("starting", "routable", "syncing")
        if not urls:
            raise EngineError(f"No server is left to load weights into: {self.pool.describe()}.")
        if self.interrupt == "abort":
            self._is_held = True
            deadline = time.monotonic() + self.sync_timeout_s
            while self._num_running and time.monotonic() < deadline:
                for url in urls:
                    with contextlib.suppress(EngineError):
                        await self.clients[url].abort(abort_all=True)
                await asyncio.sleep(0.01)
        return urls

    async def _end_load(self, urls: Sequence[str], report: SyncReport | None) -> None:
        for url in urls:
            if report is not None and url in report.lost:
                self._lose(url, report.lost[url])
            elif report is not None and url in report.versions:
                self.pool.admit(url, report.versions[url])
            elif self.pool.servers[url].state not in ("lost", "restarting"):
                await self._reassess(url)
        if self._is_paused and self._num_running:
            await self._pause_servers()
        self._is_held = False
        self._wake()

    async def _reassess(self, url: str) -> None:
        """After a sync that was broken off: a server serves on only if it says that it has the version before."""
        try:
            info = await self.clients[url].model_info(timeout_s=self.request_timeout_s)
            await self.clients[url].resume()
        except EngineError as error:
            self._lose(url, str(error))
            return
        if self.weight_version < 0:
            return
        if str(info.get("weight_version")) == str(self.weight_version):
            self.pool.admit(url, self.weight_version)
        else:
            self._lose(url, f"it has version {info.get('weight_version')!r} after a sync that was broken off")

    def _checked(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """The buckets; raises where they are not the parameters of the first load, or hold what is not finite."""
        shapes: dict[str, torch.Size] = {}
        for bucket in buckets:
            for name, tensor in bucket.tensors.items():
                if name in shapes or (self._shapes is not None and self._shapes.get(name) != tensor.shape):
                    raise WeightSyncError(
                        f"Parameter {name!r} of shape {list(tensor.shape)} was given twice, is unknown or has another "
                        "shape than in the first load, expected the same parameters in each."
                    )
                if not torch.isfinite(tensor).all():
                    raise WeightSyncError(f"Parameter {name!r} has values that are not finite, expected finite ones.")
                shapes[name] = tensor.shape
            # The last one carries the version: it goes only when all was right.
            if bucket.is_last and self._shapes is not None and (missing := sorted(set(self._shapes) - set(shapes))):
                raise WeightSyncError(f"Parameters {missing[:4]} are missing, expected all of the first load.")
            yield bucket
        self._shapes = shapes

    def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of each token given those before, 0 for the first; called from another thread.

        Empty where the server gives none.
        """
        return self._call(self._score(token_ids), self.request_timeout_s * 2)

    async def _score(self, token_ids: list[int]) -> list[float]:
        urls = self.pool.urls("routable")
        if not urls:
            raise EngineError(f"No server is left to score with: {self.pool.describe()}.")
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        answer = await self.clients[urls[0]].generate(body, timeout_s=self.request_timeout_s)
        found = answer["meta_info"].get("input_token_logprobs") or []
        return [0.0, *(float(entry[0]) for entry in found[1:])] if len(found) == len(token_ids) else []

    def _make_transport(self, config: PretrainedConfig) -> WeightTransport:
        dtype = getattr(torch, self.weights_dtype) if self.weights_dtype is not None else None
        form = ServerForm.of(config, dtype)
        if self.transport == "distributed":
            is_cuda = torch.cuda.is_available()
            return BroadcastTransport(form, backend="nccl" if is_cuda else "gloo", device="cuda" if is_cuda else "cpu")
        if self.transport == "tensor":
            return SharedMemoryTransport(form)
        assert self._scratch is not None
        folder = Path(self.weight_folder) if self.weight_folder is not None else Path(self._scratch.name) / "weights"
        return DiskTransport(WeightFolder(folder, config, form=form, is_durable=False))

    # ------------------------------------------------------------------ servers

    def _start_servers(self, config: PretrainedConfig) -> list[str]:
        from lightrl.rollout.sglang.fleet import ServerFleet
        from lightrl.rollout.sglang.server import SGLangServer, write_model_folder

        assert self.num_servers is not None
        assert self._scratch is not None
        folder = write_model_folder(config, Path(self._scratch.name) / "model")
        self._token = self._token or secrets.token_urlsafe(32)
        args = {"load_format": "dummy", **self.server_args}
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
        self._fleet = ServerFleet(
            servers,
            on_lost=self._on_lost,
            on_started=self._on_started,
            on_given_up=self._on_given_up,
            hang_timeout_s=self.hang_timeout_s,
            probe_interval_s=self.probe_interval_s,
        )
        return self._fleet.start()

    def _on_lost(self, url: str, reason: str) -> None:
        self._soon(lambda: self._lose(url, reason))

    def _on_given_up(self, url: str, message: str) -> None:
        def give_up() -> None:
            self.pool.lose(url, message, comes_back=False)
            self._wake()

        self._soon(give_up)

    def _on_started(self, url: str) -> None:
        """From the fleet's thread: a server that was started again gets the weights, then requests."""
        for old in self.pool.urls("restarting"):
            if self._fleet is not None and old not in self._fleet.urls:
                self._call(self._forget(old), self.request_timeout_s)
        self._call(self._join(url), self.request_timeout_s)
        self._give_weights(url)

    def _give_weights(self, url: str) -> None:
        """Called from a thread; with no version held, the server waits for the next sync."""
        with self._loading:
            weights = self._weights
            if (
                not self._is_open
                or weights is None
                or self.weight_version < 0
                or not weights.holds(self.weight_version)
            ):
                return
            report = load_from_thread(
                self._home(),
                [self.clients[url]],
                weights,
                None,
                weight_version=self.weight_version,
                timeout_s=self.sync_timeout_s,
                verify=self.verify_sync,
            )
            self._call(self._end_load([url], report), self.request_timeout_s)

    async def _join(self, url: str) -> None:
        url = url if "://" in url else f"http://{url}"
        old = self.clients.get(url)
        if old is not None:
            await old.close()
        self.clients[url] = SGLangClient(
            url,
            token=self._token,
            request_timeout_s=self.request_timeout_s,
            generate_timeout_s=self.generate_timeout_s,
            max_connections=self.max_connections,
        )
        self.pool.join(url)
        if self._fleet is None:
            self._spawn(self._watch(url))

    async def _forget(self, url: str) -> None:
        self.pool.forget(url)
        await self.clients.pop(url).close()

    async def _reach(self) -> None:
        """Waits until every server answers."""

        async def reach(client: SGLangClient) -> None:
            deadline = time.monotonic() + self.startup_timeout_s
            while True:
                try:
                    await client.model_info(timeout_s=min(5.0, self.request_timeout_s), num_retries=0)
                    return
                except ServerRefused as error:
                    if error.status < _SERVER_ERROR or time.monotonic() > deadline:
                        raise
                except EngineError:
                    if time.monotonic() > deadline:
                        raise
                await asyncio.sleep(0.2)

        await asyncio.gather(*(reach(client) for client in self.clients.values()))

    def _lose(self, url: str, reason: str) -> None:
        """On the loop: its requests fail at once and go elsewhere."""
        if self.pool.lose(url, reason, comes_back=self._fleet is not None):
            log.warning("The server at %s is lost: %s", url, reason)
            if self._fleet is not None:
                self._fleet.report(url, reason)
            self._spawn(self.clients[url].close())
        self._wake()

    async def _watch(self, url: str) -> None:
        """Looks at a server given by address now and then, also when it is lost: it may come back."""
        client = self.clients[url]
        answered_at = time.monotonic()
        while self.clients.get(url) is client:
            await asyncio.sleep(self.probe_interval_s)
            state = self.pool.servers[url].state
            try:
                await client.model_info(timeout_s=min(self.hang_timeout_s, self.request_timeout_s), num_retries=0)
            except EngineError as error:
                is_gone = isinstance(error, EngineUnreachable)
                if state != "lost" and (is_gone or time.monotonic() - answered_at >= self.hang_timeout_s):
                    self._lose(url, str(error))
                continue
            answered_at = time.monotonic()
            if state == "routable":
                self._rejoins.pop(url, None)
            elif state == "lost" and self._rejoins.get(url, 0) < MAX_REJOINS and self.pool.urls("routable"):
                self._rejoins[url] = self._rejoins.get(url, 0) + 1
                self.pool.join(url)
                try:
                    await asyncio.to_thread(self._give_weights, url)
                except EngineError as error:
                    self._lose(url, str(error))

    async def _probe(self, url: str) -> None:
        """A request to it failed: is it gone?"""
        client = self.clients.get(url)
        if client is None or self.pool.servers[url].state not in ("routable", "syncing"):
            return
        try:
            await client.model_info(timeout_s=min(self.hang_timeout_s, self.request_timeout_s), num_retries=1)
        except EngineError as error:
            if self.clients.get(url) is client:
                self._lose(url, str(error))

    # ------------------------------------------------------------------ the loop

    def _home(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._enter_own_loop()
        assert self._loop is not None
        return self._loop

    def _enter_own_loop(self) -> None:
        thread = LoopThread(
            loop_timeout_s=self.request_timeout_s, on_exit=lambda error: log.error("A request ended with %r.", error)
        )
        thread.start()
        self._own_thread = thread
        self._enter_loop(thread.loop)

    def _enter_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed = asyncio.Event()
        if self._fleet is None:
            for url in self.clients:
                self._soon(lambda url=url: self._spawn(self._watch(url)))

    async def _leave_loop(self) -> None:
        """Ends requests, watches and connections."""
        me = asyncio.current_task()
        tasks = [task for task in {*self._requests, *self._tasks} if task is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for client in self.clients.values():
            await client.close()

    def _call(self, coroutine: Coroutine[Any, Any, _T], timeout_s: float) -> _T:
        """From another thread: the coroutine's result."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._home())
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError as error:
            future.cancel()
            raise EngineTimeout(
                f"The event loop did not answer SGLangEngine within {timeout_s:g} s. {self.pool.describe()}."
            ) from error

    async def _on_loop(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        loop = self._home()
        if asyncio.get_running_loop() is loop:
            return await coroutine
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))

    def _soon(self, action: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(action)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


def addresses_from_environment() -> list[str]:
    """The addresses in LIGHTRL_SERVER_ADDRS, or in AReaL's variable.

    Raises:
        ValueError: if neither is set.
    """
    for name in ADDRESS_VARIABLES:
        found = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        if found:
            return [part if "://" in part else f"http://{part}" for part in found]
    raise ValueError(
        "SGLangEngine has neither urls nor servers, and LIGHTRL_SERVER_ADDRS is not set, expected one of them. Say "
        "servers: 1 to start one on this machine."
    )


async def _nothing() -> None:
    return None
