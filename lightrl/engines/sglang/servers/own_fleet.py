"""The servers that an engine starts by itself: on which GPUs, with which arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightrl.engines.sglang.servers.fleet import ServerFleet
from lightrl.engines.sglang.servers.gpus import gpus_of_servers, visible
from lightrl.engines.sglang.servers.server import make_servers, write_model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.engines.sglang.engine import SGLangEngine
    from lightrl.engines.sglang.members import Members
    from lightrl.models.lora import AdapterShape


def started_on(engine: SGLangEngine) -> list[int] | None:
    """The GPUs of the servers that the engine starts, as `gpus_of_servers`."""
    return gpus_of_servers(
        (engine.num_servers or 0) * engine.tp,
        available=torch.cuda.device_count(),
        trainer=[device.index or 0 for device in engine.trainer_devices if device.type == "cuda"],
        given=engine.devices,
        placement=engine.placement,
    )


def fleet_of(
    engine: SGLangEngine,
    config: PretrainedConfig,
    model_folder: Path,
    members: Members,
    adapters: tuple[AdapterShape, int] | None,
    token: str,
) -> ServerFleet:
    """The engine's servers, not started yet.

    Args:
        model_folder: where the config is written; weights come from the trainer.
        members: hears of servers that are lost and started.
        adapters: that are served beside the base, and how many versions of them; None if they are merged.
        token: their API key.

    Raises:
        ValueError: if there are too few GPUs for them.
    """
    assert engine.num_servers is not None
    more: dict[str, Any] = {}
    if engine.placement == "colocated" and torch.cuda.is_available():
        more["enable_memory_saver"] = True
    if adapters is not None:
        shape, num_versions = adapters
        more |= shape.server_args(num_versions)
    gpus = started_on(engine)
    servers = make_servers(
        write_model_folder(config, model_folder),
        engine.num_servers,
        tp=engine.tp,
        devices=None if gpus is None else visible(gpus),
        seed=engine.seed,
        args={"load_format": "dummy", **more, **engine.server_args},
        python=engine.sglang_python,
        token=token,
        command=engine.command,
        startup_timeout_s=engine.timeouts.startup_s,
    )
    return ServerFleet(
        servers,
        on_lost=members.on_lost,
        on_started=members.on_started,
        on_given_up=members.on_given_up,
        silent_s=members.silent_s,
        hang_timeout_s=engine.timeouts.hang_s,
        probe_interval_s=engine.probe_interval_s,
    )
