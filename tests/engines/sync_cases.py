"""Configs, versions of weights and one sync: what tests of engines and of the load protocol share."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import torch
from fake_sglang.process import FakeServerProcess
from torch import Tensor
from transformers import Qwen3Config
from waits import Deadlines

from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import WeightTransport
from lightrl.engines.sglang.client import SGLangClient
from lightrl.weights import Bucket, bucketed

LARGE = Qwen3Config(vocab_size=1000, max_position_embeddings=100_000)  # of servers without a model, which hash
Start = Callable[..., FakeServerProcess]
EngineOn = Callable[..., Any]
# Sizes of a model that computes within milliseconds.
SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0}


def config_of(**changes: Any) -> Qwen3Config:
    return Qwen3Config(**{**SMALL, "head_dim": 8, "tie_word_embeddings": False, "eos_token_id": None, **changes})


def one_weight(version: int, size: int = 64) -> list[Bucket]:
    return [Bucket({"weight": torch.full((size,), float(version))}, is_last=True)]


def weights(version: int, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Parameters that tell their version."""
    generator = torch.Generator().manual_seed(version)
    if like is None:
        like = {"a.weight": torch.empty(40, 8), "b.weight": torch.empty(64)}
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in like.items()}


async def fed(buckets: Iterable[Bucket]) -> AsyncIterator[Bucket]:
    for bucket in buckets:
        yield bucket


def sync(
    servers: Sequence[FakeServerProcess],
    transport: WeightTransport,
    named: dict[str, Tensor] | None,
    weight_version: int,
    *,
    bucket_bytes: int = 1000,
    request_s: float = 600.0,
    previous_version: int | None = None,
    report: SyncReport | None = None,
    **settings: Any,
) -> SyncReport:
    """One sync on an event loop of its own; None for `named` loads what the transport holds."""

    async def run() -> SyncReport:
        targets = [
            Server(SGLangClient(server.url, timeouts=Deadlines(request_s=request_s), num_retries=1, backoff_s=0.01))
            for server in servers
        ]
        buckets = None if named is None else fed(bucketed(named.items(), bucket_bytes))
        try:
            return await ServerSync(transport, **{"timeout_s": 600.0, **settings}).load(
                targets, buckets, weight_version=weight_version, previous_version=previous_version, report=report
            )
        finally:
            for target in targets:
                await target.client.close()

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
