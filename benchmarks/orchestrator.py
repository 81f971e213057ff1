"""Compares the controller's processor time per request with that of a bare loop over the same HTTP client.

    python -m benchmarks.orchestrator [--quick]

Two fake servers in separate processes answer each request after a sleep, with 1,000 precomputed tokens and their
logprobs. On one side, a RolloutController with SGLangEngine and SingleTurn runs all requests as one batch; on the
other, a loop posts the same bodies with aiohttp and parses the same JSON. Both have the same number of requests in
flight, on as many connections, and take turns. Processor time covers all threads. No text is decoded.

Rows of the table:
    bare          a semaphore, one task per request, post, json.loads
    engine        SGLangEngine.generate in as many tasks
    controller    the whole path to groups with rewards
    workers_N     the same with `workflow_workers=N`: the time is rank 0's, and `worker_ms_per_request` is the sum of
                  all workers; `--workers 1,2` makes a row for each
    routing       the choice of a server among many (ServerFleet), which is part of the engine's time

`at_most_...` is the rate that one core can sustain, and rank 0's maximum: the event loop is one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import aiohttp
import psutil
import torch
from aiohttp import web
from fake_sglang import server as fake
from fake_sglang.process import FakeServerProcess
from fake_sglang.script import ScriptedModel
from forked import end_with_parent
from transformers import Qwen3Config

from benchmarks.report import PeakMemory, Report, interleaved, median_ratio
from lightrl.engines import SGLangEngine
from lightrl.engines.servers.connection import raise_open_files
from lightrl.engines.servers.fleet import ServerFleet
from lightrl.engines.servers.server import Server as EngineServer
from lightrl.engines.sglang.client import SGLangClient
from lightrl.rewards import RewardResult
from lightrl.rollout import RolloutController, RolloutSettings
from lightrl.rollout.prompts import Prompts
from lightrl.trajectory import Prompt, Sampling, Trajectory
from lightrl.weights import Bucket
from lightrl.workflows import SingleTurn

VOCAB_SIZE = 150_000
PROMPT = [17] * 200
GROUP_SIZE = 4
NUM_SERVERS = 2
NO_ID = b"0" * 32


class CannedServer(fake.FakeServer):
    """Answers every request with the same tokens, so that the fakes do less work than the measured code."""

    delay_s = 0.5
    num_tokens = 1000

    async def _generate(self, body: dict[str, Any]) -> Any:
        await asyncio.sleep(self.delay_s)
        version = self.model.version
        if self._canned[0] != version:
            self._canned = (version, canned_answer(self.num_tokens, version))
        answer = self._canned[1].replace(NO_ID, body["rid"].encode(), 1)
        return web.Response(body=answer, content_type="application/json")

    _canned: tuple[str, bytes] = ("", b"")


def canned_answer(num_tokens: int, version: str) -> bytes:
    token_ids = [(number * 7919) % VOCAB_SIZE for number in range(num_tokens)]
    meta = {
        "id": NO_ID.decode(),
        "finish_reason": {"type": "length", "length": num_tokens},
        "prompt_tokens": len(PROMPT),
        "completion_tokens": num_tokens,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": num_tokens}],
        "output_token_logprobs": [[-(0.1 + token / 7e4), token, None] for token in token_ids],
    }
    return json.dumps({"output_ids": token_ids, "meta_info": meta}).encode()


class Server(FakeServerProcess):
    """A canned server in another process, which imports no torch."""

    def __init__(self, delay_s: float, num_tokens: int) -> None:
        super().__init__()
        self.options = [str(delay_s), str(num_tokens)]

    def start(self, port: int = 0) -> Server:
        command = [sys.executable, "-m", "benchmarks.orchestrator", "--serve", *self.options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(json.loads(self._process.stdout.readline())["port"])
        return self


async def serve(delay_s: float, num_tokens: int) -> None:
    server = CannedServer(ScriptedModel(vocab_size=VOCAB_SIZE), arguments={})
    server.delay_s, server.num_tokens = delay_s, num_tokens
    await fake.serve(server)


class InstantRewards:
    """Returns a reward immediately."""

    def start(self) -> None: ...

    def compute_rewards(self, trajectories: Sequence[Trajectory]) -> list[asyncio.Future[RewardResult]]:
        futures = [asyncio.get_running_loop().create_future() for _ in trajectories]
        for future in futures:
            future.set_result(RewardResult(1.0))
        return futures

    def close(self) -> None: ...


class NoText:
    """A tokenizer that decodes nothing."""

    eos_token_id = pad_token_id = None

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return ""


class SamePrompts(Prompts):
    def __getitem__(self, position: int) -> Prompt:
        return Prompt(f"p{position}", token_ids=list(PROMPT))


@dataclasses.dataclass
class Setting:
    urls: list[str]
    in_flight: int
    num_requests: int
    sampling: Sampling
    workers: int = 0


def bare_loop(setting: Setting) -> None:
    """Does the minimum that a client must do."""

    async def play() -> None:
        limit = asyncio.Semaphore(setting.in_flight)
        connector = aiohttp.TCPConnector(limit=setting.in_flight)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=600)) as session:

            async def one(number: int) -> int:
                body = {
                    "rid": secrets.token_hex(16),
                    "input_ids": PROMPT,
                    "sampling_params": {"max_new_tokens": setting.sampling.max_new_tokens, "sampling_seed": number},
                    "return_logprob": True,
                }
                url = setting.urls[number % len(setting.urls)] + "/generate"
                async with limit, session.post(url, data=json.dumps(body).encode()) as response:
                    return len(json.loads(await response.read())["output_ids"])

            written = await asyncio.gather(*(one(number) for number in range(setting.num_requests)))
            assert set(written) == {setting.sampling.max_new_tokens}

    asyncio.run(play())


@contextmanager
def started_engine(setting: Setting) -> Iterator[SGLangEngine]:
    engine = SGLangEngine(urls=setting.urls)
    engine.should_verify = False
    engine.start(Qwen3Config(vocab_size=VOCAB_SIZE, max_position_embeddings=32768))
    try:
        engine.load_weights(iter([Bucket({"weight": torch.zeros(1)}, is_last=True)]), weight_version=0)
        yield engine
    finally:
        engine.close()


def engine_alone(setting: Setting) -> Callable[[], None]:
    def play() -> None:
        async def scenario() -> None:
            await engine.attach()
            limit = asyncio.Semaphore(setting.in_flight)

            async def one(number: int) -> int:
                async with limit:
                    (completion,) = await engine.generate(list(PROMPT), setting.sampling, session=str(number))
                return len(completion.token_ids)

            await asyncio.gather(*(one(number) for number in range(setting.num_requests)))
            await engine.detach()

        with started_engine(setting) as engine, stopwatch():
            asyncio.run(scenario())

    return play


def controller_run(setting: Setting) -> None:
    from benchmarks import orchestrator  # not `__main__`, which a worker cannot import

    num_groups = setting.num_requests // GROUP_SIZE
    with started_engine(setting) as engine:
        controller = RolloutController(
            engine,
            SingleTurn(orchestrator.NoText()),  # type: ignore[arg-type]
            InstantRewards(),  # type: ignore[arg-type]
            RolloutSettings(
                group_size=GROUP_SIZE,
                groups_per_iteration=num_groups,
                total_groups=num_groups,
                max_staleness=1,
                max_concurrent=max(1, setting.in_flight // GROUP_SIZE),
                workflow_workers=setting.workers,
            ),
            sampling=setting.sampling,
            prompts=SamePrompts(),  # type: ignore[arg-type]
        )
        try:
            workers = ready_workers(setting.workers)
            with stopwatch(workers):
                groups = controller.take(0)
        finally:
            controller.close()
    assert sum(len(group.trajectories) for group in groups) == num_groups * GROUP_SIZE


def ready_workers(num: int) -> list[psutil.Process]:
    """Returns this process's workers once all of them have imported everything and wait."""
    while True:
        children = psutil.Process().children(recursive=True) if num else []
        workers = [child for child in children if "lightrl.rollout.workflow_worker" in " ".join(child.cmdline()[:4])]
        before = [sum(worker.cpu_times()[:2]) for worker in workers]
        time.sleep(1.0 if num else 0.0)
        if len(workers) == num and all(
            sum(worker.cpu_times()[:2]) - was < 0.1 for worker, was in zip(workers, before, strict=True)
        ):
            return workers


class _Stopwatch:
    processor_s = 0.0
    workers_s = 0.0  # processor time of these
    wall_s = 0.0


@contextmanager
def stopwatch(workers: Sequence[psutil.Process] = ()) -> Iterator[None]:
    processor, wall = time.process_time(), time.perf_counter()
    workers_s = sum(sum(worker.cpu_times()[:2]) for worker in workers)
    yield
    _Stopwatch.processor_s = time.process_time() - processor
    _Stopwatch.wall_s = time.perf_counter() - wall
    _Stopwatch.workers_s = sum(sum(worker.cpu_times()[:2]) for worker in workers) - workers_s


def measure(name: str, setting: Setting, servers: list[Server], report: Report) -> float:
    """Returns this process's processor milliseconds per request."""
    fakes_before = sum(server.stats()["processor_s"] for server in servers)
    with PeakMemory() as memory:
        if name == "bare":
            with stopwatch():
                bare_loop(setting)
        elif name == "engine":
            engine_alone(setting)()
        else:
            controller_run(dataclasses.replace(setting, workers=int(name.partition("_")[2] or 0)))
    per_request_ms = 1e3 * _Stopwatch.processor_s / setting.num_requests
    fakes = [server.stats() for server in servers]
    busy = (sum(stats["processor_s"] for stats in fakes) - fakes_before) / (len(servers) * _Stopwatch.wall_s)
    held_kib = 1024 * (memory.peak_rss_mib - memory.start_rss_mib) / setting.num_requests
    report.add(
        name,
        in_flight=setting.in_flight,
        requests=setting.num_requests,
        processor_ms_per_request=round(per_request_ms, 3),
        at_most_requests_per_s=round(1e3 / per_request_ms),
        at_most_tokens_per_s=round(1e3 / per_request_ms * setting.sampling.max_new_tokens),
        at_most_mb_per_s=round(len(canned_answer(setting.sampling.max_new_tokens, "0")) / per_request_ms / 1e3, 1),
        wall_s=round(_Stopwatch.wall_s, 2),
        worker_ms_per_request=round(1e3 * _Stopwatch.workers_s / setting.num_requests, 3),
        fakes_busy_fraction=round(busy, 3),
        peak_kib_per_request=round(held_kib, 1),
        **memory.values(),
    )
    return per_request_ms


def measure_routing(report: Report, num_servers: int, num_requests: int) -> None:
    fleet = ServerFleet()
    for number in range(num_servers):
        fleet.admit(fleet.join(EngineServer(SGLangClient(f"http://{number}"))), 0)
    started = time.process_time()
    for number in range(num_requests):
        server = fleet.choose(str(number))
        assert server is not None
        server.outstanding_tokens += 1000
    per_request_ms = 1e3 * (time.process_time() - started) / num_requests
    report.add("routing", servers=num_servers, processor_ms_per_request=round(per_request_ms, 4))


def contenders_of(workers: str) -> list[str]:
    return ["bare", "engine", "controller", *(f"workers_{num}" for num in workers.split(",") if num)]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny numbers, as a smoke test")
    parser.add_argument("--in-flight", default="100,1000,4096")
    parser.add_argument("--requests", type=int, default=4096, help="per measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=400, help="requests/s that the fakes answer")
    parser.add_argument("--workers", default="", help="numbers of workflow workers, such as 1,2")
    parser.add_argument("--serve", nargs=2, metavar=("DELAY_S", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    hard = raise_open_files()
    if options.serve:
        end_with_parent()
        asyncio.run(serve(float(options.serve[0]), int(options.serve[1])))
        return
    num_tokens, repeats, requests = (20, 1, 40) if options.quick else (1000, options.repeats, options.requests)
    levels = [8, 40] if options.quick else [int(level) for level in options.in_flight.split(",")]
    report = Report("orchestrator", tokens=num_tokens, servers=NUM_SERVERS, open_files=hard)
    summary: dict[str, Any] = {}
    for level in levels:
        # The sleep grows with the number in flight, so the request rate and the load of the fakes stay the same.
        servers = [
            Server(0.05 if options.quick else max(0.5, level / options.rate), num_tokens) for _ in range(NUM_SERVERS)
        ]
        try:
            urls = [server.start().url for server in servers]
            setting = Setting(urls, level, max(requests, level), Sampling(max_new_tokens=num_tokens))
            contenders = {
                name: functools.partial(measure, name, setting, servers, report)
                for name in contenders_of(options.workers)
            }
            times_ms = interleaved(contenders, repeats=repeats)
        finally:
            for server in servers:
                server.stop()
        for name in contenders_of(options.workers)[1:]:
            summary[f"{name}_ratio_{level}"] = median_ratio(times_ms[name], times_ms["bare"])["ratio"]
        summary[f"controller_ms_{level}"] = round(statistics.median(times_ms["controller"]), 3)
    for num_servers in (8, 128, 1024):
        measure_routing(report, num_servers, 40 if options.quick else 1000)
    report.finish(**summary)


if __name__ == "__main__":
    main()
