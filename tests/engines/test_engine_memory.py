"""Every resume matches a release, in the order that SGLang needs."""

from __future__ import annotations

import asyncio

from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server
from lightrl.engines.sglang.client import SGLangClient


class Client(SGLangClient):
    """Remembers what it was asked to release and to resume."""

    def __init__(self) -> None:
        super().__init__("http://a")
        self.released: list[str] = []
        self.resumed: list[str] = []

    async def release_memory(self, tags=None):
        self.released += tags

    async def resume_memory(self, tags=None):
        self.resumed += tags


def test_weights_come_back_first_the_cache_last_and_a_server_that_was_lost_resumes_nothing() -> None:
    fleet, client = ServerFleet(), Client()
    server = fleet.join(Server(client))

    async def scenario() -> None:
        await server.release_memory()
        await server.release_memory()
        assert client.released == ["weights", "cuda_graph", "kv_cache"]
        await server.resume_memory(["weights"])
        await server.resume_memory()
        assert client.resumed == ["weights", "cuda_graph", "kv_cache"]
        await server.release_memory()
        fleet.lose(server, "its process ended")
        await server.resume_memory()

    asyncio.run(scenario())
    assert client.resumed == ["weights", "cuda_graph", "kv_cache"]
