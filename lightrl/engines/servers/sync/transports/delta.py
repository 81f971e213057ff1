"""DeltaTransport: sends only the changes, to a receiver on each server host; the servers load the receiver's result."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlencode

from transformers import PretrainedConfig

from lightrl.concurrency.in_thread import in_thread
from lightrl.engines.servers.addresses import RECEIVER_HELP
from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.receiver import PROTOCOL
from lightrl.engines.servers.sync.report import SyncServers
from lightrl.engines.servers.sync.transports.transport import WeightTransport
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable, WeightSyncError
from lightrl.weights import Bucket, ServerForm
from lightrl.weights.delta import DeltaCopy, checksum, full_parts, version_digest
from lightrl.weights.delta_folder import NOTHING, Version
from lightrl.weights.disk import served_config

log = logging.getLogger(__name__)

_IN_FLIGHT = 4  # parts in flight: enough to hide round trips, few enough to limit memory
_POLL_S = 0.2  # interval between requests to a receiver that does not answer

Answer = dict[str, Any]
Answers = dict[str, Answer]  # address → answer, which contains `error` if the receiver failed


class DeltaTransport(WeightTransport):
    """Sends the changes since the last version while the trainer gathers weights and the servers generate.

    A receiver that lacks the last version, at the start or after a failure, gets the whole version. Receivers check the
    digest of the result before a server loads it, so periodic full syncs are not needed. A copy of the model stays in
    the trainer's host memory.
    """

    needs_bracket = False

    def __init__(
        self,
        form: ServerForm,
        config: PretrainedConfig,
        *,
        connect: Callable[[str], Connection],
        receiver_of: Callable[[str], str],
        wait_s: float = 60.0,
    ) -> None:
        self.form = form
        self.copy = DeltaCopy(form)
        self.num_bytes = 0  # bytes sent for the last version
        self._config = served_config(config, form)
        self._connect = connect  # opens the connection to the receiver at an address
        self._receiver_of = receiver_of  # server's address → address of the receiver on its host
        self._wait_s = wait_s  # how long to wait for a receiver that does not answer; it may be restarting
        self._run = secrets.token_hex(8)
        self._version = NOTHING  # the copy's version
        self._previous = NOTHING  # the version that receivers can restore
        self._folders: dict[str, str] = {}  # receiver → its folder with the version to load

    async def stage(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> None:
        base, self._version, self._previous = self._version, NOTHING, NOTHING
        self._folders, self.num_bytes = {}, 0
        self.copy.begin(weight_version)
        async with _Receivers(self._connect, servers.timeout_s) as receivers:
            beginning = asyncio.ensure_future(self._begin_sending(receivers, self._urls(servers), base))
            try:
                async for bucket in buckets:
                    parts, copied = await in_thread(self.copy.take_delta, bucket, bool(base.digest))
                    delta, full = await beginning
                    await delta.send(parts)
                    await full.send(full_parts(copied))
                delta, full = await beginning
            finally:
                beginning.cancel()
            if self.copy.weight_version != weight_version:
                raise WeightSyncError(f"the export of version {weight_version} stopped before its last bucket")
            digest = await in_thread(version_digest, self._run, weight_version, self.copy.checksums)
            self._version, self._previous = Version(self._run, weight_version, digest), base
            await asyncio.gather(*(sending.finish(self._version, self._config) for sending in (delta, full)))
            self._folders = {**delta.folders, **full.folders}
            self.num_bytes = delta.num_bytes + full.num_bytes
            for url, error in delta.errors.items():
                log.warning("The weight receiver %s refused a delta and gets the whole version: %s", url, error)
            await self._supply(servers, receivers, self._version)

    async def _begin_sending(
        self, receivers: _Receivers, urls: Sequence[str], base: Version
    ) -> tuple[_Sending, _Sending]:
        """Begins two uploads: the delta to receivers that have the base, and the whole version to the others."""
        states = await self._states(receivers, urls)
        reached = [url for url, state in states.items() if "error" not in state]
        has_base = [url for url in reached if base.digest and states[url]["digest"] == base.digest]
        delta = _Sending(receivers, has_base, base.digest)
        full = _Sending(receivers, [url for url in reached if url not in has_base], "")
        await asyncio.gather(delta.begin(), full.begin())
        return delta, full

    async def load(self, servers: SyncServers, buckets: AsyncIterator[Bucket], weight_version: int) -> int:
        await servers.ask(lambda server: self._load(server, servers.timeout_s, weight_version))
        return self.num_bytes

    async def load_held(self, servers: SyncServers, weight_version: int) -> int:
        version = self._version if self._version.weight_version == weight_version else self._previous
        self._folders, self.num_bytes = {}, 0
        async with _Receivers(self._connect, servers.timeout_s) as receivers:
            await self._supply(servers, receivers, version)
        await servers.ask(lambda server: self._load(server, servers.timeout_s, weight_version))
        return self.num_bytes

    def holds(self, weight_version: int) -> bool:
        return weight_version in (self._version.weight_version, self._previous.weight_version) and weight_version >= 0

    async def close(self) -> None:
        self.copy.close()

    def _urls(self, servers: SyncServers) -> list[str]:
        return sorted({self._receiver_of(server.url) for server in servers.left})

    async def _load(self, server: Server, timeout_s: float, weight_version: int) -> None:
        folder = self._folders[self._receiver_of(server.url)]
        await server.client.update_weights_from_disk(folder, str(weight_version), timeout_s=timeout_s)

    async def _supply(self, servers: SyncServers, receivers: _Receivers, version: Version) -> None:
        """Sends the version to the receivers that lack it; a server is lost if its receiver does not accept it."""
        urls = [url for url in self._urls(servers) if url not in self._folders]
        states = await self._states(receivers, urls)
        errors = {url: state["error"] for url, state in states.items() if "error" in state}
        for url, state in states.items():
            # A receiver that has applied a later delta restores the version by undoing that delta.
            if url not in errors and version.digest and state["digest"] != version.digest == state["undo"]:
                (state,) = (await receivers.ask([url], "/revert", {"digest": version.digest})).values()
            if state.get("digest") == version.digest:
                self._folders[url] = state["folder"]
        lacking = [url for url in urls if url not in self._folders and url not in errors]
        if lacking and version == self._version:
            full = _Sending(receivers, lacking, "")
            await full.begin()
            for bucket in self.copy.buckets():
                await full.send(full_parts(bucket))
            await full.finish(version, self._config)
            self._folders |= full.folders
            self.num_bytes += full.num_bytes
            errors |= full.errors
        reasons = {url: f"the weight receiver {url}: {errors.get(url, 'it lacks the version')}" for url in urls}
        if not self._folders:  # no server is at fault; all keep their weights
            raise WeightSyncError("; ".join(reasons.values()))
        for server in list(servers.left):
            url = self._receiver_of(server.url)
            if url not in self._folders:
                servers.lose(server, reasons[url])

    async def _states(self, receivers: _Receivers, urls: Sequence[str]) -> Answers:
        """Returns each receiver's state; waits for receivers that do not answer."""
        deadline = time.monotonic() + self._wait_s

        async def ask(url: str) -> Answer:
            while True:
                state = await receivers.state(url)
                if not state.get("is_silent") or time.monotonic() > deadline:
                    return state
                await asyncio.sleep(_POLL_S)

        return dict(zip(urls, await asyncio.gather(*(ask(url) for url in urls)), strict=True))


class _Receivers:
    """Connections to receivers, open inside `async with`."""

    def __init__(self, connect: Callable[[str], Connection], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._make = connect
        self._connections: dict[str, Connection] = {}

    async def __aenter__(self) -> _Receivers:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in self._connections.values():
            await connection.close()

    async def ask(
        self, urls: Sequence[str], path: str, body: dict[str, object] | bytes, fields: dict[str, object] | None = None
    ) -> Answers:
        """Sends the same request to these receivers concurrently."""
        receivers = list(urls)  # a copy, because the caller may remove some during the requests
        query = f"?{urlencode(fields)}" if fields else ""

        async def ask(url: str) -> Answer:
            try:
                answer: Answer = await self._connect(url).request(
                    "POST", f"{path}{query}", body, timeout_s=self.timeout_s, num_retries=0
                )
            except EngineError as error:
                return {"error": str(error)}
            return answer

        return dict(zip(receivers, await asyncio.gather(*map(ask, receivers)), strict=True))

    async def state(self, url: str) -> Answer:
        """Returns a receiver's state, or a dict with `error` and, if nothing answered, `is_silent`."""
        connection = self._connect(url)
        try:
            state: Answer = await connection.request("POST", "/state", {}, num_retries=0)
        except EngineError as error:
            is_silent = isinstance(error, (EngineUnreachable, EngineTimeout))
            return {"error": f"{error} {RECEIVER_HELP}", "is_silent": is_silent}
        if not isinstance(state, dict) or "protocol" not in state:
            return {"error": f"This is not a weight receiver. {RECEIVER_HELP}"}
        if (protocol := state["protocol"]) != PROTOCOL:
            return {"error": f"It uses protocol {protocol}, not {PROTOCOL}. Install the trainer's lightrl there."}
        return state

    def _connect(self, url: str) -> Connection:
        if url not in self._connections:
            self._connections[url] = self._make(url)
        return self._connections[url]


class _Sending:
    """The upload of a version to some receivers, part by part; with a base, only the delta is sent."""

    def __init__(self, receivers: _Receivers, urls: Sequence[str], base: str) -> None:
        self.urls = list(urls)  # receivers that have not failed
        self.errors: dict[str, str] = {}
        self.folders: dict[str, str] = {}  # receiver → its folder, set by `finish`
        self.num_bytes = 0  # sent so far
        self._receivers = receivers
        self._base = base
        self._session = secrets.token_hex(8)
        self._num_parts = 0
        self._in_flight: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        await self._ask("/begin", {"session": self._session, "base": self._base})

    async def send(self, parts: Iterable[bytes]) -> None:
        """Sends the parts; the last ones may still be in flight when it returns."""
        if not self.urls:
            return
        iterator = iter(parts)
        while (part := await in_thread(next, iterator, None)) is not None:
            await self._settle(_IN_FLIGHT - 1)
            fields = {"session": self._session, "index": self._num_parts, "check": await in_thread(checksum, part)}
            self._in_flight.add(asyncio.ensure_future(self._send(part, fields)))
            self._num_parts += 1

    async def finish(self, version: Version, config: dict[str, object]) -> None:
        await self._settle(0)
        body = {"session": self._session, "version": asdict(version), "num_parts": self._num_parts, "config": config}
        answers = await self._ask("/finish", body)
        self.folders = {url: answer["folder"] for url, answer in answers.items() if "error" not in answer}

    async def _settle(self, num_left: int) -> None:
        """Waits until at most `num_left` parts are in flight."""
        while len(self._in_flight) > num_left:
            done, self._in_flight = await asyncio.wait(self._in_flight, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _send(self, part: bytes, fields: dict[str, object]) -> None:
        self.num_bytes += len(part) * len(self.urls)
        await self._ask("/part", part, fields)

    async def _ask(
        self, path: str, body: dict[str, object] | bytes, fields: dict[str, object] | None = None
    ) -> Answers:
        answers = await self._receivers.ask(self.urls, path, body, fields)
        for url, answer in answers.items():
            if "error" in answer:
                self.errors.setdefault(url, answer["error"])
                with contextlib.suppress(ValueError):  # another part has already failed
                    self.urls.remove(url)
        return answers
