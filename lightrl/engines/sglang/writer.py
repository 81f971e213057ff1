"""Writer: completions, request by request: which server, what to do when it fails, and the gate that a pause closes.

    write() ─► gate ─► ServerPool.choose ─► SGLangClient.generate ─► CompletionDraft.add ─► Completion
              (pause)      │                    │ lost, 5xx, not JSON    │ aborted
                           └────────────────────┴────────────────────────┘ continues elsewhere with what was written

Everything runs on the home loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightrl.engines.abilities import Followers
from lightrl.engines.engine import Completion, check_request
from lightrl.engines.sglang.client import ABORT_TIMEOUT_S, SGLangClient, abort_at, is_unknown_adapter
from lightrl.engines.sglang.connection import OutOfFiles, ServerRefused
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.request import Answer, CompletionDraft, MalformedAnswer, RequestImages, read_answer
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable
from lightrl.models.images import ImageReader
from lightrl.trace import span
from lightrl.trajectory import Sampling, token_array

log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lightrl.engines.sglang.sync.served_adapters import ServedAdapters

MAX_BACKOFF_S = 5.0


@dataclass
class _Failures:
    """Failures of one request in a row, without a token in between."""

    num: int = 0
    urls: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class RequestLimits:
    """What the servers' model takes."""

    vocab_size: int
    max_context: int | None  # tokens of prompt and completion
    image_reader: ImageReader | None  # how it reads images; None if it takes none


class NoFollowers:
    """All requests come from this process."""

    async def tell(self) -> None: ...

    def post(self) -> None: ...


class Writer:
    """Writes completions while the gate is open; `max_retries` counts failures in a row, without a token between."""

    def __init__(
        self, home: HomeLoop, members: Members, *, limits: RequestLimits, timeouts: Timeouts, max_retries: int = 8
    ) -> None:
        self.followers: Followers = NoFollowers()  # with them, they alone write, and `num_running` is theirs
        self.num_running = 0  # completions that a server writes
        self.num_waiting = 0  # completions that wait for the gate or for a server
        self.is_held = False  # requests wait for the end of a load
        self.is_paused = False
        self.has_minimum = False  # of new tokens: a paused server would count it anew, so its requests are aborted
        self.adapters: ServedAdapters | None = None  # None: the policy is merged
        self._paused_urls: set[str] = set()  # servers paused by `pause` and not resumed since
        self._lent_urls: set[str] = set()  # servers that a load pauses and resumes
        self._drafts: dict[int, CompletionDraft] = {}  # by seed: those that are being written alone
        self._home = home
        self._members = members
        self._limits = limits
        self._max_retries = max_retries
        self._timeouts = timeouts

    async def write(
        self,
        token_ids: list[int],
        sampling: Sampling,
        session: str,
        n: int = 1,
        images: tuple[str, ...] = (),
        written: Completion | None = None,
    ) -> list[Completion]:
        """`n` completions of one prompt. A cancellation aborts the requests on the servers.

        Args:
            written: how the only completion begins.

        Raises:
            ValueError: if the model cannot take the prompt.
        """
        limits = self._limits
        check_request(token_ids, sampling, n, vocab_size=limits.vocab_size, max_context=limits.max_context)
        request_images = RequestImages.of(limits.image_reader, images, token_ids) if images else None
        with self._home.counted():
            if n == 1:
                draft = CompletionDraft(token_ids, sampling, images=request_images)
                if written is not None:
                    draft.token_ids = token_array("token_ids", written.token_ids)
                    draft.logprobs = token_array("behavior_logprobs", written.logprobs)
                    draft.weight_versions = token_array("weight_versions", written.weight_versions)
                    draft.supports = token_array("supports", written.supports or ())
                self._drafts[sampling.seed] = draft
                try:
                    return [await self._write(draft, session)]
                finally:
                    self._drafts.pop(sampling.seed, None)
            drafts = [CompletionDraft(token_ids, sampling, sample, images=request_images) for sample in range(n)]
            writing = [asyncio.ensure_future(self._write(draft, session)) for draft in drafts]
            try:
                return list(await asyncio.gather(*writing))
            finally:
                for one in writing:
                    one.cancel()

    async def score(self, sequences: list[list[int]]) -> dict[str, list[list[float]]]:
        """Logprobs at temperature 1 of these sequences' tokens from each routable server, 0 for the first token.

        A server that gives none has empty lists; one that is lost meanwhile is left out.
        """
        with self._home.counted():
            while True:
                await self._find_server("probe", set())
                urls = self._members.pool.urls("routable")
                answers = await asyncio.gather(*(self._scores_of(url, sequences) for url in urls))
                if any(answers):
                    return {url: rows for url, rows in zip(urls, answers, strict=True) if rows is not None}

    async def _scores_of(self, url: str, sequences: list[list[int]]) -> list[list[float]] | None:
        """None if the server is lost."""
        failures = _Failures()
        while url in self._members.pool.urls("routable"):
            try:
                return list(await asyncio.gather(*(self._score(url, token_ids) for token_ids in sequences)))
            except EngineError as error:
                await self._wait_to_retry(url, error, failures)
        return None

    async def _score(self, url: str, token_ids: list[int]) -> list[float]:
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        if self.adapters is not None:
            body["lora_path"] = self.adapters.choose(None).name
        answer = await self._members.clients[url].generate(body, num_retries=0)
        scores = answer["meta_info"].get("input_token_logprobs") or []
        return [0.0, *(float(entry[0]) for entry in scores[1:])] if len(scores) == len(token_ids) else []

    async def pause(self) -> None:
        """Stops requests in flight at a token; new ones wait. Waits for the servers that have any."""
        self.is_paused = True
        await self.followers.tell()
        if self.num_running:
            await self._pause_servers()

    async def unfinished(self) -> dict[int, Completion]:
        """What is written of the completions that were requested alone, by seed; while requests are paused.

        A server tells what it has only when it ends a request: it is aborted, and sent again after the pause.
        """
        paused, self._paused_urls = self._paused_urls, set()
        for url in paused & set(self._members.pool.urls("routable")):
            await self._members.clients[url].resume()
        await self._abort_all(self._members.pool.urls("routable"), within_s=self._timeouts.request_s)
        return {seed: draft.completion() for seed, draft in self._drafts.items() if len(draft.token_ids)}

    async def resume(self) -> None:
        """Continues all requests."""

        async def resume(url: str) -> None:
            try:
                await self._members.clients[url].resume()
            except EngineError as error:
                self._members.lose(url, f"it could not be resumed: {error}")

        # Also if all requests have ended since: nothing else resumes that server. During a load, the load does.
        paused = self._paused_urls - self._lent_urls
        urls = [url for url in self._members.pool.urls("routable") if url in paused]
        await asyncio.gather(*(resume(url) for url in urls))
        self._paused_urls.clear()
        self.is_paused = False
        self._home.wake()

    def lend(self, urls: Collection[str]) -> None:
        """Leaves it to a load to pause and resume these servers, until `release`."""
        self._lent_urls.update(urls)

    async def close_gate(self) -> None:
        """New requests wait until `release`. A server reads a pause only after what was sent before it."""
        self.is_held = True
        await self.followers.tell()

    async def hold(self, urls: Collection[str], *, is_aborting: bool) -> None:
        """Closes the gate. With `is_aborting` or `has_minimum`, requests in flight return with what they have."""
        await self.close_gate()
        if is_aborting or self.has_minimum:
            await self._abort_all(urls, within_s=self._timeouts.sync_s)

    async def _abort_all(self, urls: Collection[str], *, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while self.num_running and time.monotonic() < deadline:
            for url in urls:
                with contextlib.suppress(EngineError):
                    await self._members.clients[url].abort(abort_all=True)
            await asyncio.sleep(0.01)
            await self.followers.tell()

    async def release(self, urls: Collection[str]) -> None:
        """The load of these servers is over and they were resumed: requests continue, unless paused."""
        self._paused_urls.difference_update(urls)
        self._lent_urls.difference_update(urls)
        if self.is_paused and self.num_running:
            await self._pause_servers()
        self.is_held = False
        self._home.wake()

    async def _pause_servers(self) -> None:
        if self.has_minimum:
            await self._abort_all(self._members.pool.urls("routable"), within_s=self._timeouts.request_s)

        async def pause(url: str) -> None:
            self._paused_urls.add(url)
            try:
                await self._members.clients[url].pause()
            except EngineError as error:
                self._members.lose(url, f"it could not be paused: {error}")

        await asyncio.gather(*(pause(url) for url in self._members.pool.urls("routable", "syncing")))

    async def _write(self, draft: CompletionDraft, session: str) -> Completion:
        """Sends requests until the completion is finished: again after an abort, elsewhere after a loss."""
        failures = _Failures()
        while draft.finish_reason is None:
            # Every routable server has every adapter; the version of its base says nothing.
            min_version = draft.last_version if self.adapters is None else -1
            url = await self._find_server(session, failures.urls, min_version=min_version)
            before = len(draft.token_ids)
            try:
                await self._request(url, draft)
            except EngineError as error:
                await self._wait_to_retry(url, error, failures)
            else:
                if len(draft.token_ids) > before:
                    failures = _Failures()
        return draft.completion()

    async def _wait_to_retry(self, url: str, error: EngineError, failures: _Failures) -> None:
        """Returns after a while if the request may be sent again; else raises."""
        is_refused = isinstance(error, ServerRefused) and not error.is_server_error
        if is_refused and self.adapters is not None and is_unknown_adapter(error):
            self._members.lose(url, str(error))
            is_refused = False
        passing = (ServerRefused, EngineUnreachable, EngineTimeout, MalformedAnswer, OutOfFiles)
        if is_refused or not isinstance(error, passing):
            raise error
        failures.num += 1
        if not isinstance(error, OutOfFiles):
            failures.urls.add(url)
        if isinstance(error, (EngineTimeout, EngineUnreachable)):  # it may have lost only this request
            self._home.spawn(self._members.look(url))
        if failures.num > self._max_retries:
            raise EngineError(
                f"A request failed {failures.num} times in a row. Last failure: {error} Servers: "
                f"{self._members.pool.describe()}."
            ) from error
        await asyncio.sleep(min(0.05 * 2**failures.num, MAX_BACKOFF_S))

    async def _request(self, url: str, draft: CompletionDraft) -> None:
        rid = secrets.token_hex(16)
        members, client = self._members, self._members.clients[url]
        self.has_minimum |= draft.sampling.min_new_tokens > 0
        counted = members.pool.start_request(url, draft.max_tokens) if members.gateway is None else None
        self.num_running += 1

        def abort() -> None:
            urls = members.pool.urls("routable", "draining")  # any of them, behind a gateway
            self._home.spawn(abort_at([client] if counted else [members.clients[one] for one in urls], rid))

        limit_s = self._timeouts.generate_s  # then the server returns what it has, unless it lost the request
        overdue = asyncio.get_running_loop().call_later(limit_s, abort)
        try:
            with self._adapter(draft, rid, client):
                body, timeout_s = draft.body(rid, members.cache_key(url)), limit_s + ABORT_TIMEOUT_S
                since = time.monotonic()
                with span("request", "server", url, prompt=len(draft.prompt)) as sent:
                    answer, url = await self._send(url, body, timeout_s)
                    sent.args["tokens"] = len(answer.token_ids)
                if slow := members.pool.note_answer(url, time.monotonic() - since, len(answer.token_ids)):
                    log.warning("%s", slow)
        except asyncio.CancelledError:
            abort()
            raise
        finally:
            overdue.cancel()
            self.num_running -= 1
            if counted:
                members.pool.end_request(counted, draft.max_tokens)
        draft.add(answer, url, self._limits.vocab_size)

    async def _send(self, url: str, body: dict[str, Any], timeout_s: float) -> tuple[Answer, str]:
        """The answer, and which server gave it: a gateway chooses one."""
        if (gateway := self._members.gateway) is not None:
            return await gateway.generate(body, timeout_s=timeout_s, read=read_answer)
        client = self._members.clients[url]
        return await client.generate(body, num_retries=0, timeout_s=timeout_s, read=read_answer), url

    @contextlib.contextmanager
    def _adapter(self, draft: CompletionDraft, rid: str, client: SGLangClient) -> Iterator[None]:
        """Inside, the draft's next request runs under an adapter, if adapters are served."""
        if self.adapters is None:
            yield
            return
        draft.adapter = self.adapters.choose(draft.adapter)
        with self.adapters.used(draft.adapter.version, rid, client):
            yield

    async def _find_server(self, session: str, failed: set[str], *, min_version: int = -1) -> str:
        """Waits for the gate, a routable server and the gateway, if there is one; a change of any wakes it."""
        pool, gateway = self._members.pool, self._members.gateway
        since = time.monotonic()
        is_waiting = False
        try:
            while True:
                if self.is_paused or self.is_held:
                    since = time.monotonic()
                elif (gateway is None or gateway.can_send()) and (
                    url := pool.choose(session, min_version=min_version, excluded=failed)
                ):
                    return url
                if not is_waiting:
                    is_waiting = True
                    self.num_waiting += 1
                self._members.check_hope(since)
                await self._home.wait_for_change(1.0)
        finally:
            self.num_waiting -= is_waiting
