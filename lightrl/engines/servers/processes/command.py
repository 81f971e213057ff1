"""Helpers for the command lines of all servers: flags, devices, and an environment without secrets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from lightrl.checks.bounds import check_bounds
from lightrl.checks.secret_settings import is_secret


def environment_for(python: str) -> dict[str, str]:
    """Returns this process's environment without secrets; omits package paths if the server has a different Python."""
    paths = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} if python != sys.executable else set()
    return {name: value for name, value in os.environ.items() if name not in paths and not is_secret(name.upper())}


def flags(args: Mapping[str, Any]) -> list[str]:
    """Turns `{"tp_size": 2, "enable_metrics": True}` into `--tp-size 2 --enable-metrics`."""
    words: list[str] = []
    for name, value in args.items():
        if value is None or value is False:
            continue
        words.append("--" + name.removeprefix("--").replace("_", "-"))
        if isinstance(value, Mapping):
            words.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def devices_of_servers(servers: int, tp: int, devices: Sequence[int | str]) -> list[list[str]]:
    """Returns `tp` devices for each server, in order; empty lists if there are no devices."""
    check_bounds(1, servers=servers, tp=tp)
    if devices and len(devices) < servers * tp:
        raise ValueError(
            f"servers={servers} with tp={tp} need {servers * tp} devices, but there are {len(devices)} "
            f"({', '.join(map(str, devices))}). Lower servers or tp, or list more devices."
        )
    return [[str(device) for device in devices[index * tp : (index + 1) * tp]] for index in range(servers)]


def gpus_of_servers(
    num: int, *, available: int, trainer: Collection[int], placement: Literal["separate", "colocated"]
) -> list[int] | None:
    """Returns the torch indices of `num` GPUs on this machine; None if it has no GPUs.

    Args:
        num: servers times `tp`.
        available: number of GPUs that torch sees.
        trainer: GPUs used by the trainer's ranks on this machine.

    Raises:
        ValueError: if there are too few GPUs.
    """
    if available == 0:
        return None
    usable = [gpu for gpu in range(available) if (gpu in trainer) == (placement == "colocated")]
    if len(usable) < num:
        kind = "of the trainer" if placement == "colocated" else f"besides the trainer's {sorted(trainer)}"
        raise ValueError(
            f"The servers need {num} GPUs (servers × tp) {kind}, but only {len(usable)} of {available} qualify. "
            "Lower servers, tp or trainer.devices, or set placement to "
            f"{'separate' if placement == 'colocated' else 'colocated'}."
        )
    return usable[:num]


def visible(gpus: Sequence[int]) -> list[str]:
    """Translates torch's GPU indices, which count only visible GPUs, to entries of CUDA_VISIBLE_DEVICES."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return [names[gpu] if gpu < len(names) else str(gpu) for gpu in gpus]
