"""Engine and trainer on the same devices: each has the memory while it works.

    rollouts      engine: weights, key-values         optimizer state in host memory
    update        engine: nothing                     optimizer state on the device
    sync          engine: weights, then key-values    optimizer state in host memory

WeightSync calls this; without a colocated engine nothing happens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightrl.strategies import ranks_of


def is_colocated(trainer: Any) -> bool:
    """What the engine's settings say; the same on every rank."""
    return getattr(trainer.engine, "placement", "separate") == "colocated"


def check(trainer: Any) -> None:
    """Refuses what would ask an engine that has no memory.

    Raises:
        ValueError: if rollouts go on during an update.
    """
    if not is_colocated(trainer):
        return
    max_staleness = trainer.rollout.settings.max_staleness
    if max_staleness > 0:
        raise ValueError(
            f"max_staleness={max_staleness} lets rollouts go on during an update, but the engine is colocated, "
            "expected 0: it has no memory then. Use StalenessControl(0), or placement: separate."
        )


def to_trainer(trainer: Any) -> None:
    """Before the update: the engine gives its memory back, then the optimizer's state comes to the device."""
    if not is_colocated(trainer):
        return
    if ranks_of(trainer.strategy).is_main:
        trainer.rollout.engine.make_room()
    ranks_of(trainer.strategy).broadcast_json(None)  # no rank takes memory before the engine has given it
    move_optimizer_state(trainer.optimizers, trainer.strategy.root_device)


def to_engine(trainer: Any) -> None:
    """After the update, before the load: the optimizer's state goes to host memory."""
    if not is_colocated(trainer):
        return
    device = trainer.strategy.root_device
    move_optimizer_state(trainer.optimizers, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def move_optimizer_state(optimizers: list[Any], device: torch.device) -> int:
    """Moves the state that has a parameter's shape, in place; gives its bytes. Step counters stay where they are."""
    num_bytes = 0
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    local = value.to_local() if hasattr(value, "to_local") else value  # of this rank, sharded or whole
                    local.data = local.data.to(device)
                    num_bytes += local.numel() * local.element_size()
    return num_bytes
