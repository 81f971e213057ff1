"""Writer: completions, request by request: which server, what to do when it fails, and the gate that a pause closes.

    write() ─► gate ─► ServerPool.choose ─► SGLangClient.generate ─► CompletionDraft.add ─► Completion
              (pause)      │                    │ lost, 5xx, no JSON     │ aborted
                           └────────────────────┴────────────────────────┘ goes on elsewhere, with what was written

All of it is on the home loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from lightrl.engines.engine import Completion
from lightrl.engines.sglang.client import ServerRefused, SGLangClient
from lightrl.engines.sglang.home_loop import HomeLoop
from lightrl.engines.sglang.members import Members
from lightrl.engines.sglang.request import CompletionDraft, MalformedAnswer, RequestPictures, read_answer
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable
from lightrl.trajectory import Sampling

ABORT_TIMEOUT_S = 5.0
MAX_BACKOFF_S = 5.0
_SERVER_ERROR = 500


@dataclass
class _Failures:
    """Of one request, in a row, without a token in between."""

    num: int = 0
    urls: set[str] = field(default_factory=set)


class Writer:
    """Writes completions while the gate is open.

    Args:
        home: the loop.
        members: the servers.
        max_retries: of a request in a row, without a token in between.
        server_wait_timeout_s: how long a request waits for a server that is being started or synced.
    """

    def __init__(
        self, home: HomeLoop, members: Members, *, max_retries: int = 8, server_wait_timeout_s: float = 900.0
    ) -> None:
        self.num_running = 0  # completions that a server writes
        self.num_waiting = 0  # completions that wait for the gate or for a server
        self.is_held = False  # requests wait for the end of a load
        self.is_paused = False
        self._paused_urls: set[str] = set()  # servers that `pause` has paused and nobody has resumed
        self._lent_urls: set[str] = set()  # servers that a load pauses and resumes
        self._home = home
        self._members = members
        self._max_retries = max_retries
        self._server_wait_timeout_s = server_wait_timeout_s

    async def write(
        self,
        token_ids: list[int],
        sampling: Sampling,
        session: str,
        n: int,
        pictures: RequestPictures | None = None,
    ) -> list[Completion]:
        """`n` completions of one prompt. On cancellation the servers are told."""
        with self._home.counted():
            if n == 1:
                return [await self._write(CompletionDraft(token_ids, sampling, pictures=pictures), session)]
            drafts = [CompletionDraft(token_ids, sampling, sample, pictures=pictures) for sample in range(n)]
            writing = [asyncio.ensure_future(self._write(draft, session)) for draft in drafts]
            try:
                return list(await asyncio.gather(*writing))
            finally:
                for one in writing:
                    one.cancel()

    async def score(self, token_ids: list[int]) -> list[float]:
        """Logprobs at temperature 1 of the tokens of a prompt, 0 for the first; nothing where the server gives none."""
        params = {"max_new_tokens": 0, "temperature": 1.0}
        body = {"input_ids": token_ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0}
        failures = _Failures()
        with self._home.counted():
            while True:
                url = await self._find_server("probe", failures.urls)
                try:
                    answer = await self._members.clients[url].generate(body, num_retries=0)
                except EngineError as error:
                    await self._bear(url, error, failures)
                    continue
                found = answer["meta_info"].get("input_token_logprobs") or []
                return [0.0, *(float(entry[0]) for entry in found[1:])] if len(found) == len(token_ids) else []

    # ------------------------------------------------------------------ the gate

    async def pause(self) -> None:
        """Requests in flight stop at a token, new ones wait. Waits for the servers that have any."""
        self.is_paused = True
        if self.num_running:
            await self._pause_servers()

    async def resume(self) -> None:
        """Requests go on."""

        async def resume(url: str) -> None:
            try:
                await self._members.clients[url].resume()
            except EngineError as error:
                self._members.lose(url, f"it could not be resumed: {error}")

        # Also where all requests have ended since: nobody else resumes that server. Amid a load, the load does.
        paused = self._paused_urls - self._lent_urls
        urls = [url for url in self._members.pool.urls("routable") if url in paused]
        await asyncio.gather(*(resume(url) for url in urls))
        self._paused_urls.clear()
        self.is_paused = False
        self._home.wake()

    def lend(self, urls: Collection[str]) -> None:
        """A load pauses and resumes these servers, until `release`."""
        self._lent_urls.update(urls)

    async def hold(self, urls: Collection[str], *, is_aborting: bool, timeout_s: float = 600.0) -> None:
        """New requests wait until `release`. With `is_aborting`, those in flight come back with what they have."""
        self.is_held = True
        deadline = time.monotonic() + timeout_s
        while is_aborting and self.num_running and time.monotonic() < deadline:
            for url in urls:
                with contextlib.suppress(EngineError):
                    await self._members.clients[url].abort(abort_all=True)
            await asyncio.sleep(0.01)

    async def release(self, urls: Collection[str]) -> None:
        """The load that these servers took part in is over, and they were resumed: requests go on, unless paused."""
        self._paused_urls.difference_update(urls)
        self._lent_urls.difference_update(urls)
        if self.is_paused and self.num_running:
            await self._pause_servers()
        self.is_held = False
        self._home.wake()

    async def _pause_servers(self) -> None:
        async def pause(url: str) -> None:
            self._paused_urls.add(url)
            try:
                await self._members.clients[url].pause("retract")
            except EngineError as error:
                self._members.lose(url, f"it could not be paused: {error}")

        await asyncio.gather(*(pause(url) for url in self._members.pool.urls("routable", "syncing")))

    # ------------------------------------------------------------------ one completion

    async def _write(self, draft: CompletionDraft, session: str) -> Completion:
        """Asks until the completion is finished: again after an abort, elsewhere after a loss."""
        failures = _Failures()
        while draft.finish_reason is None:
            url = await self._find_server(session, failures.urls, min_version=draft.last_version)
            before = len(draft.token_ids)
            try:
                await self._ask(url, draft)
            except EngineError as error:
                await self._bear(url, error, failures)
            else:
                if len(draft.token_ids) > before:
                    failures = _Failures()
        return draft.completion()

    async def _bear(self, url: str, error: EngineError, failures: _Failures) -> None:
        """Returns, after a while, if the request may be sent again; else raises."""
        if isinstance(error, ServerRefused) and error.status < _SERVER_ERROR:
            raise error
        if not isinstance(error, (ServerRefused, EngineUnreachable, EngineTimeout, MalformedAnswer)):
            raise error
        failures.num += 1
        failures.urls.add(url)
        if isinstance(error, EngineTimeout):
            self._members.lose(url, str(error))
        elif isinstance(error, EngineUnreachable):
            self._home.spawn(self._members.look(url))
        if failures.num > self._max_retries:
            raise EngineError(
                f"A request failed {failures.num} times in a row, last with: {error} Servers: "
                f"{self._members.pool.describe()}."
            ) from error
        await asyncio.sleep(min(0.05 * 2**failures.num, MAX_BACKOFF_S))

    async def _ask(self, url: str, draft: CompletionDraft) -> None:
        rid = secrets.token_hex(16)
        client = self._members.clients[url]
        server = self._members.pool.start_request(url, draft.max_tokens)
        self.num_running += 1
        try:
            answer = await client.generate(draft.body(rid), num_retries=0, read=read_answer)
        except asyncio.CancelledError:
            self._home.spawn(_abort(client, rid))
            raise
        finally:
            self.num_running -= 1
            self._members.pool.end_request(server, draft.max_tokens)
        draft.add(answer, url)

    async def _find_server(self, session: str, failed: set[str], *, min_version: int = -1) -> str:
        """Waits for the gate and for a routable server; whoever changes either wakes it."""
        pool = self._members.pool
        if not (self.is_paused or self.is_held):
            url = pool.choose(session, min_version=min_version, excluded=failed)
            if url is not None:
                return url
        self.num_waiting += 1
        since = time.monotonic()
        try:
            while True:
                if self.is_paused or self.is_held:
                    since = time.monotonic()
                else:
                    url = pool.choose(session, min_version=min_version, excluded=failed)
                    if url is not None:
                        return url
                if not pool.has_hope():
                    raise EngineError(
                        f"No server is left: {pool.describe()}. Look at their logs; a run resumed from the last "
                        "checkpoint goes on where this one ends."
                    )
                if time.monotonic() - since > self._server_wait_timeout_s:
                    raise EngineTimeout(
                        f"A request waited server_wait_timeout_s={self._server_wait_timeout_s:g} for a server, "
                        f"expected one to be routable: {pool.describe()}."
                    )
                await self._home.wait_for_change(1.0)
        finally:
            self.num_waiting -= 1


async def _abort(client: SGLangClient, rid: str) -> None:
    with contextlib.suppress(EngineError, asyncio.TimeoutError):
        await asyncio.wait_for(client.abort(rid), ABORT_TIMEOUT_S)
