"""RequestLoop: generates completions request by request; chooses servers, handles failures and waits during a pause.

    generate() ─► gate ─► ServerFleet.choose ─► ServerClient.generate ─► CompletionDraft.add ─► Completion
                 (pause)      │                    │ lost, 5xx, not JSON    │ aborted
                              └────────────────────┴────────────────────────┘ continues elsewhere with its tokens

Everything runs on the home loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack

from transformers import PretrainedConfig

from lightrl.engines.engine import Completion, check_request
from lightrl.engines.servers.client import ABORT_TIMEOUT_S, abort_at
from lightrl.engines.servers.connection import MAX_BACKOFF_S, OutOfFiles, ServerRefused
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.home_loop import HomeLoop
from lightrl.engines.servers.leader import Leader, Traffic
from lightrl.engines.servers.members import Members
from lightrl.engines.servers.request import CompletionDraft, Encode, MalformedAnswer, NamedVersion
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable
from lightrl.models import Attachments, context_tokens
from lightrl.trace import span
from lightrl.trajectory import Attached, Sampling

log = logging.getLogger(__name__)

_REPEATED = (ServerRefused, EngineUnreachable, EngineTimeout, MalformedAnswer, OutOfFiles)
MAX_RETRIES = 8  # how many times in a row a request may fail without generating a token


@dataclass
class _Failures:
    """The failures of a request since its last token."""

    num: int = 0
    servers: set[Server] = field(default_factory=set)
    busy_since: float | None = None  # monotonic time; refusals by busy servers do not count in `num`


@dataclass(frozen=True)
class RequestLimits:
    """The inputs that the servers' model accepts, and the columns that it returns."""

    vocab_size: int
    max_context: int | None  # maximum tokens in prompt and completion together
    attachments: Callable[..., Attachments | None]  # prepares a prompt's inputs other than token ids
    encoders: Mapping[str, Encode] = field(default_factory=dict)  # encoders for the columns to request, except supports

    @classmethod
    def of(cls, config: PretrainedConfig, encoders: Mapping[str, Encode]) -> RequestLimits:
        vocab_size = int(config.get_text_config().vocab_size)
        return cls(vocab_size, context_tokens(config), Attachments.for_model(config), encoders)


class ServedVersions:
    """Chooses the weights that a request uses; this base class is for servers that hold a single version."""

    def choose(self, started_with: NamedVersion | None) -> NamedVersion | None:
        """Returns the version for the next request of a completion that started with `started_with`."""
        return None

    def used(self, named: NamedVersion | None, rid: str, server: Server) -> contextlib.AbstractContextManager[None]:
        """Returns a context manager inside which the version counts as used by this request."""
        return contextlib.nullcontext()

    def min_version(self, draft: CompletionDraft) -> int:
        """Returns the oldest weight version at which a server may continue the completion."""
        return draft.last_version

    def is_missing(self, server: Server, error: EngineError) -> bool:
        """Whether the server refused a request because it lacks the version."""
        return False


@dataclass(eq=False)
class RequestLoop:
    """Generates completions while the gate (see Traffic) is open."""

    home: HomeLoop
    members: Members
    traffic: Traffic
    leader: Leader  # if it has followers, only they send requests, and `traffic` counts theirs
    limits: RequestLimits
    timeouts: Timeouts
    versions: ServedVersions = field(default_factory=ServedVersions)
    _paused: set[Server] = field(default_factory=set)  # servers that `pause` paused and that are still paused
    _at_load: set[Server] = field(default_factory=set)  # servers that a running load pauses and resumes
    _drafts: dict[int, CompletionDraft] = field(default_factory=dict)  # for `unfinished`: seed → completion with n = 1

    @property
    def fleet(self) -> ServerFleet:
        return self.members.fleet

    async def generate(
        self,
        token_ids: list[int],
        sampling: Sampling,
        *,
        session: str,
        n: int = 1,
        started: Completion | None = None,
        **attached: Unpack[Attached],
    ) -> list[Completion]:
        """Implements `RolloutEngine.generate`; a cancellation aborts the requests on the servers."""
        limits = self.limits
        check_request(token_ids, sampling, n, vocab_size=limits.vocab_size, max_context=limits.max_context)
        shared: dict[str, Any] = {"vocab_size": limits.vocab_size, "encoders": limits.encoders}
        shared["attachments"] = limits.attachments(token_ids, **attached)
        with self.home.cancelled_with_loop():
            if n == 1:
                draft = CompletionDraft(token_ids, sampling, **shared)
                if started is not None:
                    draft.start_with(started)
                self._drafts[sampling.seed] = draft
                try:
                    return [await self._generate(draft, session)]
                finally:
                    self._drafts.pop(sampling.seed, None)
            drafts = [CompletionDraft(token_ids, sampling, sample, **shared) for sample in range(n)]
            tasks = [asyncio.ensure_future(self._generate(draft, session)) for draft in drafts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    async def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Implements `RolloutEngine.score`; omits servers that are lost in the meantime."""
        with self.home.cancelled_with_loop():
            while True:
                await self._find_server("probe", set())
                servers = self.fleet.in_state("routable")
                answers = await asyncio.gather(*(self._logprobs_of(server, sequences) for server in servers))
                if any(answers):
                    return {server.url: rows for server, rows in zip(servers, answers, strict=True) if rows is not None}

    async def _logprobs_of(self, server: Server, sequences: list[list[int]]) -> list[list[float]] | None:
        """Returns the sequences' logprobs from this server; None if it is lost."""
        failures = _Failures()
        while self.fleet.has(server) and server.state == "routable":
            try:
                named = self.versions.choose(None)
                name = None if named is None else named.name
                requests = (server.client.logprobs(token_ids, weights=name) for token_ids in sequences)
                return list(await asyncio.gather(*requests))
            except EngineError as error:
                await self._wait_to_retry(server, error, failures)
        return None

    async def pause(self) -> None:
        """Stops requests in flight between tokens and makes new ones wait; returns when the servers have paused."""
        self.traffic.is_paused = True
        await self.leader.notify()
        if self.traffic.num_running:
            await self._pause_servers()

    async def unfinished(self) -> dict[int, Completion]:
        """Returns the unfinished completions with n = 1, keyed by seed; call it while requests are paused.

        A server returns tokens only when a request ends, so this aborts the requests; `resume` sends them again.
        """
        paused, self._paused = self._paused, set()
        for server in paused & set(self.fleet.in_state("routable")):
            await server.client.resume()
        await self._abort_all(self.fleet.in_state("routable"), within_s=self.timeouts.request_s)
        return {seed: draft.completion() for seed, draft in self._drafts.items() if len(draft.token_ids)}

    async def resume(self) -> None:
        """Continues all requests."""
        # Servers stay paused after all requests have finished, and nothing else resumes them, except a running load.
        paused = self._paused - self._at_load
        servers = [server for server in self.fleet.in_state("routable") if server in paused]
        await asyncio.gather(*(self._try_or_lose(server, server.client.resume, "resumed") for server in servers))
        self._paused.clear()
        self.traffic.is_paused = False
        self.home.wake()

    def leave_to_load(self, servers: Collection[Server]) -> None:
        """Leaves pausing and resuming these servers to a load, until `release`."""
        self._at_load.update(servers)

    async def hold(self, servers: Collection[Server]) -> None:
        """Holds new requests until `release`. Aborts all if one has `min_new_tokens`, whose count a pause resets.

        New requests must wait, because a server handles a pause only after the requests that came before it.
        """
        self.traffic.is_held = True
        await self.leader.notify()
        if self.traffic.num_with_minimum:
            await self._abort_all(servers, within_s=self.timeouts.sync_s)

    async def _abort_all(self, servers: Collection[Server], *, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.traffic.num_running and time.monotonic() < deadline:
            for server in servers:
                with contextlib.suppress(EngineError):
                    await server.client.abort(abort_all=True)
            await asyncio.sleep(0.01)
            await self.leader.notify()

    async def release(self, servers: Collection[Server]) -> None:
        """Opens the gate after a load; if `pause` is still in effect, pauses the servers again."""
        self._paused.difference_update(servers)
        self._at_load.difference_update(servers)
        if self.traffic.is_paused and self.traffic.num_running:  # the load has resumed the servers
            await self._pause_servers()
        self.traffic.is_held = False
        self.home.wake()

    async def _pause_servers(self) -> None:
        if self.traffic.num_with_minimum:
            await self._abort_all(self.fleet.in_state("routable"), within_s=self.timeouts.request_s)
        servers = self.fleet.in_state("routable")
        self._paused.update(servers)
        await asyncio.gather(*(self._try_or_lose(server, server.client.pause, "paused") for server in servers))

    async def _try_or_lose(self, server: Server, change: Callable[[], Awaitable[None]], done: str) -> None:
        try:
            await change()
        except EngineError as error:
            self.members.lose(server, f"it could not be {done}: {error}")

    async def _generate(self, draft: CompletionDraft, session: str) -> Completion:
        """Sends requests until the completion is finished; if a server is lost, sends the next one to another."""
        failures = _Failures()
        while draft.finish_reason is None:
            server = await self._find_server(session, failures.servers, min_version=self.versions.min_version(draft))
            before = len(draft.token_ids)
            try:
                await self._request(server, draft)
            except EngineError as error:
                await self._wait_to_retry(server, error, failures)
            else:
                if len(draft.token_ids) > before:
                    failures = _Failures()
                elif self.traffic.is_open:  # otherwise it was aborted for a pause or load
                    await self._wait_to_retry(server, MalformedAnswer(f"{server.url} returned no token."), failures)
        return draft.completion()

    async def _wait_to_retry(self, server: Server, error: EngineError, failures: _Failures) -> None:
        """Waits if the request may be sent again; otherwise raises the error."""
        is_refused = isinstance(error, ServerRefused) and not error.is_temporary
        if is_refused and self.versions.is_missing(server, error):
            self.members.lose(server, str(error))
        elif is_refused or not isinstance(error, _REPEATED):
            raise error
        if not isinstance(error, OutOfFiles):
            failures.servers.add(server)
        if isinstance(error, (EngineTimeout, EngineUnreachable)):  # the server may still be alive
            self.home.spawn(self.members.check(server))
        if isinstance(error, ServerRefused) and error.is_busy:
            failures.busy_since = failures.busy_since or time.monotonic()
            busy_s = time.monotonic() - failures.busy_since
            others = {*self.fleet.in_state("routable")} - failures.servers
            wait_s = max(0.1, min(busy_s, MAX_BACKOFF_S), 0.0 if others else error.retry_after_s)
            is_over, problem = busy_s + wait_s > self.timeouts.generate_s, f"was refused for {busy_s:.0f} s"
            server.client.warn_if_busy(error, busy_s + wait_s)
        else:
            failures.num += 1
            wait_s = min(0.05 * 2**failures.num, MAX_BACKOFF_S)
            is_over, problem = failures.num > MAX_RETRIES, f"failed {failures.num} times in a row"
        if is_over:
            servers = self.fleet.describe()
            raise EngineError(f"A request {problem}. Last failure: {error} Servers: {servers}.") from error
        await asyncio.sleep(wait_s * random.uniform(1.0, 1.2))

    async def _request(self, server: Server, draft: CompletionDraft) -> None:
        """Sends one request and adds its answer to the draft; aborts it on cancellation or after `generate_s`."""
        rid = secrets.token_hex(16)
        traffic, fleet, router = self.traffic, self.fleet, self.members.router
        router.start_request(server, draft.max_tokens)
        traffic.num_running += 1
        traffic.num_with_minimum += draft.sampling.min_new_tokens > 0

        def abort() -> None:
            servers = router.may_reach(server, "routable", "draining")
            self.home.spawn(abort_at([candidate.client for candidate in servers], rid))

        limit_s = self.timeouts.generate_s  # after this, an abort makes the server return its tokens
        overdue = asyncio.get_running_loop().call_later(limit_s, abort)
        try:
            draft.named_version = self.versions.choose(draft.named_version)
            with self.versions.used(draft.named_version, rid, server):
                body = server.client.request_of(draft, rid, fleet.cache_key(server.weight_version))
                oldest = min(candidate.weight_version for candidate in router.may_reach(server, "routable"))
                since = time.monotonic()
                with span("request", "server", server.url, prompt=len(draft.prompt)) as sent:
                    answer, url = await router.send(server, body, limit_s + ABORT_TIMEOUT_S)
                    sent.args["tokens"] = len(answer.token_ids)
                if warning := fleet.note_answer(url, time.monotonic() - since, len(answer.token_ids)):
                    log.warning("%s", warning)
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            overdue.cancel()
            traffic.num_running -= 1
            traffic.num_with_minimum -= draft.sampling.min_new_tokens > 0
            router.end_request(server, draft.max_tokens)
        draft.check(answer, url, rid, oldest, fleet.newest_version)
        draft.add(answer, url, path=server.client.generate_path, column_help=server.client.column_help)
        if draft.sampling.grammar and not draft.finish_reason and overdue.when() <= asyncio.get_running_loop().time():
            raise ValueError(f"A completion with a grammar took over {limit_s:g} s (generate_s). It cannot continue.")

    async def _find_server(self, session: str, failed: set[Server], *, min_version: int = -1) -> Server:
        """Waits until the gate is open, the router can send and a server is routable; returns the server."""
        since = time.monotonic()
        is_waiting = False
        try:
            while True:
                if not self.traffic.is_open:
                    since = time.monotonic()
                elif self.members.router.can_send() and (
                    server := self.fleet.choose(session, min_version=min_version, excluded=failed)
                ):
                    return server
                if not is_waiting:
                    is_waiting = True
                    self.traffic.num_waiting += 1
                self.members.check_wait(since)
                await self.home.wait_for_change(1.0)
        finally:
            self.traffic.num_waiting -= is_waiting
