"""Which GPUs the servers of a run get: others than the trainer's, or the same if they are colocated."""

from __future__ import annotations

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
