"""OpenAIEndpoint: the policy behind OpenAI's chat-completions API on a local port, one base_url for each session.

    GET  /v1/models                              POST /sessions/<id>/v1/chat/completions
    GET  /sessions/<id>/v1/models

It binds to a free port of 127.0.0.1, and every route requires the random key of this run as a Bearer token. OpenAI's
`responses` API is not served.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import secrets
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

from aiohttp import web

from lightrl.checks.user_code import user_code
from lightrl.errors import RolloutError
from lightrl.trajectory import JsonObject
from lightrl.workflows.agent_session import AgentSession
from lightrl.workflows.chat_protocol import (
    ChatRequest,
    RequestRefused,
    render_chunks,
    render_completion,
    render_models,
)

log = logging.getLogger(__name__)

_HOST = "127.0.0.1"
_MAX_BODY_BYTES = 64 * 2**20
_SHUTDOWN_TIMEOUT_S = 1.0
_KEEPALIVE_TIMEOUT_S = 3600.0  # longer than any client's, or one could write to a connection that is closing
_BACKLOG = 1024  # connections that many agents open at once
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class OpenAIEndpoint:
    """A server in one task of the event loop on which it was started.

    Cancelling that task closes its port and connections; the end of `asyncio.run` and the controller's `close` cancel
    all tasks of their loops. So does `close`.

    Args:
        max_sessions: at the same time; further ones wait.
    """

    def __init__(self, *, max_sessions: int = 64) -> None:
        self.max_sessions = max_sessions
        self.api_key = secrets.token_hex(32)  # never starts with "-", so it can be a command's argument
        self._sessions: dict[str, AgentSession] = {}
        self._has_warned: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None
        self._port: asyncio.Future[int] | None = None
        self._slots: asyncio.Semaphore | None = None

    async def start(self) -> None:
        """Waits until the port is open; does nothing if it is open already.

        Raises:
            RolloutError: if no port can be opened.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop or self._serving is None or self._serving.done():
            _warn_of_proxy()
            self._loop, self._port = loop, loop.create_future()
            self._slots = asyncio.Semaphore(self.max_sessions)
            self._serving = loop.create_task(self._serve(self._port), name="lightrl-openai-endpoint")
        assert self._port is not None
        try:
            await asyncio.shield(self._port)
        except OSError as error:
            raise RolloutError(f"The agents' endpoint could not open a port on {_HOST}: {error}.") from error

    async def close(self) -> None:
        """Closes port, connections and sessions. May be called twice."""
        if self._serving is not None and self._loop is asyncio.get_running_loop():
            self._serving.cancel()
            await asyncio.wait({self._serving})

    @asynccontextmanager
    async def serving(self, session: AgentSession) -> AsyncIterator[str]:
        """The base_url of this session, which is open until the end of the block.

        Waits until one of `max_sessions` places is free.
        """
        assert self._port is not None, "start comes first"
        assert self._slots is not None, "start comes first"
        async with self._slots:
            name = secrets.token_hex(16)
            self._sessions[name] = session
            try:
                yield f"http://{_HOST}:{self._port.result()}/sessions/{name}/v1"
            finally:
                del self._sessions[name]
                session.close()

    async def _serve(self, port: asyncio.Future[int]) -> None:
        """Serves until it is cancelled."""
        app = web.Application(middlewares=[self._guard], client_max_size=_MAX_BODY_BYTES)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/sessions/{session}/v1/models", self._models)
        app.router.add_post("/sessions/{session}/v1/chat/completions", self._chat_completions)
        # Cancelled with its connection, a request leaves the engine when the agent's client abandons it.
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
            keepalive_timeout=_KEEPALIVE_TIMEOUT_S,
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, _HOST, 0, backlog=_BACKLOG).start()
            port.set_result(runner.addresses[0][1])
            await asyncio.Event().wait()
        except OSError as error:
            port.set_exception(error)
        finally:
            port.cancel()  # no effect if it is done
            for session in self._sessions.values():
                session.close()
            await runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Checks the key, and gives every error the form that OpenAI's clients read."""
        try:
            expected = f"Bearer {self.api_key}".encode()
            if not hmac.compare_digest(
                request.headers.get("Authorization", "").encode(errors="surrogateescape"), expected
            ):
                raise RequestRefused(
                    "The API key is wrong. Use the api_key that the agent's function gets.",
                    status=401,
                    code="invalid_api_key",
                )
            return await handler(request)
        except RequestRefused as error:
            return _refusal(error)
        except web.HTTPRequestEntityTooLarge:
            text = f"The request has more than {_MAX_BODY_BYTES >> 20} MiB. Send shorter messages."
            return _refusal(RequestRefused(text, status=413, code="request_too_large"))
        except web.HTTPException as error:
            return _refusal(
                RequestRefused(
                    f"{request.method} {request.path} is not served ({error.reason}). Use chat/completions or models "
                    "below the base_url that the agent's function gets.",
                    status=error.status,
                    code="not_served",
                )
            )

    async def _models(self, request: web.Request) -> web.StreamResponse:
        if "session" in request.match_info:
            self._session(request)
        return web.json_response(render_models())

    async def _chat_completions(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        chat = ChatRequest.of_json(await request.read())
        self._warn_of_ignored(chat.ignored)

        def failed(error: BaseException) -> RequestRefused:
            message = f"A request of prompt {session.prompt.id!r} raised {type(error).__name__}: {error}."
            session.fail(RolloutError(f"{message} Fix the messages, the chat template or the tool parser."))
            return RequestRefused(message, status=500, code="rollout_failed")

        with user_code(failed, RequestRefused):  # a chat template and a tool parser
            answer = await session.complete(chat)
        if not chat.is_streamed:
            return web.json_response(render_completion(answer, chat))
        return await _stream(request, render_chunks(answer, chat))

    def _session(self, request: web.Request) -> AgentSession:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            raise RequestRefused(
                "There is no such session, or its agent's function has returned. Use the base_url that it gets, and "
                "await all requests there.",
                status=404,
                code="session_not_found",
            )
        return session

    def _warn_of_ignored(self, names: tuple[str, ...]) -> None:
        for name in names:
            if name not in self._has_warned:
                self._has_warned.add(name)
                log.warning(
                    "Ignoring %s of an agent's request: the run's sampling applies to all requests. Set it there.",
                    name,
                )


def _warn_of_proxy() -> None:
    """OpenAI's clients use the environment's proxy, which would resolve 127.0.0.1 to its own machine."""
    proxies = urllib.request.getproxies()
    proxy = proxies.get("http") or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(_HOST):
        log.warning(
            "Agents call this process at %s, but the environment sends HTTP requests to the proxy %s. Run "
            "`export NO_PROXY=%s,localhost` first, or give the agent's client no proxy.",
            _HOST,
            proxy,
            _HOST,
        )


async def _stream(request: web.Request, chunks: Iterator[JsonObject]) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks:
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


def _refusal(error: RequestRefused) -> web.Response:
    # The same request would fail again; OpenAI's clients retry 5xx unless this header says no.
    return web.json_response(error.to_json(), status=error.status, headers={"x-should-retry": "false"})
