"""Strategies place a model's parameters and computation on devices. Each makes a role's ParallelModel (models package).

Reading order:
    single.py            one process, one device: chooses a microbatch's cheapest layout, computes logprobs
    head.py              the output head: which logprobs it computes, and how
    layouts/             ways to run a microbatch through a model without padding
    checkpoint/          checkpoints, written completely or not at all, and read without running code
    ranks/               a run's processes, their communication, and failure detection
    sharded_experience/  an iteration's trajectories, distributed over all ranks
    fsdp2.py             FSDP2Strategy: sharded models; offload.py: activations and optimizer state in host memory
    fsdp2_model.py       a sharded model
    parallel_3d/         Parallel3DStrategy: pipeline x data x tensor parallelism
    empty_model.py       builds models on the meta device and loads their weights tensor by tensor
    precision.py         Lightning's precision plugins, adapted to leave batches unchanged and to clip over all ranks
    known_strategies.py  the strategies that can train an RLModule

May import: errors, checks, trajectory, experience, functional, weights, models, Lightning. To add a strategy, subclass
FSDP2Strategy.
"""

from lightrl.strategies.checkpoint import AtomicCheckpointIO
from lightrl.strategies.checkpoint.folder import read_rest, read_tensors
from lightrl.strategies.checkpoint.safe_reader import load_plain
from lightrl.strategies.fsdp2 import FSDP2Strategy
from lightrl.strategies.fsdp2_model import whole
from lightrl.strategies.head import LogprobSettings
from lightrl.strategies.known_strategies import check_strategy, named_strategy, parallel_model
from lightrl.strategies.layouts.packed_attention import NAME as PACKED_ATTENTION
from lightrl.strategies.parallel_3d import Parallel3DStrategy
from lightrl.strategies.ranks.processes import (
    Message,
    ProcessRanks,
    Ranks,
    is_on_all_ranks,
    local,
    mark_as_on_all_ranks,
    ranks_of,
)
from lightrl.strategies.sharded_experience import Microbatches, ShardedExperience
from lightrl.strategies.single import SingleModel

__all__ = ["PACKED_ATTENTION", "AtomicCheckpointIO", "FSDP2Strategy", "LogprobSettings", "Message", "Microbatches"]
__all__ += ["Parallel3DStrategy", "ProcessRanks", "Ranks", "ShardedExperience", "SingleModel", "check_strategy"]
__all__ += ["is_on_all_ranks", "load_plain", "local", "mark_as_on_all_ranks", "named_strategy", "parallel_model"]
__all__ += ["ranks_of", "read_rest", "read_tensors", "whole"]
