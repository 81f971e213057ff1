"""The servers that an engine starts by itself: on which GPUs, with which arguments."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lightrl.engines.sglang.servers.fleet import ServerFleet
from lightrl.engines.sglang.servers.server import make_servers, write_model_folder

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from lightrl.engines.sglang.engine import SGLangEngine
    from lightrl.engines.sglang.members import Members
    from lightrl.models.lora import AdapterShape
import os
from collections.abc import Collection, Sequence
from typing import Literal


def gpus_of_servers(
    num: int,
    *,
    available: int,
    trainer: Collection[int],
    given: Sequence[int] | None,
    placement: Literal["separate", "colocated"],
) -> list[int] | None:
    """`num` GPUs of this machine, numbered as torch numbers them; None if there are none.

    Args:
        num: servers times `tp`.
        available: GPUs that torch sees.
        trainer: those of the trainer's ranks on this machine.
        given: the engine's `devices`, which are taken as they are.
        placement: of the engine.

    Raises:
        ValueError: if there are too few, or separate servers are given GPUs of the trainer.
    """
    if given is not None:
        shared = sorted(set(given) & set(trainer))
        if shared and placement == "separate":
            raise ValueError(
                f"devices={list(given)} has GPUs that the trainer uses: {shared}. Give the servers others, or set "
                "placement: colocated."
            )
        return list(given)
    if available == 0:
        return None
    free = [gpu for gpu in range(available) if (gpu in trainer) == (placement == "colocated")]
    if len(free) < num:
        whose = "of the trainer" if placement == "colocated" else f"beside the trainer's {sorted(trainer)}"
        raise ValueError(
            f"The servers need {num} GPUs (servers × tp) {whose}, but there are {len(free)} of {available}. Lower "
            "servers, tp or trainer.devices, or set placement to "
            f"{'separate' if placement == 'colocated' else 'colocated'}."
        )
    return free[:num]


def visible(gpus: Sequence[int]) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls them: torch numbers only those that this process sees."""
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [seen[gpu] if gpu < len(seen) else str(gpu) for gpu in gpus]


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
