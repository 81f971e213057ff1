"""Every resume matches a release, whatever the order of the calls."""

import asyncio
import random

from lightrl.engines.sglang.sync.memory import PARTS, EngineMemory


class Server:
    """Dies, as SGLang does, at a resume of what it has not released."""

    url = "http://a"

    def __init__(self) -> None:
        self.released: set[str] = set()
        self.told: list[tuple[str, str]] = []

    async def release_memory(self, tags=None):
        for tag in tags:
            assert tag not in self.released
            self.released.add(tag)
            self.told.append(("release", tag))

    async def resume_memory(self, tags=None):
        for tag in tags:
            self.released.remove(tag)
            self.told.append(("resume", tag))


async def ask(server, tell):
    return {server.url: await tell(server)}


def test_weights_come_back_first_and_the_cache_last():
    server, memory = Server(), EngineMemory()

    async def play():
        await memory.release([server], None, lambda tell: ask(server, tell))
        await memory.resume([server], ["weights"], lambda tell: ask(server, tell))
        await memory.resume([server], None, lambda tell: ask(server, tell))

    asyncio.run(play())
    assert [tag for what, tag in server.told if what == "resume"] == ["weights", "cuda_graph", "kv_cache"]


def test_any_order_of_releases_and_resumes_matches():
    server, memory, draw = Server(), EngineMemory(), random.Random(0)

    async def play():
        for _ in range(300):
            act = draw.choice([memory.release, memory.resume])
            parts = draw.choice([None, draw.sample(PARTS, draw.randint(0, 3))])
            await act([server], parts, lambda tell: ask(server, tell))
            assert memory.released(server.url) == server.released

    asyncio.run(play())


def test_a_server_that_was_started_anew_holds_all_its_memory():
    server, memory = Server(), EngineMemory()
    asyncio.run(memory.release([server], ["kv_cache"], lambda tell: ask(server, tell)))
    memory.forget(server.url)
    assert memory.to_resume(server.url) == []
    assert memory.to_release(server.url) == list(PARTS)
