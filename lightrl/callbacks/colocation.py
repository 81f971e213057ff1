"""Engine and trainer on the same devices: each has the memory while it works.

    rollouts      engine: weights, key-values         optimizer state in host memory
    update        engine: nothing                     optimizer state on the device
    sync          engine: weights, then key-values    optimizer state in host memory

WeightSync calls this; without a colocated engine nothing happens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightrl.engines.abilities import SharesDevices
from lightrl.rollout.rl_trainer import RLTrainer
from lightrl.strategies import ranks_of


def colocated_engine(trainer: RLTrainer) -> SharesDevices | None:
    """The engine, if it is in use and on the trainer's devices; every rank has the settings, rank 0 the processes."""
    engine: object = trainer.engine
    if trainer.rollout.is_recorded or not isinstance(engine, SharesDevices) or engine.placement == "separate":
        return None
    return engine


def check(trainer: RLTrainer) -> None:
    """Refuses settings under which an engine would be used while it has no memory.

    Raises:
        ValueError: if rollouts continue during an update.
    """
    max_staleness = trainer.rollout.settings.max_staleness
    if colocated_engine(trainer) is not None and max_staleness > 0:
        raise ValueError(
            f"max_staleness must be 0 with a colocated engine, got {max_staleness}: the engine has no memory to roll "
            "out during an update. Use StalenessControl(0), or placement: separate."
        )


def to_trainer(trainer: RLTrainer) -> None:
    """Before the update: the engine releases its memory, then the optimizer's state comes to the device."""
    engine, ranks = colocated_engine(trainer), ranks_of(trainer.strategy)
    if engine is None:
        return
    with ranks.own_deadline():
        if ranks.is_main:
            engine.make_room()
        ranks.broadcast_json(None)  # no rank takes memory before the engine has released it
    move_optimizer_state(trainer.optimizers, trainer.strategy.root_device)


def to_engine(trainer: RLTrainer) -> None:
    """After the update, before the load: the optimizer's state goes to host memory."""
    if colocated_engine(trainer) is None:
        return
    device = trainer.strategy.root_device
    move_optimizer_state(trainer.optimizers, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.no_grad()
def move_optimizer_state(optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> int:
    """Moves the state that has a parameter's shape, in place, and returns its bytes. Step counters stay."""
    num_bytes = 0
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() > 0:
                    local = value.to_local() if hasattr(value, "to_local") else value  # of this rank, sharded or whole
                    local.data = local.data.to(device)
                    num_bytes += local.numel() * local.element_size()
    return num_bytes
