"""SGLangClient: what one SGLang server is asked over HTTP; each question has a deadline, each failure names the server.

The paths and fields are those of SGLang 0.5.21 and later; an older server has no bracket around weight updates, which
`begin_weight_update` tells. Connection errors, answers of 5xx and answers that are no JSON are asked again, after a
wait that doubles, where asking twice does no harm; answers of 4xx never. Generation and control have their own
connections, so that a pause never stands in line behind 4,096 generations.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import aiohttp

from lightrl.errors import EngineError, EngineTimeout, EngineUnreachable

PauseMode = Literal["abort", "retract", "in_place"]
MAX_BACKOFF_S = 5.0
_HTTP_ERROR = 400
_SERVER_ERROR = 500
_NOT_FOUND = 404


class ServerRefused(EngineError):
    """A server answered with an error; `status` is the one of HTTP, `answer` the text."""

    def __init__(self, message: str, *, status: int, answer: str) -> None:
        super().__init__(message)
        self.status = status
        self.answer = answer


class SGLangClient:
    """One SGLang server. Used on one event loop at a time; after `close` the next call opens new connections.

    Args:
        url: as in `http://127.0.0.1:30000`.
        token: the key that the server was started with; None where it has none.
        request_timeout_s: of everything but `generate`; a method's own `timeout_s` of 0 means this one.
        generate_timeout_s: of one `generate`, from the call to the last token.
        connect_timeout_s: until a connection stands; a server that is stopped or gone does not take one.
        num_retries: how often a question that may be asked twice is asked again.
        backoff_s: before the first of these; doubled each time, up to 5 s, with some chance in it.
        max_connections: of generations that wait for their answer; more of them stand in line here.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        request_timeout_s: float = 60.0,
        generate_timeout_s: float = 3600.0,
        connect_timeout_s: float = 60.0,
        num_retries: int = 3,
        backoff_s: float = 0.2,
        max_connections: int = 4096,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The server's address is {url!r}, expected http://host:port. Write it so.")
        for name, value in (("request_timeout_s", request_timeout_s), ("generate_timeout_s", generate_timeout_s)):
            if value <= 0:
                raise ValueError(f"{name}={value}, expected more than 0. Raise it.")
        self.url = url.rstrip("/")
        self.request_timeout_s = request_timeout_s
        self.generate_timeout_s = generate_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self.num_retries = num_retries
        self.backoff_s = backoff_s
        self.max_connections = max_connections
        self.last_path: str | None = None  # what it answered last, and when
        self.last_answer_at: float | None = None  # seconds, monotonic
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._sessions: dict[str, aiohttp.ClientSession] = {}
        self._num_closes = 0

    def __repr__(self) -> str:
        return f"SGLangClient({self.url!r})"

    # ------------------------------------------------------------------ generation

    async def generate(
        self,
        body: dict[str, Any],
        *,
        num_retries: int | None = None,
        timeout_s: float | None = 0.0,
        read: Callable[[bytes], Any] = json.loads,
    ) -> Any:
        """The answer of `/generate`: a dict, or a list of them for a batch; or what `read` makes of its bytes.

        Asked again it has a new random `rid`, written into `body`: the server may still hold the old one. On
        cancellation the connection is cut, which the server notices seconds later; `abort` tells it at once.
        """
        retries = self.num_retries if num_retries is None else num_retries
        for attempt in range(retries + 1):
            try:
                return await self._ask(
                    "POST",
                    "/generate",
                    body,
                    timeout_s=timeout_s or self.generate_timeout_s,
                    kind="generate",
                    read=read,
                )
            except EngineError as error:
                if attempt == retries or not _may_ask_again(error):
                    raise
            await self._back_off(attempt)
            if "rid" in body:
                body["rid"] = secrets.token_hex(16)
        raise AssertionError("unreachable")

    async def classify(self, rows: Sequence[Sequence[int]], *, timeout_s: float | None = 0.0) -> list[list[float]]:
        """What a reward model says at the last token of each row of token ids: its head's numbers, usually one.

        The server needs `--is-embedding` and a `…ForSequenceClassification` model.
        """
        body = {"input_ids": [list(row) for row in rows]}
        answer = await self._call("POST", "/classify", body, timeout_s=timeout_s)
        return [entry["embedding"] for entry in answer]

    async def abort(self, rid: str = "", *, abort_all: bool = False) -> None:
        """The request ends at the next token; its own `generate` gets what was written. Every rid that begins so."""
        await self._call("POST", "/abort_request", {"rid": rid, "abort_all": abort_all}, has_json=False)

    # ------------------------------------------------------------------ who it is

    async def model_info(self, *, timeout_s: float | None = 0.0, num_retries: int | None = None) -> dict[str, Any]:
        """`model_path`, the live `weight_version` and more; also the cheapest sign of life."""
        return await self._call("GET", "/model_info", timeout_s=timeout_s, num_retries=num_retries)  # type: ignore[no-any-return]

    async def server_info(self) -> dict[str, Any]:
        """The arguments it was started with; its `weight_version` is that of the start."""
        return await self._call("GET", "/server_info")  # type: ignore[no-any-return]

    async def is_ready(self, *, timeout_s: float | None = 0.0) -> bool:
        """Whether it is up, healthy and not paused; False as well where nobody answers."""
        try:
            await self._call("GET", "/ready", timeout_s=timeout_s, num_retries=0, has_json=False)
        except EngineError:
            return False
        return True

    async def loads(self) -> dict[str, Any]:
        """Requests that run and wait, tokens in use."""
        return await self._call("GET", "/v1/loads")  # type: ignore[no-any-return]

    # ------------------------------------------------------------------ pause and cache

    async def pause(self, mode: PauseMode = "retract", *, timeout_s: float | None = 0.0) -> None:
        """`retract`: running requests stop at a token and go on after `resume` with recomputed key-values."""
        await self._call("POST", "/pause_generation", {"mode": mode}, timeout_s=timeout_s, has_json=False)

    async def resume(self, *, timeout_s: float | None = 0.0) -> None:
        """Generation goes on; no harm where it was not paused."""
        await self._call(
            "POST", "/continue_generation", {"torch_empty_cache": True}, timeout_s=timeout_s, has_json=False
        )

    async def flush_cache(self, *, wait_s: float = 0.0) -> None:
        """Forgets every key-value that no running request holds; refused while requests run, unless retracted.

        Args:
            wait_s: how long the server waits until it is idle.
        """
        timeout_s = self.request_timeout_s + wait_s
        await self._call("POST", f"/flush_cache?timeout={wait_s:g}", {}, timeout_s=timeout_s, has_json=False)

    # ------------------------------------------------------------------ weights

    async def begin_weight_update(self, selector: str = "all") -> bool:
        """Opens the bracket that updates by tensors or a group need; False where the server is too old to have one."""
        try:
            await self._update("/begin_weight_update", {"selector": selector})
        except ServerRefused as error:
            if error.status == _NOT_FOUND:
                return False
            raise
        return True

    async def end_weight_update(self) -> None:
        await self._update("/end_weight_update", {})

    async def update_weights_from_disk(
        self,
        folder: str,
        *,
        weight_version: str | None = None,
        flush_cache: bool = True,
        timeout_s: float | None = 0.0,
        **fields: Any,
    ) -> dict[str, Any]:
        """Loads a safetensors folder that the server can read; where that fails it keeps its old weights."""
        body = {
            "model_path": folder,
            "load_format": "auto",  # else that of its start: a server of dummy weights would refuse real ones
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            **fields,
        }
        return await self._update("/update_weights_from_disk", body, timeout_s=timeout_s)

    async def init_weights_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float | None = 0.0,
    ) -> None:
        """Joins a process group with the trainer, which joins as rank 0 at the same time."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        await self._update("/init_weights_update_group", body, timeout_s=timeout_s)

    async def update_weights_from_distributed(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str,
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = None,
        timeout_s: float | None = 0.0,
    ) -> dict[str, Any]:
        """Receives these tensors by broadcast from rank 0 of the group, in this order."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "load_format": load_format,
        }
        return await self._update("/update_weights_from_distributed", body, timeout_s=timeout_s)

    async def destroy_weights_group(self, group_name: str) -> None:
        await self._update("/destroy_weights_update_group", {"group_name": group_name})

    async def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        weight_version: str | None = None,
        flush_cache: bool = False,
        load_format: str | None = None,
        timeout_s: float | None = 0.0,
    ) -> dict[str, Any]:
        """Takes tensors from the body: one string per tp rank, in base64, as SGLang demands them pickled."""
        body = {
            "serialized_named_tensors": list(serialized_named_tensors),
            "weight_version": weight_version,
            "flush_cache": flush_cache,
            "load_format": load_format,
        }
        return await self._update("/update_weights_from_tensor", body, timeout_s=timeout_s)

    async def set_weight_version(self, weight_version: str) -> None:
        """Changes the name of the weights, not the weights; aborts nothing."""
        await self._update(
            "/update_weight_version", {"new_version": weight_version, "abort_all_requests": False}, num_retries=None
        )

    async def checksum(self, *, timeout_s: float | None = 0.0) -> dict[str, Any]:
        """Checksums of the weights as it holds them: `per_engine_checksum`, and of each rank and parameter."""
        return await self._update("/weights_checker", {"action": "checksum"}, timeout_s=timeout_s, num_retries=None)

    # ------------------------------------------------------------------ memory

    async def release_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = 0.0) -> None:
        """Gives `kv_cache`, `weights` or `cuda_graph` memory back; the server has to be idle, or dies."""
        await self._memory("/release_memory_occupation", tags, timeout_s)

    async def resume_memory(self, tags: Sequence[str] | None = None, *, timeout_s: float | None = 0.0) -> None:
        """Takes it again; a tag that was not released kills the server."""
        await self._memory("/resume_memory_occupation", tags, timeout_s)

    async def close(self) -> None:
        """Ends the connections; has to run on the event loop of the calls before it."""
        self._num_closes += 1  # what is under way fails, and is not asked again
        sessions, self._sessions = self._sessions, {}
        for session in sessions.values():
            await session.close()

    # ------------------------------------------------------------------ asking

    def describe(self) -> str:
        """What it last did, for messages."""
        if self.last_path is None or self.last_answer_at is None:
            return f"{self.url} has never answered"
        return f"{self.url} last answered {self.last_path} {time.monotonic() - self.last_answer_at:.1f} s ago"

    async def _memory(self, path: str, tags: Sequence[str] | None, timeout_s: float | None) -> None:
        body = {"tags": list(tags) if tags is not None else None}
        await self._call("POST", path, body, timeout_s=timeout_s, num_retries=0)

    async def _update(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = 0.0, num_retries: int | None = 0
    ) -> dict[str, Any]:
        answer = await self._call("POST", path, body, timeout_s=timeout_s, num_retries=num_retries)
        if not isinstance(answer, dict) or answer.get("success") is False:
            raise ServerRefused(
                f"{self.url} answered {path} with {_short(str(answer))}, expected success. Look at the server's log.",
                status=200,
                answer=str(answer),
            )
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = 0.0,
        num_retries: int | None = None,
        has_json: bool = True,
    ) -> Any:
        retries = self.num_retries if num_retries is None else num_retries
        num_closes = self._num_closes
        for attempt in range(retries + 1):
            try:
                return await self._ask(
                    method,
                    path,
                    body,
                    timeout_s=timeout_s or self.request_timeout_s,
                    kind="control",
                    read=json.loads if has_json else None,
                )
            except EngineError as error:
                if attempt == retries or self._num_closes != num_closes or not _may_ask_again(error):
                    raise
            await self._back_off(attempt)
        raise AssertionError("unreachable")

    async def _back_off(self, attempt: int) -> None:
        longest = min(self.backoff_s * 2**attempt, MAX_BACKOFF_S)
        await asyncio.sleep(longest * (0.5 + 0.5 * random.random()))

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        *,
        timeout_s: float,
        kind: str,
        read: Callable[[bytes], Any] | None,
    ) -> Any:
        """One question, once."""
        name = path.partition("?")[0]
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=self.connect_timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            async with self._session(kind).request(method, self.url + path, data=data, timeout=timeout) as response:
                content = await response.read()
                status = response.status
        except aiohttp.ServerTimeoutError as error:  # of the connection; the whole question's is below
            raise EngineUnreachable(
                f"{self.url} took no connection for {name} within connect_timeout_s={self.connect_timeout_s:g}, "
                f"expected one; {self.describe()}. Does it hang, or do too many connect at once?"
            ) from error
        except asyncio.TimeoutError as error:
            raise EngineTimeout(
                f"{self.url} did not answer {name} within {timeout_s:g} s, expected an answer by then; "
                f"{self.describe()}. Look at its log, or raise the deadline."
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineUnreachable(
                f"{self.url} gave no answer to {name}: {_reason(error)}; {self.describe()}. Expected an answer. "
                "Is it running, and is the address right?"
            ) from error
        self.last_path, self.last_answer_at = name, time.monotonic()
        if status >= _HTTP_ERROR:
            answer = content.decode(errors="replace")
            raise ServerRefused(
                f"{self.url} answered {name} with HTTP {status}: {_short(answer)}, expected 200. "
                + ("Look at the server's log." if status >= _SERVER_ERROR else "Mend what was asked."),
                status=status,
                answer=answer,
            )
        if read is None:
            return None
        try:
            return read(content)
        except ValueError as error:
            raise EngineUnreachable(
                f"{self.url} answered {name} with {_short(content.decode(errors='replace'))!r}, expected JSON. "
                "Is it an SGLang server?"
            ) from error

    def _session(self, kind: str) -> aiohttp.ClientSession:
        session = self._sessions.get(kind)
        if session is None:
            limit = self.max_connections if kind == "generate" else 16
            session = self._sessions[kind] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=limit, keepalive_timeout=60),
                headers={"Content-Type": "application/json", **self._headers},
            )
        return session


def _may_ask_again(error: EngineError) -> bool:
    """Not after a deadline: whoever asked has waited long enough, and the server may be at it still."""
    if isinstance(error, ServerRefused):
        return error.status >= _SERVER_ERROR
    return isinstance(error, EngineUnreachable)


def _reason(error: aiohttp.ClientError | OSError) -> str:
    """Why there is no connection, or none any more, in words."""
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    address = f"{error.host} port {error.port}" if isinstance(error, aiohttp.ClientConnectorError) else "the server"
    if isinstance(cause, socket.gaierror):
        return f"no machine named {address.partition(' port ')[0]!r} is known"
    if isinstance(cause, ConnectionRefusedError):
        return f"{address} refused the connection, nothing listens there"
    if isinstance(cause, TimeoutError):
        return f"{address} did not take the connection in time"
    if isinstance(cause, aiohttp.ServerDisconnectedError | ConnectionResetError | BrokenPipeError):
        return f"{address} closed the connection before it had answered"
    return f"{address}: {getattr(cause, 'strerror', None) or str(cause) or type(cause).__name__}"


def _short(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + " …"
