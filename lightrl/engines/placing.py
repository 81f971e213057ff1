"""choose_devices: which devices an engine of this machine gets, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightrl.checks.printable import count_text
from lightrl.engines.engine import RolloutEngine
from lightrl.engines.local.local_engine import LocalEngine
from lightrl.engines.servers.engine import ServerEngine


def choose_devices(engine: RolloutEngine, trainer_devices: Sequence[torch.device]) -> str:
    """Gives the engine the devices of the trainer's ranks on this machine; returns a sentence on what it will use.

    Raises:
        ValueError: if there are too few GPUs for its servers, or it has the trainer's without being colocated.
    """
    if isinstance(engine, LocalEngine):
        engine.trainer_devices = trainer_devices
        return f"on {engine.choose_device()}"
    if not isinstance(engine, ServerEngine):
        return ""
    engine.trainer_devices = trainer_devices
    if not engine.num_servers:
        return "on servers that run elsewhere"
    gpus = engine.gpus()
    if gpus is None:  # a plan may be for another machine
        is_for_gpus = any(device.type == "cuda" for device in trainer_devices)
        where = "GPUs, of which this machine has none" if is_for_gpus else "the CPU"
    else:
        where = ", ".join(f"cuda:{gpu}" for gpu in gpus)
    return f"{count_text(engine.num_servers, 'server')} with tp={engine.tp} on {where}, {engine.placement}"
