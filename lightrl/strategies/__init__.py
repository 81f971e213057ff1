"""Strategies: where a model's parameters and its work live. Each gives a ParallelModel (models.py) for a role.

Reading order:
    single.py         one process, one device: padding removed, logprobs from hidden states
    shared_prefix.py  the prompt of a group goes through the model once
    probes.py         what a model allows, found by running it
    checkpoint.py     checkpoints that are whole or absent
    checkpoint_fit.py whether one fits the configuration that goes on from it
    ranks.py          who works beside this process: sums, shares of the rows, messages of rank 0
    balance.py        trajectories shared out over ranks by their tokens
    role_mesh.py      a role on ranks of its own
    rank_watch.py     a rank that fails ends all, one that hangs is named
    fsdp2.py          FSDP2Strategy: sharded models
    fsdp2_model.py    one sharded model: forward, backward, whole parameters
    inside.py         code that reads sharded parameters by itself
    parallel_3d.py    Parallel3DStrategy: pipeline x data x tensor parallelism
    stages.py         this rank's part of a model
    pipeline.py       pipeline schedules on paper, and what runs them
    tensor_plans.py   the families, and how their layers are split
    tensor_parallel.py  parameters and logprobs split over the tp axis
    costs.py          what FSDP2 and 3D cost, on paper
    empty_model.py    models without memory, filled tensor by tensor

May import: errors, trajectory, experience, functional, weights, models; Lightning. To add one: subclass a Lightning
strategy and give it `parallel_model(model, settings, role=, value_head=)`; `parallel_model` below asks for that first.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy, StrategyRegistry

from lightrl.models import ParallelModel
from lightrl.strategies.checkpoint import META_FILE, AtomicCheckpointIO, load_optimizers, read_tensors
from lightrl.strategies.checkpoint_fit import load_model
from lightrl.strategies.fsdp2 import FSDP2Strategy
from lightrl.strategies.fsdp2_model import whole
from lightrl.strategies.inside import run_inside
from lightrl.strategies.parallel_3d import Parallel3DStrategy
from lightrl.strategies.probes import head_is_plain
from lightrl.strategies.ranks import Message, ProcessRanks, Ranks, is_on_all_ranks, mark_as_on_all_ranks, ranks_of
from lightrl.strategies.role_mesh import check_meshes
from lightrl.strategies.single import LogprobSettings, SingleModel
from lightrl.strategies.tensor_parallel import local

if TYPE_CHECKING:
    import lightning as L
    import torch
    from transformers import PreTrainedModel

__all__ = [
    "AtomicCheckpointIO",
    "FSDP2Strategy",
    "META_FILE",
    "LogprobSettings",
    "Message",
    "Parallel3DStrategy",
    "ProcessRanks",
    "Ranks",
    "SingleModel",
    "check_strategy",
    "is_on_all_ranks",
    "mark_as_on_all_ranks",
    "head_is_plain",
    "load_model",
    "load_optimizers",
    "local",
    "named_strategy",
    "parallel_model",
    "ranks_of",
    "read_tensors",
    "whole",
    "run_inside",
]


def check_strategy(strategy: Strategy, module: L.LightningModule | None = None) -> None:
    """Refuses strategies under which an RLModule would train wrongly, and `module` if its models do not fit one.

    Raises:
        ValueError: for anything but a single device or a strategy with `parallel_model`, and for sizes that do not fit.
    """
    if isinstance(strategy, SingleDeviceStrategy):
        check_meshes(module, 1)
        return
    if not hasattr(strategy, "parallel_model"):
        raise ValueError(
            f"Strategy {type(strategy).__name__} cannot train an RLModule, expected FSDP2Strategy for several "
            "processes, or one process. Set trainer.strategy to FSDP2Strategy, which gives the same gradients (with "
            "num_replicas the number of processes each has a whole copy, as in DDP), or trainer.devices to 1."
        )
    check_sizes = getattr(strategy, "check_sizes", None)
    if check_sizes is not None:
        check_sizes(module)


def named_strategy(strategy: Strategy | str) -> Strategy | str:
    """lightrl's strategy of this name, with its default settings; anything else is Lightning's to understand.

    Raises:
        ValueError: for a name that nobody has and that is much like one of ours.
    """
    if not isinstance(strategy, str):
        return strategy
    ours: dict[str, Callable[[], Strategy]] = {kind.__name__: kind for kind in (FSDP2Strategy, Parallel3DStrategy)}
    if strategy in ours:
        return ours[strategy]()
    near = difflib.get_close_matches(strategy.lower(), [name.lower() for name in ours], n=1, cutoff=0.7)
    if near and strategy.lower() not in StrategyRegistry.available_strategies():
        (meant,) = (name for name in ours if name.lower() in near)
        raise ValueError(
            f"strategy={strategy!r} is the name of no strategy, expected one of {', '.join(ours)} or Lightning's. Did "
            f"you mean {meant}?"
        )
    return strategy


def parallel_model(
    strategy: Strategy,
    model: PreTrainedModel,
    settings: LogprobSettings,
    *,
    role: str = "policy",
    value_head: torch.nn.Linear | None = None,
) -> ParallelModel:
    """The ParallelModel of this role's model under this strategy; with `value_head` its body bears a critic too."""
    check_strategy(strategy)
    make = getattr(strategy, "parallel_model", None)
    if make is None:
        return SingleModel(model, settings, value_head=value_head)
    made: ParallelModel = make(model, settings, role=role, value_head=value_head)
    return made
