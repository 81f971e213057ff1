"""Compares the routing of ServerFleet and of SGLang's gateway (smg): computed prompt tokens and load of servers.

    pip install smg && python -m benchmarks.routing [--servers 4] [--groups 24]

SGLangEngine sends the requests, once with its own routing and once with `router: smg`.

Servers are small HTTP programs with a paged prefix cache like SGLang's; each computes `SLOTS` requests at a time, at a
fixed pace per uncached prompt token and per generated token. All samples start together. A group's samples share a
prompt, all prompts begin with the same instruction, and each turn's prompt is all earlier turns plus a reply. Columns:

    computed_fraction    prompt tokens computed ÷ prompt tokens: 1 without a cache
    lower_bound          computed_fraction of a single server with one sample after another
    imbalance            busiest server ÷ mean, by seconds of computation
    wall_s               seconds until the last sample is done; the gateway adds an HTTP hop
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import torch
from aiohttp import web
from transformers import AutoConfig

from benchmarks.report import Report
from lightrl.engines import SGLangEngine
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

PAGE = 16
SLOTS, PREFILL_S, DECODE_S = 8, 2e-5, 2e-4  # seconds per token
INSTRUCTION, PROMPT, COMPLETION, REPLY, TURNS, SAMPLES = 256, 256, 128, 64, 3, 8  # tokens, and how many


class CachedServer:
    """Answers /generate; keeps every page that it has computed."""

    def __init__(self) -> None:
        self.pages: set[int] = set()
        self.prompt_tokens = self.computed_tokens = 0
        self.busy_s = 0.0
        self.url = self.weight_version = ""
        self._slots = asyncio.Semaphore(SLOTS)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = body["input_ids"]
        async with self._slots:
            computed = self.compute(tokens)
            seconds = PREFILL_S * computed + DECODE_S * COMPLETION
            self.busy_s += seconds
            await asyncio.sleep(seconds)
            written = [random.Random(f"{body['rid']}/{place}").randrange(50_000) for place in range(COMPLETION)]
            self.compute([*tokens, *written])
        self.prompt_tokens += len(tokens)
        self.computed_tokens += computed
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "weight_version": self.weight_version}
        meta["prompt_tokens"] = len(tokens)
        meta["output_token_logprobs"] = [[-1.0, token, None] for token in written]
        return web.json_response({"text": "", "output_ids": written, "meta_info": meta})

    async def load(self, request: web.Request) -> web.Response:
        self.weight_version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def facts(self, request: web.Request) -> web.Response:
        facts = {"model_path": "model", "served_model_name": "model", "is_generation": True, "tp_size": 1}
        return web.json_response(facts | {"weight_version": self.weight_version})

    def compute(self, tokens: Sequence[int]) -> int:
        """Caches a prompt's pages; returns the number of tokens that were not cached."""
        pages = set(page_names(tokens))
        missing = pages - self.pages
        self.pages |= pages
        return len(missing) * PAGE + len(tokens) % PAGE

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.load)
        for path in ("/pause_generation", "/continue_generation"):
            app.router.add_post(path, lambda request: web.Response())
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, lambda request: web.Response())
        for path in ("/model_info", "/get_model_info", "/server_info", "/get_server_info"):
            app.router.add_get(path, self.facts)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


def page_names(tokens: Sequence[int]) -> list[int]:
    """Returns a name for each whole page, which depends on all pages before it."""
    names, name = [], 0
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        name = hash((name, *tokens[start : start + PAGE]))
        names.append(name)
    return names


def ids(name: str, num: int) -> list[int]:
    source = random.Random(name)
    return [source.randrange(50_000) for _ in range(num)]


Post = Callable[[str, str, list[int]], Awaitable[list[int]]]  # session, request's name, prompt → what was written


async def sample(post: Post, group: int, number: int, seen: list[list[int]]) -> None:
    session = f"{group}/{number}"
    tokens = [*ids("instruction", INSTRUCTION), *ids(f"prompt {group}", PROMPT)]
    for turn in range(TURNS):
        seen.append(tokens)
        written = await post(session, f"{session}/{turn}", tokens)
        tokens = [*tokens, *written, *ids(f"reply {session}/{turn}", REPLY)]


@asynccontextmanager
async def engine_on(servers: Sequence[CachedServer], router: str | None) -> AsyncIterator[Post]:
    """Yields a function that sends requests to an engine, which has loaded its first version."""
    urls = [server.url for server in servers]
    engine = SGLangEngine(urls=urls, router=router)
    engine.should_verify = False
    buckets = [Bucket({"weight": torch.zeros(1)}, is_last=True)]
    try:
        await asyncio.to_thread(engine.start, AutoConfig.for_model("llama", vocab_size=50_000))
        await asyncio.to_thread(engine.load_weights, buckets, weight_version=0)

        async def post(session: str, name: str, tokens: list[int]) -> list[int]:
            seed = random.Random(name).randrange(2**31)
            (written,) = await engine.generate(tokens, Sampling(max_new_tokens=COMPLETION, seed=seed), session=session)
            return list(written.token_ids)

        yield post
    finally:
        await asyncio.to_thread(engine.close)


async def measured(router: str, num_servers: int, num_groups: int) -> dict[str, Any]:
    servers, seen = [CachedServer() for _ in range(num_servers)], list[list[int]]()
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.serving())
        post = await stack.enter_async_context(engine_on(servers, None if router == "lightrl" else router))
        seconds = await play(post, num_groups, seen)
    tokens = sum(server.prompt_tokens for server in servers)
    alone, computed = CachedServer(), 0
    for prompt in sorted(seen, key=len):  # a turn after the one before
        if len(prompt) > INSTRUCTION + PROMPT:
            alone.compute(prompt[:-REPLY])  # what the turn before was asked and wrote
        computed += alone.compute(prompt)
    return {
        "router": router,
        "computed_fraction": round(sum(server.computed_tokens for server in servers) / tokens, 4),
        "lower_bound": round(computed / tokens, 4),
        "imbalance": round(max(one.busy_s for one in servers) * num_servers / sum(one.busy_s for one in servers), 3),
        "wall_s": round(seconds, 2),
    }


async def play(post: Post, num_groups: int, seen: list[list[int]]) -> float:
    began = time.monotonic()
    await asyncio.gather(
        *(sample(post, group, number, seen) for group in range(num_groups) for number in range(SAMPLES))
    )
    return time.monotonic() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--groups", type=int, default=24, help=f"prompts, each answered {SAMPLES} times")
    parser.add_argument("--routers", default="lightrl,smg")
    given = parser.parse_args(arguments)
    if "smg" in given.routers and shutil.which("smg") is None:
        parser.error("smg is not installed: pip install smg, or --routers lightrl.")
    report = Report("routing", slots=SLOTS, prefill_s=PREFILL_S, decode_s=DECODE_S, turns=TURNS, samples=SAMPLES)
    for router in given.routers.split(","):
        values = asyncio.run(measured(router, given.servers, given.groups))
        report.add("routing", servers=given.servers, groups=given.groups, **values, peak_rss_mib=0)
    report.finish(["router", "computed_fraction", "lower_bound", "imbalance", "wall_s"])


if __name__ == "__main__":
    main()
