"""Proxy: HTTP in front of a real SGLang server, to drop, repeat or change the requests that a test chooses."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

Body = dict[str, Any]
Answer = dict[str, Any]
# Gets the proxy and a request's body. Returns the body to send on, or None and what the client is told instead.
Change = Callable[["Proxy", Body], Awaitable[tuple[Body | None, Answer]]]
SUCCESS = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


class Proxy:
    """Sends every request on, except the next one to `path` after `arm`.

    Args:
        server: url and token of the server.
    """

    def __init__(self, server: dict[str, Any]) -> None:
        self.server = server
        self.url = ""
        self.num_changed = 0
        self.bodies: dict[str, list[Body]] = {}  # of all requests, by path
        self._changes: dict[str, Change] = {}
        self._session: aiohttp.ClientSession | None = None

    def arm(self, path: str, change: Change) -> None:
        self._changes[path] = change

    async def post(self, path: str, body: Body) -> Answer:
        """Asks the server."""
        headers = {"Authorization": f"Bearer {self.server['token']}"}
        async with self._session.post(self.server["url"] + path, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            content = await answer.read()
            return json.loads(content) if content.startswith(b"{") else {}

    async def _handle(self, request: web.Request) -> web.Response:
        content = await request.read()
        if content.startswith(b"{") and not request.path.startswith("/generate"):
            body = json.loads(content)
            self.bodies.setdefault(request.path, []).append(body)
            change = self._changes.pop(request.path, None)
            if change is not None:
                self.num_changed += 1
                changed, answer = await change(self, body)
                if changed is None:
                    return web.json_response(answer)
                content = json.dumps(changed).encode()
        kept = {name: request.headers[name] for name in ("Authorization", "Content-Type") if name in request.headers}
        async with self._session.request(
            request.method, self.server["url"] + request.path_qs, data=content, headers=kept
        ) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)

    async def _run(self, started: threading.Event, ended: asyncio.Event) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as self._session:
            app = web.Application(client_max_size=2**28)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            started.set()
            await ended.wait()
            await runner.cleanup()


@contextmanager
def proxy_of(server: dict[str, Any]) -> Iterator[Proxy]:
    """In a thread of its own."""
    proxy, started, loop = Proxy(server), threading.Event(), asyncio.new_event_loop()
    ended = asyncio.Event()

    def run() -> None:
        loop.run_until_complete(proxy._run(started, ended))
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(30)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(30)
