"""OpenAIEndpoint: serves the policy through OpenAI's and Anthropic's APIs on a local port, one base_url per session.

    POST <base_url>/chat/completions    chat_protocol.py          GET <base_url>/models, <base_url>/models/<name>
    POST <base_url>/responses           responses_protocol.py     HEAD any address of a session
    POST <base_url>/messages            messages_protocol.py, also for messages/count_tokens

A base_url is http://127.0.0.1:<port>/sessions/<id>/v1; Anthropic's clients expect it without the `/v1`. Every route
requires the session's random key, as a Bearer token or in the header x-api-key. Requests to a frozen model are
forwarded to its server, and counted but not recorded (frozen_models.py). `serving_policy` opens a base_url for
evaluation, with the routes of policy_access.py.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import logging
import secrets
import socket
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

from aiohttp import web

from lightrl.concurrency.abandon import abandon
from lightrl.concurrency.listener import BACKLOG, Listener
from lightrl.concurrency.loop_thread import LoopThread
from lightrl.errors import RolloutError
from lightrl.trajectory import JsonObject
from lightrl.workflows.agent_workflow.chat_protocol import ChatExchange
from lightrl.workflows.agent_workflow.frozen_models import FrozenModel, forward
from lightrl.workflows.agent_workflow.messages_protocol import MessagesExchange
from lightrl.workflows.agent_workflow.policy_access import CompletionsExchange, PolicyAccess, SampledChatExchange
from lightrl.workflows.agent_workflow.protocol import Answer, Exchange, RequestRefused, no_such_model
from lightrl.workflows.agent_workflow.responses_protocol import ResponsesExchange
from lightrl.workflows.agent_workflow.session import AgentSession

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
_PROTOCOLS: dict[str, type[Exchange]] = {
    "chat/completions": ChatExchange,
    "messages": MessagesExchange,
    "messages/count_tokens": MessagesExchange,
    "responses": ResponsesExchange,
}
_EVALUATION: dict[str, type[Exchange]] = {"chat/completions": SampledChatExchange, "completions": CompletionsExchange}
MAX_BODY_BYTES = 100 * 10**6
WAITING_S = 15.0  # between keep-alive events, while a stream waits for its answer
_SHUTDOWN_TIMEOUT_S = 1.0
_KEEPALIVE_TIMEOUT_S = 3600.0  # longer than any client's, so that no client reuses a connection that is closing
_BODY_S = 60.0
_LOOP_S = 60.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAIEndpoint:
    """A server that runs as one task on the event loop that started it.

    Cancelling the task closes the port and its connections. `close` cancels it, and so do the end of `asyncio.run` and
    the controller's `close`, which cancel all tasks on their loops.

    Args:
        max_sessions: how many sessions may be open at the same time; further sessions wait.
        host: an address of this machine, on which the server listens for agents.
        frozen: other models that agents may use, by name.
        port: 0 for any free port.
        key: the API key for every session; by default, each session has a random key.
    """

    def __init__(
        self,
        *,
        max_sessions: int = 64,
        host: str = LOOPBACK,
        frozen: Mapping[str, FrozenModel] | None = None,
        port: int = 0,
        key: str | None = None,
    ) -> None:
        self.max_sessions = max_sessions
        self.host = host
        self.port = port
        self.key = key
        self.frozen = frozen or {}
        self._secret = secrets.token_bytes(32)  # the sessions' keys are derived from it
        self._sessions: dict[str, AgentSession | PolicyAccess] = {}
        self._warned_fields: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] | None = None
        self._slots: asyncio.Semaphore | None = None
        self._listener = Listener()

    async def start(self) -> None:
        """Opens the port unless it is already open; raises RolloutError if that fails."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._serving is None or self._serving.done():
            _warn_of_proxy(self.host)
            self._loop, self._port = loop, loop.create_future()
            self._slots = asyncio.Semaphore(self.max_sessions)
            self._serving = loop.create_task(self._serve(self._port), name="lightrl-openai-endpoint")
        assert self._port is not None
        try:
            await asyncio.shield(self._port)
        except OSError as error:
            text = f"The endpoint could not open port {self.port or 'any'} on {self.host}: {error}."
            raise RolloutError(f"{text} The host must be an address of this machine, with a free port.") from error

    async def close(self) -> None:
        """Closes the port, connections and sessions. Safe to call twice."""
        if self._serving is not None and self._loop is asyncio.get_running_loop():
            self._serving.cancel()
            await asyncio.wait({self._serving})

    @asynccontextmanager
    async def serving(
        self, session: AgentSession | PolicyAccess, name: str | None = None
    ) -> AsyncIterator[tuple[str, str]]:
        """Yields a session's base_url and key, then closes it; waits while `max_sessions` other sessions are open."""
        assert self._port is not None, "call start first"
        assert self._slots is not None, "call start first"
        async with self._slots:
            name = name or secrets.token_hex(16)
            self._sessions[name] = session
            try:
                host = f"[{self.host}]" if ":" in self.host else self.host
                yield f"http://{host}:{self._port.result()}/sessions/{name}/v1", self._key_of(name)
            finally:
                del self._sessions[name]
                session.close()

    async def _serve(self, port: asyncio.Future[int]) -> None:
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_get("/sessions/{session}/v1/models/{model:.+}", self._model)
        for path in {**_PROTOCOLS, **_EVALUATION}:
            app.router.add_post(f"/sessions/{{session}}/v1/{{protocol:{path}}}", self._exchange)
        # A request is cancelled with its connection, so it leaves the engine if the agent's client disconnects.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
        )
        try:
            await runner.setup()
            family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
            with socket.create_server((self.host, self.port), family=family, backlog=BACKLOG) as opened:
                port.set_result(opened.getsockname()[1])
                assert runner.server is not None
                await self._listener.accept(opened, runner.server)
        except OSError as error:
            port.set_exception(error)
        finally:
            port.cancel()  # no effect if it is done
            for session in self._sessions.values():
                session.close()
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Checks the key, and returns every error in the format that clients read."""
        try:
            name = request.path.partition("/sessions/")[2].partition("/")[0]
            key = self._key_of(name)
            sent = request.headers.get("Authorization", f"Bearer {request.headers.get('x-api-key')}")
            if not hmac.compare_digest(sent.encode(errors="surrogateescape"), f"Bearer {key}".encode()):
                raise RequestRefused(
                    "The API key is wrong or belongs to another session. Use the api_key that comes with the base_url.",
                    status=401,
                    code="invalid_api_key",
                )
            self._listener.note_key(request)
            if request.method == "HEAD":  # some programs first check that the server responds
                self._session(name)
                return web.Response()
            return await handler(request)
        except RequestRefused as error:
            return _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"The request has more than {MAX_BODY_BYTES // 10**6} MB. Send shorter messages."
            return _refusal(RequestRefused(text, status=413, code="request_too_large"))
        except web.HTTPException as error:
            return _refusal(
                RequestRefused(
                    f"{request.method} {request.path} is not served ({error.reason}). Use "
                    f"{', '.join({**_PROTOCOLS, **_EVALUATION})} or models under the session's base_url.",
                    status=error.status,
                    code="not_served",
                )
            )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        models = [_model_of(name) for name in self._model_names(request)]
        return web.json_response({"object": "list", "data": models, "has_more": False})

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        if name not in self._model_names(request):
            raise no_such_model(name)
        return web.json_response(_model_of(name))

    def _model_names(self, request: web.Request) -> list[str]:
        return [*self._session(request.match_info["session"]).rules.models, *self.frozen]

    async def _exchange(self, request: web.Request) -> web.StreamResponse:
        session, path = self._session(request.match_info["session"]), request.match_info["protocol"]
        try:
            body = await asyncio.wait_for(request.read(), _BODY_S)
        except TimeoutError as error:
            text = f"The request's body did not arrive within {_BODY_S:g} s."
            raise RequestRefused(text, status=408, code="request_timeout") from error
        if self.frozen and (frozen := self.frozen.get(_requested_model(body))) is not None:
            session.count_forwarded()
            return await forward(request, body, path, frozen)
        protocols = _EVALUATION if isinstance(session, PolicyAccess) else _PROTOCOLS
        if path not in protocols:
            text = f"{path} is not served here. Use {', '.join(protocols)}."
            raise RequestRefused(text, status=404, code="not_served")
        exchange = protocols[path].of_json(body, session.rules, session.items)
        for name in [name for name in dict.fromkeys(exchange.ignored) if name not in self._warned_fields]:
            self._warned_fields.add(name)
            log.warning("Ignoring %s in a request: the run's sampling and the agent's own tools apply.", name)
        encoded = await session.prepare(exchange.request)
        if path.endswith("count_tokens"):
            return web.json_response({"input_tokens": encoded.num_prompt_tokens})
        answering = asyncio.ensure_future(session.answer(encoded))
        try:
            if exchange.is_streamed:
                return await _stream(request, exchange, encoded.num_prompt_tokens, answering)
            return web.json_response(exchange.body(await answering))
        finally:
            abandon([answering])

    def _key_of(self, name: str) -> str:
        """Returns a session's key. It never starts with "-", so that it can be a command-line argument."""
        return self.key or hmac.new(self._secret, name.encode(errors="surrogateescape"), hashlib.sha256).hexdigest()

    def _session(self, name: str) -> Any:
        """Returns the AgentSession or PolicyAccess behind a base_url."""
        session = self._sessions.get(name)
        if session is None:
            raise RequestRefused(
                "There is no such session, or its agent's function has returned. Use the base_url that the function "
                "gets, and await all requests before it returns.",
                status=404,
                code="session_not_found",
            )
        return session


@contextmanager
def serving_policy(
    access: PolicyAccess, *, host: str = LOOPBACK, port: int = 0, key: str | None = None
) -> Iterator[tuple[str, str]]:
    """Yields a base_url and its key; tools can evaluate the policy there until the end of the block.

    The server has its own event loop and thread, so the caller may block. Raises RolloutError if no port can be opened.
    """

    async def opened() -> tuple[str, str]:
        await endpoint.start()
        return await sessions.enter_async_context(endpoint.serving(access, "policy"))

    async def close() -> None:
        await sessions.aclose()
        await endpoint.close()

    endpoint, sessions = OpenAIEndpoint(host=host, port=port, key=key), AsyncExitStack()
    thread = LoopThread(loop_timeout_s=_LOOP_S, on_exit=lambda error: log.error("A request raised %r.", error))
    thread.start()
    try:
        yield thread.call(opened())
    finally:
        thread.close(close, _LOOP_S)


def _requested_model(body: bytes) -> str:
    try:
        return str(json.loads(body)["model"])
    except (KeyError, RecursionError, TypeError, ValueError):
        return ""


def _model_of(name: str) -> JsonObject:
    """Describes a model in the form that OpenAI's and Anthropic's clients expect."""
    openai = {"id": name, "object": "model", "created": 0, "owned_by": "lightrl"}
    return {**openai, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


def is_every_address(host: str) -> bool:
    """Returns whether a port bound to this host is open on all addresses of the machine, as with "", "0" and "::0"."""
    try:
        addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)]
    except (OSError, UnicodeError):  # a name
        return not host
    numbers = map(ipaddress.ip_address, addresses)
    return any((getattr(number, "ipv4_mapped", None) or number).is_unspecified for number in numbers)


def _warn_of_proxy(host: str) -> None:
    """Warns if clients would use the environment's proxy, which would look for 127.0.0.1 on its own machine."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get("http") or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(host):
        log.warning(
            "Agents call this process at %s, but the environment sends HTTP requests to the proxy %s. Run "
            "`export NO_PROXY=%s,localhost` first, or configure the agent's client to use no proxy.",
            host,
            proxy,
            host,
        )


async def _stream(
    request: web.Request, exchange: Exchange, num_prompt_tokens: int, answering: asyncio.Future[Answer]
) -> web.StreamResponse:
    """Streams the answer; an error within WAITING_S becomes an HTTP error, a later one an event."""
    await asyncio.wait({answering}, timeout=WAITING_S)
    if answering.done():
        answering.result()  # raises the error, if there is one
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)

    async def send(*events: JsonObject | None) -> None:
        for event in events:
            name = f"event: {event['type']}\n" if event and "type" in event else ""
            await response.write(f"{name}data: {json.dumps(event)}\n\n".encode() if event else b": waiting\n\n")

    await send(*exchange.start_events(num_prompt_tokens))
    while not answering.done():
        await send(exchange.waiting_event())
        await asyncio.wait({answering}, timeout=WAITING_S)
    try:
        await send(*exchange.events(answering.result()))
    except RequestRefused as error:
        await send(exchange.error_event(error))
    await response.write(exchange.last_line.encode())
    await response.write_eof()
    return response


def _refusal(error: RequestRefused) -> web.Response:
    # The same request would fail again, but clients retry 5xx unless this header forbids it.
    return web.json_response(error.to_json(), status=error.status, headers={"x-should-retry": "false"})
