"""Deltas into the real SGLang on this machine's CPU: its weights are those that it loads from a trainer's folder."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from engine_contract import BUCKET_BYTES
from real_servers import tiny_config, tiny_models
from sync_cases import fed

from lightrl.engines.servers.connection import Connection
from lightrl.engines.servers.server import Server
from lightrl.engines.servers.sync.receivers import Receivers
from lightrl.engines.servers.sync.report import SyncReport
from lightrl.engines.servers.sync.server_sync import ServerSync
from lightrl.engines.servers.sync.transports import DeltaTransport, DiskTransport, WeightTransport
from lightrl.engines.sglang.client import SGLangClient
from lightrl.weights import ServerForm, WeightFolder, bucketed

pytestmark = [pytest.mark.real_sglang, pytest.mark.extra]


def test_deltas_give_the_real_server_the_weights_that_it_loads_from_the_disk(real_server, tmp_path):
    config, token = tiny_config(), real_server["token"]
    form = ServerForm.of(config)
    receivers = Receivers()
    receivers.start("127.0.0.1", token)
    delta = DeltaTransport(
        form, config, connect=lambda url: Connection(url, token=token), receiver_of=receivers.of, wait_s=20
    )
    disk = DiskTransport(WeightFolder(tmp_path, config, form=form))
    model = tiny_models(1)[0]

    async def synced(transport: WeightTransport, version: int) -> tuple[SyncReport, dict[str, Any]]:
        client = SGLangClient(real_server["url"], token=token)
        try:
            buckets = fed(bucketed(model.named_parameters(), BUCKET_BYTES))
            report = await ServerSync(transport, timeout_s=60).load([Server(client)], buckets, weight_version=version)
            return report, (await client.checksum())["ranks"][0]["checksums"]
        finally:
            await client.close()

    try:
        full, before = asyncio.run(synced(delta, 100))
        for version in (101, 102):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_((torch.rand_like(parameter) < 0.02) * 1e-3)
            report, found = asyncio.run(synced(delta, version))
            assert report.num_bytes < 0.3 * full.num_bytes
            assert found != before
            _, expected = asyncio.run(synced(disk, 1000 + version))
            assert found == expected
            before = found
    finally:
        receivers.stop()
