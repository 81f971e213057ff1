"""A fleet that grows and shrinks under load, 8 → 16 → 3 → 8 servers: what is lost, and what the living could have done.

    python -m benchmarks.elastic [--fleet 8,16,3,8] [--seconds 15] [--pace 0.05] [--sync_every 4]

The servers are fake ones in processes of their own, found through a registry: each writes at most SLOTS completions at
a time, at a fixed pace, so that a server's capacity is known. Twice as many requests as 16 servers can write are under
way all the time, and a new weight version is loaded every few seconds. Of the servers that go, every other one says so
(`Announcement.leave`), the rest are killed with -9. One JSON line at the end:

    lost_requests        requests that raised, or came back without all of their tokens
    unproven_tokens      tokens of a version that the engine had not proven when they were written
    throughput_fraction  tokens returned ÷ tokens that the servers alive could write; a server counts from the moment it
                         announces itself to the moment it leaves or is killed, loads included
    processors_busy      of this machine, on average: near 1 the servers themselves are late
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import torch
from fake_sglang.process import FakeServerProcess
from transformers import Qwen3Config

from benchmarks.report import Report
from lightrl import SGLangEngine
from lightrl.engines import Timeouts
from lightrl.engines.servers.registry import Announcement, ServerEntry
from lightrl.errors import EngineError
from lightrl.trajectory import Sampling
from lightrl.weights import Bucket

SLOTS, NUM_TOKENS = 4, 40


class Servers:
    """Those alive, oldest first, and what they could have written."""

    def __init__(self, folder: Path, pace: float) -> None:
        self.folder = folder
        self.pace = pace  # seconds of a token
        self.alive: list[tuple[FakeServerProcess, Announcement]] = []
        self.capacity = 0.0  # tokens, until `_since`
        self._since = time.monotonic()

    def add(self, server: FakeServerProcess) -> None:
        self.count()
        announcement = Announcement(self.folder)
        announcement.start([ServerEntry(server.url)])
        self.alive.append((server, announcement))

    def remove(self, *, is_told: bool) -> None:
        server, announcement = self.alive.pop(0)
        self.count(len(self.alive) + 1)
        if is_told:
            announcement.leave()
            server.stop()
        else:
            server.kill()
            announcement.end()

    def count(self, num: int | None = None) -> None:
        """Adds what was possible since the last call."""
        now = time.monotonic()
        num = len(self.alive) if num is None else num
        self.capacity += num * SLOTS / self.pace * (now - self._since)
        self._since = now


class Load:
    """Requests, always as many under way."""

    def __init__(self, engine: SGLangEngine, num: int) -> None:
        self.engine = engine
        self.num = num
        self.num_tokens = self.num_lost = self.num_unproven = 0
        self.reasons: set[str] = set()
        self.is_over = False
        self._numbers = itertools.count()

    async def run(self) -> None:
        await asyncio.gather(*(self._one_after_another() for _ in range(self.num)))

    async def _one_after_another(self) -> None:
        while not self.is_over:
            number = next(self._numbers)
            first = self.engine.weight_version
            sampling = Sampling(max_new_tokens=NUM_TOKENS, seed=number)
            try:
                (answer,) = await self.engine.generate([1, 2, 3], sampling, session=str(number))
            except EngineError as error:
                self.num_lost += 1
                self.reasons.add(str(error))
                continue
            # A version is loaded, proven and served before the engine's own number rises.
            proven = range(first, self.engine.weight_version + 2)
            self.num_unproven += sum(version not in proven for version in answer.weight_versions)
            self.num_lost += len(answer.token_ids) != NUM_TOKENS
            if not self.is_over:
                self.num_tokens += len(answer.token_ids)


async def changes(servers: Servers, spare: list[FakeServerProcess], fleet: Sequence[int], seconds: float) -> None:
    for num in fleet[1:]:
        await asyncio.sleep(seconds)
        while len(servers.alive) < num:
            servers.add(spare.pop())
        while len(servers.alive) > num:
            await asyncio.to_thread(servers.remove, is_told=len(servers.alive) % 2 == 0)
    await asyncio.sleep(seconds)


async def syncs(engine: SGLangEngine, every_s: float) -> None:
    for version in itertools.count(1):
        await asyncio.sleep(every_s)
        await asyncio.to_thread(engine.load_weights, weights(version), weight_version=version)


def weights(version: int) -> list[Bucket]:
    return [Bucket({"weight": torch.full((1024,), float(version))}, is_last=True)]


async def drive(
    engine: SGLangEngine,
    load: Load,
    servers: Servers,
    spare: list[FakeServerProcess],
    fleet: Sequence[int],
    options: argparse.Namespace,
) -> None:
    """The whole run; what is under way at its end is waited for, and counts as lost if it does not come."""
    await engine.attach()
    tasks = [asyncio.create_task(load.run()), asyncio.create_task(syncs(engine, options.sync_every))]
    servers.count()
    servers.capacity = 0.0
    await changes(servers, spare, fleet, options.seconds)
    servers.count()
    load.is_over = True
    await tasks[0]
    tasks[1].cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await tasks[1]
    await engine.detach()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", default="8,16,3,8", help="numbers of servers, one after the other")
    parser.add_argument("--seconds", type=float, default=15.0, help="at each number")
    parser.add_argument("--router", help="smg: its servers may write more at a time than SLOTS")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds that a server takes for a token")
    parser.add_argument("--sync_every", type=float, default=4.0, help="seconds between the end of a sync and the next")
    options = parser.parse_args()
    fleet = [int(num) for num in options.fleet.split(",")]
    report = Report("elastic", slots=SLOTS, seconds_per_token=options.pace, tokens_per_request=NUM_TOKENS)
    num_started = fleet[0] + sum(max(0, later - earlier) for earlier, later in itertools.pairwise(fleet))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as processes:
        started = [
            processes.enter_context(FakeServerProcess(seconds_per_token=options.pace)) for _ in range(num_started)
        ]
        servers = Servers(Path(folder), options.pace)
        for server in started[: fleet[0]]:
            servers.add(server)
        engine = SGLangEngine(
            urls=[f"file://{folder}"],
            router=options.router,
            timeouts=Timeouts(request_s=10.0, sync_s=20.0, startup_s=30.0),
        )
        processes.callback(engine.close)
        engine.start(Qwen3Config(vocab_size=1000, max_position_embeddings=100_000))
        engine.load_weights(weights(0), weight_version=0)
        load = Load(engine, 2 * max(fleet) * SLOTS)
        psutil.cpu_percent()
        asyncio.run(drive(engine, load, servers, started[fleet[0] :], fleet, options))
        busy = psutil.cpu_percent() / 100
        for _, announcement in servers.alive:
            announcement.end()
        report.add(
            "elastic",
            fleet="-".join(map(str, fleet)),
            lost_requests=load.num_lost,
            unproven_tokens=load.num_unproven,
            throughput_fraction=round(load.num_tokens / servers.capacity, 3),
            processors_busy=round(busy, 2),
            tokens=load.num_tokens,
            weight_versions=engine.weight_version + 1,
            reasons=sorted(load.reasons),
        )
    report.finish()


if __name__ == "__main__":
    main()
