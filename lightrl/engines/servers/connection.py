"""Connection: HTTP to one server, with deadlines and retries; every failure names the server.

Failed connections, 5xx answers and answers that are not JSON are retried after a wait that doubles each time, unless
repeating the request could do harm. A request to a busy server or load balancer is repeated until the deadline, after
the `Retry-After` time if there is one. Other 4xx answers are final. Generation and control use separate connections, so
that a pause never queues behind 4,096 generations.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import random
import resource
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import aiohttp

from lightrl.concurrency.streams import BUSY, body_of, retry_after_s
from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.engines.servers.timeouts import Timeouts
from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

log = logging.getLogger(__name__)

MAX_BACKOFF_S = 5.0
BUSY_S = 30.0  # warn if a request has been refused as busy for this long
_NOT_TAKEN = (408, 425, 429, 503)  # the request was refused before it was read, so repeating it does no harm
_SLICE_BYTES = 2**18  # a large body is sent in slices of this size
_MAX_ANSWER_BYTES = 2**30
MAX_CONNECTIONS = 4096  # concurrent generations per server; others wait in this process
_KEPT_FILES = 128  # open files reserved for other uses, such as pipes and sockets for rewards and agents
CONTROL_CONNECTIONS = 16  # per server


def raise_open_files() -> int:
    """Raises this process's limit on open files as far as the system permits; returns the new limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def connections_within(limit: int, num_servers: int) -> int:
    """Returns how many concurrent requests per server this limit on open files allows."""
    num_open = sum(1 for _ in Path("/dev/fd").iterdir())
    return max(1, (limit - num_open - _KEPT_FILES) // max(1, num_servers) - CONTROL_CONNECTIONS)


def connections_to_each(num_servers: int) -> int:
    """Returns how many requests per server may be in flight; warns if the limit on open files reduces the number."""
    limit = raise_open_files()
    num = min(MAX_CONNECTIONS, connections_within(limit, num_servers))
    if num < MAX_CONNECTIONS:
        log.warning(
            "This process may open only %d files (ulimit -n, LimitNOFILE), so it sends each server at most %d requests "
            "at a time instead of %d; other requests wait.",
            limit,
            num,
            MAX_CONNECTIONS,
        )
    return num


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether a limit on open files (of this process or machine) caused the error, rather than the server."""
    return isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)


class ServerRefused(EngineError):
    """A server answered with an HTTP error or reported a failure."""

    def __init__(self, message: str, *, status: int, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_busy(self) -> bool:
        """Whether the server, or a balancer in front of it, may accept the same request later."""
        return self.status in BUSY

    @property
    def is_temporary(self) -> bool:
        """Whether another server, or this server later, may accept the same request."""
        return self.status >= 500 or self.is_busy


class OutOfFiles(EngineError):
    """This machine could not open another connection; the server is not the cause."""


NO_ANSWER = (EngineUnreachable, EngineTimeout, ServerRefused, OutOfFiles)  # a later request may succeed


class Connection:
    """HTTP to one server, from one event loop at a time; after `close`, the next request opens new connections.

    A subclass sets the program's name, for messages, and the path of generation requests.

    Args:
        token: the server's API key; None if it has none.
        num_retries: maximum number of retries of a request that may be repeated.
        backoff_s: wait before the first retry; doubles each time up to 5 s, with jitter.
        max_connections: maximum number of concurrent generations; others wait in this process.
    """

    generate_path = "/generate"
    program = "the right server"
    hints: ClassVar[Mapping[tuple[int, str], str]] = {}  # (HTTP status, path) → what the user should do

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeouts: Timeouts | None = None,
        num_retries: int = 3,
        backoff_s: float = 0.2,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"A server's address must look like http://host:port, got {url!r}.")
        self.url = self.name = url.rstrip("/")  # the name is for messages
        self.timeouts = timeouts or Timeouts()
        self.last_answer_at: float | None = None  # monotonic seconds
        self._last_path = ""  # the path of the last request that was answered
        self._num_retries = num_retries
        self._backoff_s = backoff_s
        self._max_connections = max_connections
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._num_closes = 0  # number of `close` calls; requests sent before a call are not retried after it
        self._is_over = False
        self._has_warned_of_busy = False

    async def request(
        self,
        method: Literal["GET", "POST", "DELETE"],
        path: str,
        body: dict[str, Any] | bytes | None = None,
        *,
        timeout_s: float = 0.0,
        num_retries: int | None = None,
        read: Callable[[bytes], Any] | None = json.loads,
        headers: dict[str, str] | None = None,
    ) -> Any:
        """Returns the answer, parsed by `read`; a `timeout_s` of 0 means `timeouts.generate_s` or `timeouts.request_s`.

        Retries as described at the top of this file, unless `close` was called. A retry of a generation or batch gets
        a new random `rid` in `body`: the server may still be running the old one. `headers`, if given, receives the
        answer's headers, with lower-case names.

        Raises:
            ServerRefused: if the server answers with an error.
            EngineUnreachable: if no connection can be opened, or the answer is not JSON.
            EngineTimeout: if the deadline passes.
            OutOfFiles: if this process cannot open another connection.
        """
        kind = "generate" if path == self.generate_path else "control"
        timeout_s = timeout_s or (self.timeouts.generate_s if kind == "generate" else self.timeouts.request_s)
        retries = self._num_retries if num_retries is None else num_retries
        num_closes = self._num_closes
        start = time.monotonic()
        for attempt in itertools.count():
            wait_s = min(self._backoff_s * 2 ** min(attempt, 10), MAX_BACKOFF_S) * random.uniform(0.5, 1.0)
            try:
                return await self._attempt(method, path, body, timeout_s, kind, read, headers)
            except EngineError as error:
                # A missed deadline is final: the caller has waited long enough, and the server may still be working.
                is_temporary = isinstance(error, EngineUnreachable | OutOfFiles)
                is_temporary |= isinstance(error, ServerRefused) and error.is_temporary
                may_repeat = attempt < retries and is_temporary
                if isinstance(error, ServerRefused) and error.is_busy:  # only the deadline limits its retries
                    wait_s = max(wait_s, error.retry_after_s)
                    # A generation with `num_retries=0` is not repeated here: its caller tries other servers.
                    may_wait = retries > 0 or (kind == "control" and error.status in _NOT_TAKEN)
                    busy_s = time.monotonic() - start + wait_s
                    may_repeat = may_wait and busy_s < timeout_s
                    if may_repeat:
                        self.warn_if_busy(error, busy_s)
                if not may_repeat or self._num_closes != num_closes:
                    raise
            await asyncio.sleep(wait_s)
            if isinstance(body, dict) and isinstance(body.get("rid"), list):
                body["rid"] = [secrets.token_hex(16) for _ in body["rid"]]
            elif isinstance(body, dict) and "rid" in body and kind == "generate":
                body["rid"] = secrets.token_hex(16)
        raise AssertionError("unreachable")

    async def close(self, *, for_good: bool = False) -> None:
        """Closes the connections, on the event loop that opened them. Requests in flight fail and are not retried.

        Later requests open new connections, or fail if `for_good`.
        """
        self._num_closes += 1
        self._is_over = self._is_over or for_good
        for kind in list(self._sessions):
            # One at a time, so that if this call is cancelled, the next `close` closes the rest.
            session = self._sessions.pop(kind, None)
            if session is not None:
                await session.close()

    def warn_if_busy(self, error: ServerRefused, busy_s: float) -> None:
        """Warns once if a request has been refused as busy for more than BUSY_S."""
        if busy_s > BUSY_S and not self._has_warned_of_busy:
            self._has_warned_of_busy = True
            log.warning("Still waiting for a server that refuses requests as busy: %s", error)

    def describe(self) -> str:
        """Describes the server's last answer, for messages."""
        if self.last_answer_at is None:
            return f"{self.name} has never answered"
        return f"{self.name} last answered {self._last_path} {time.monotonic() - self.last_answer_at:.1f} s ago"

    async def _attempt(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | bytes | None,
        timeout_s: float,
        kind: str,
        read: Callable[[bytes], Any] | None,
        answer_headers: dict[str, str] | None,
    ) -> Any:
        """Sends the request once; turns every failure into an EngineError that names the server."""
        name = path.partition("?")[0]
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.timeouts.request_s)
        data: Any = json.dumps(body).encode() if isinstance(body, dict) else body
        headers = None
        if isinstance(body, bytes):  # large, so it is sent in slices, which lets other requests continue in between
            data, headers = _slices(body), {"Content-Length": str(len(body))}
        num_closes = self._num_closes
        try:
            async with self._session(kind).request(
                method, self.url + path, data=data, headers=headers, timeout=timeout
            ) as response:
                content, status = await body_of(response, _MAX_ANSWER_BYTES), response.status
                if answer_headers is not None:
                    answer_headers.update((key.lower(), value) for key, value in response.headers.items())
        except asyncio.CancelledError as error:
            # Closing a session cancels requests that wait for a connection, but not this task.
            task = asyncio.current_task()
            if task is None or task.cancelling() or self._num_closes == num_closes:
                raise
            raise EngineUnreachable(f"The connection to {self.name} was closed before it accepted {name}.") from error
        except aiohttp.ServerTimeoutError as error:  # the connection's deadline; the request's is handled below
            raise EngineUnreachable(
                f"{self.name} did not accept a connection for {name} within engine.timeouts.request_s="
                f"{self.timeouts.request_s:g}; {self.describe()}. It may be stuck, or have too many connections."
            ) from error
        except TimeoutError as error:
            raise EngineTimeout(
                f"{self.name} did not answer {name} within {timeout_s:g} s; {self.describe()}. Check its log, or "
                "increase the deadline in engine.timeouts."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            if is_out_of_files(error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error):
                raise OutOfFiles(
                    f"This machine could not open a connection to {self.name}: too many open files. Raise this "
                    "process's limit (ulimit -n, LimitNOFILE)."
                ) from error
            raise EngineUnreachable(
                f"{self.name} did not answer {name}: {_reason(error)}; {self.describe()}. Check that it is running at "
                "this address."
            ) from error
        if content is None:
            raise EngineUnreachable(
                f"{self.name} answered {name} with more than {_MAX_ANSWER_BYTES >> 20} MiB. Check that it is "
                f"{self.program}."
            )
        self._last_path, self.last_answer_at = name, time.monotonic()
        if status >= 400:
            text = _short(content.decode(errors="replace"))
            problem = f"{self.name} answered {name} with HTTP {status}: {text}. {self._hint(status, name)}"
            raise ServerRefused(problem, status=status, retry_after_s=retry_after_s(response.headers))
        if read is None:
            return None
        try:
            return read(content)
        except (ValueError, RecursionError) as error:
            raise EngineUnreachable(
                f"{self.name} answered {name} with {_short(content.decode(errors='replace'))!r}, which is not JSON. "
                f"Check that it is {self.program}."
            ) from error

    def _hint(self, status: int, path: str) -> str:
        if (status, path) in self.hints:
            return self.hints[status, path]
        if status in (401, 403):
            problem = "does not accept this token" if self._headers else "requires a token, but this run has none"
            return f"The server {problem}. Set {TOKEN_VARIABLE} to the API key that it was started with."
        return "Check the server's log." if status >= 500 or status in BUSY else "Fix the request."

    def _session(self, kind: str) -> aiohttp.ClientSession:
        session = self._sessions.get(kind)
        if session is None:
            if self._is_over:
                raise EngineUnreachable(f"The connection to {self.name} was closed.")
            limit = self._max_connections if kind == "generate" else CONTROL_CONNECTIONS
            session = self._sessions[kind] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60),
                headers={"Content-Type": "application/json", **self._headers},
            )
        return session


async def _slices(body: bytes) -> AsyncIterator[memoryview]:
    for start in range(0, len(body), _SLICE_BYTES):
        yield memoryview(body)[start : start + _SLICE_BYTES]


def _reason(error: aiohttp.ClientError | OSError) -> str:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    address = f"{error.host} port {error.port}" if isinstance(error, aiohttp.ClientConnectorError) else "the server"
    if isinstance(cause, socket.gaierror):
        return f"the name {address.partition(' port ')[0]!r} cannot be resolved"
    if isinstance(cause, ConnectionRefusedError):
        return f"{address} refused the connection; nothing is listening there"
    if isinstance(cause, TimeoutError):
        return f"{address} did not accept the connection in time"
    if isinstance(cause, aiohttp.ServerDisconnectedError | ConnectionResetError | BrokenPipeError):
        return f"{address} closed the connection before it answered"
    return f"{address}: {getattr(cause, 'strerror', None) or str(cause) or type(cause).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " …"
