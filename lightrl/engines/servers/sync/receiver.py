"""The weight receiver: stores weights on a server host, from full versions and deltas.

    LIGHTRL_SERVER_TOKEN=… python -m lightrl.engines.servers.sync.receiver --host HOST --port PORT [--folder FOLDER]

The receiver does not talk to the servers. The trainer sends it a version while the servers generate, then makes them
load its folder. weights/delta_folder.py describes the checks and files. All routes except /ready require the token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import shutil
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from lightrl.concurrency.in_thread import in_thread
from lightrl.concurrency.listener import BACKLOG, Listener
from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.weights.delta_folder import DeltaFolder, NotTheBase, Version, folder_in_memory

_MAX_PART_BYTES = 2**36  # limit on a request; a part that contains one large tensor exceeds the usual size
Fields = dict[str, Any]
PROTOCOL = 4  # version of the requests; trainer and receiver must agree


class Receiver:
    """Serves the routes for one DeltaFolder."""

    def __init__(self, folder: DeltaFolder, token: str) -> None:
        self.folder = folder
        self._token = token
        self._lock = asyncio.Lock()  # one change of the folder at a time
        self._listener = Listener()

    async def serve(self, host: str, port: int) -> None:
        """Serves until SIGINT or SIGTERM, which raise GracefulExit."""
        app = web.Application(client_max_size=_MAX_PART_BYTES, middlewares=[self._check_token])
        app.router.add_get("/ready", self._ready)
        app.router.add_post("/state", self._route(self._state))
        app.router.add_post("/begin", self._route(self._begin))
        app.router.add_post("/part", self._route(self._part))
        app.router.add_post("/finish", self._route(self._finish))
        app.router.add_post("/revert", self._route(self._revert))
        runner = web.AppRunner(app, handle_signals=True, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        assert runner.server is not None
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, port), family=family, backlog=BACKLOG) as opened:
                await self._listener.accept(opened, runner.server)
        finally:
            await runner.cleanup()
            self.folder.close()

    @web.middleware
    async def _check_token(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(given.encode(), self._token.encode()):
            self._listener.note_key(request)
        elif request.path != "/ready":
            return web.json_response({"error": f"The token is missing or wrong; set {TOKEN_VARIABLE}."}, status=401)
        return await handler(request)

    def _route(
        self, answer: Callable[[web.Request], Awaitable[Fields]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            await request.read()
            try:
                return web.json_response(await answer(request))
            except NotTheBase as error:
                problem = str(error)
            except (ValueError, KeyError, TypeError) as error:
                problem = f"{type(error).__name__}: {error}"
            except OSError as error:
                problem = f"The folder {self.folder.root} is unusable: {error}. Start the receiver with a new --folder."
            return web.json_response({"error": problem})

        return handle

    async def _ready(self, request: web.Request) -> web.Response:
        return web.json_response({"protocol": PROTOCOL})

    async def _state(self, request: web.Request) -> Fields:
        async with self._lock:
            return self._current() | {"protocol": PROTOCOL}

    async def _begin(self, request: web.Request) -> Fields:
        fields = await request.json()
        async with self._lock:
            await in_thread(self.folder.begin, fields["session"], fields["base"])
            return self._current()

    async def _part(self, request: web.Request) -> Fields:
        query, body = request.query, await request.read()
        await in_thread(self.folder.write, query["session"], int(query["index"]), body, int(query["check"]))
        return {}

    async def _finish(self, request: web.Request) -> Fields:
        fields = await request.json()
        version = Version(**fields["version"])
        async with self._lock:
            await in_thread(self.folder.finish, fields["session"], version, fields["num_parts"], fields["config"])
            return self._current()

    async def _revert(self, request: web.Request) -> Fields:
        digest = (await request.json())["digest"]
        async with self._lock:
            await in_thread(self.folder.revert, digest)
            return self._current()

    def _current(self) -> Fields:
        folder = self.folder
        return {"digest": folder.version.digest, "folder": str(folder.path), "undo": folder.undo.digest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the trainer must reach it")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", help="folder for the weights, which servers can read; default: in /dev/shm")
    options = parser.parse_args()
    token = os.environ.get(TOKEN_VARIABLE)
    if not token:
        sys.exit(f"The receiver needs {TOKEN_VARIABLE}. Set it to the token that the servers and the run use.")
    folder = options.folder or folder_in_memory("lightrl-weights-")
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        receiver = Receiver(DeltaFolder(folder), token)
        with contextlib.suppress(web.GracefulExit, KeyboardInterrupt):
            asyncio.run(receiver.serve(options.host, options.port))


if __name__ == "__main__":
    main()
