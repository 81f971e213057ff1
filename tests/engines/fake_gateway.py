"""FakeGateway: the routes of SGLang's gateway (smg 1.13.0) that lightrl uses, with real sockets, in a thread.

As it was measured there: a worker is added in the background; one that is deleted gets no request from then on, is
listed as `draining` for a while, and cannot be added again meanwhile; a request that is in flight goes on; what a
client gives up is given up at the worker too.
"""

import asyncio
import itertools
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
from aiohttp import web

DRAIN_S = 2.0  # for which a deleted worker is listed


class FakeGateway:
    """Sends each request to the worker whose turn it is; port 0 is a free one."""

    def __init__(self, *, port: int = 0) -> None:
        self.port = port
        self.workers: dict[str, dict[str, Any]] = {}  # by address
        self.misroutes_to = ""  # a server that gets all requests
        self._ids = (str(number) for number in itertools.count())
        self._turns = itertools.count()
        self._is_frozen = False
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ready(self) -> list[str]:
        return [url for url, worker in self.workers.items() if worker["status"] == "ready"]

    def freeze(self) -> None:
        """Takes requests and answers none of them."""
        self._is_frozen = True

    @web.middleware
    async def _around(self, request: web.Request, handler: Any) -> Any:
        if self._is_frozen:
            await asyncio.sleep(3600)
        return await handler(request)

    async def _list(self, request: web.Request) -> web.Response:
        return web.json_response({"workers": list(self.workers.values()), "total": len(self.workers)})

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["url"] in self.workers:
            return web.json_response({"code": "WORKER_ALREADY_EXISTS"}, status=409)
        worker = {"id": next(self._ids), "url": body["url"], "status": "ready", "load": 0}
        self._loop.call_later(0.02, self.workers.setdefault, body["url"], worker)
        return web.json_response({"status": "accepted", "worker_id": worker["id"]}, status=202)

    async def _delete(self, request: web.Request) -> web.Response:
        for url, worker in self.workers.items():
            if worker["id"] == request.match_info["id"]:
                worker["status"] = "draining"
                self._loop.call_later(DRAIN_S, self.workers.pop, url, None)
                return web.json_response({"status": "accepted"}, status=202)
        return web.json_response({"code": "WORKER_NOT_FOUND"}, status=404)

    async def _generate(self, request: web.Request) -> web.Response:
        content = await request.read()
        if not isinstance(json.loads(content)["input_ids"][0], int):
            return web.json_response({"error": "one request at a time"}, status=422)
        if not self.ready:
            return web.json_response({"error": {"code": "model_not_found"}}, status=404)
        url = self.misroutes_to or self.ready[next(self._turns) % len(self.ready)]
        worker = self.workers.get(url, {"load": 0})
        worker["load"] += 1
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(f"{url}/generate", data=content, headers=headers) as answer:
                body = await answer.read()
                named = {"x-smg-routed-worker-id": url}
                return web.Response(status=answer.status, body=body, content_type="application/json", headers=named)
        except aiohttp.ClientError as error:
            return web.json_response(
                {"error": {"code": "call_upstream_request_error", "reason": str(error)}}, status=500
            )
        finally:
            worker["load"] -= 1

    async def _run(self, started: threading.Event) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as self._session:
            app = web.Application(middlewares=[self._around], client_max_size=2**28)
            app.router.add_get("/workers", self._list)
            app.router.add_post("/workers", self._add)
            app.router.add_delete("/workers/{id}", self._delete)
            app.router.add_post("/generate", self._generate)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self.port = runner.addresses[0][1]
            started.set()
            await self._ended.wait()
            await runner.cleanup()

    @contextmanager
    def serving(self) -> Iterator["FakeGateway"]:
        """In a thread of its own; `stop` ends it early."""
        started = threading.Event()

        def run() -> None:
            self._loop.run_until_complete(self._run(started))
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(600)
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(600)
