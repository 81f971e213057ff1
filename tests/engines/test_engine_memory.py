"""Every resume matches a release, in the order that SGLang needs."""

import asyncio

from lightrl.engines.sglang.sync.memory import PARTS, EngineMemory


class Server:
    url = "http://a"

    def __init__(self) -> None:
        self.resumed: list[str] = []

    async def release_memory(self, tags=None):
        pass

    async def resume_memory(self, tags=None):
        self.resumed += tags


def test_weights_come_back_first_the_cache_last_and_a_server_that_was_started_anew_resumes_nothing():
    server, memory = Server(), EngineMemory()

    async def play():
        await memory.release([server], None, lambda tell: tell(server))
        await memory.resume([server], ["weights"], lambda tell: tell(server))
        await memory.resume([server], None, lambda tell: tell(server))
        await memory.release([server], ["kv_cache"], lambda tell: tell(server))
        memory.forget(server.url)
        await memory.resume([server], None, lambda tell: tell(server))

    asyncio.run(play())
    assert server.resumed == ["weights", "cuda_graph", "kv_cache"]
    assert memory.to_release(server.url) == list(PARTS)
