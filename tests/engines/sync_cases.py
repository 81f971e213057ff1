"""Servers, versions and one sync, for tests of the load protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from fake_sglang.process import FakeServerProcess
from torch import Tensor

from lightrl.engines.sglang.client import SGLangClient
from lightrl.engines.sglang.sync.report import SyncReport
from lightrl.engines.sglang.sync.server_sync import ServerSync
from lightrl.engines.sglang.sync.transports import WeightTransport
from lightrl.engines.sglang.timeouts import Timeouts
from lightrl.weights import Bucket, bucketed


def weights(version: int, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters that tell their version."""
    generator = torch.Generator().manual_seed(version)
    if like is None:
        like = {"a.weight": torch.empty(40, 8), "b.weight": torch.empty(64)}
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in like.items()}


async def fed(buckets: Sequence[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


def sync(
    servers: Sequence[FakeServerProcess],
    transport: WeightTransport,
    named: dict[str, Tensor] | None,
    weight_version: int,
    *,
    bucket_bytes: int = 1000,
    request_s: float = 20.0,
    previous_version: int | None = None,
    report: SyncReport | None = None,
    **settings: Any,
) -> SyncReport:
    """One sync on an event loop of its own; None for `named` loads what the transport holds."""

    async def run() -> SyncReport:
        clients = [
            SGLangClient(server.url, timeouts=Timeouts(request_s=request_s), num_retries=1, backoff_s=0.01)
            for server in servers
        ]
        buckets = None if named is None else fed(list(bucketed(named.items(), bucket_bytes)))
        try:
            syncing = ServerSync(transport, **{"timeout_s": 20.0, **settings})
            return await syncing.load(
                clients, buckets, weight_version=weight_version, previous_version=previous_version, report=report
            )
        finally:
            for client in clients:
                await client.close()

    return asyncio.run(run())


def asked(server: FakeServerProcess, question: str, **fields: Any) -> Any:
    """The answer to one question of SGLangClient."""

    async def ask() -> Any:
        client = SGLangClient(server.url, num_retries=0)
        try:
            return await getattr(client, question)(**fields)
        finally:
            await client.close()

    return asyncio.run(ask())


def version_of(server: FakeServerProcess) -> str:
    return str(asked(server, "model_info")["weight_version"])


@contextmanager
def running(num: int, model_folder: Any = None, **arguments: Any) -> Iterator[list[FakeServerProcess]]:
    servers = [FakeServerProcess(model_folder, **arguments) for _ in range(num)]
    try:
        for server in servers:
            server.start()
        yield servers
    finally:
        for server in servers:
            server.stop()
