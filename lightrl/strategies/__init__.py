"""Strategies: where a model's parameters and its work live. Each gives a ParallelModel (models package) for a role.

Reading order:
    single.py             one process, one device: no padding, logprobs from hidden states
    packed_attention.py   attention over a packed row, without a mask of its width; context parallelism
    shared_prefix.py      a group's prompt goes through the model once, or once for several completions
    branches.py           a trajectory that is a tree of conversations, as rows
    halves.py             two threads for a small model
    checkpoint.py         checkpoints of one process; how one process resumes
    checkpoint_folder.py  checkpoints of several processes; safe_reader.py: read as data, so that no code runs
    checkpoint_fit.py     whether it fits the run; atomic_write.py: whole or absent; shared_folder.py: seen by all hosts
    ranks.py              the processes of a run: sums, rows, messages from rank 0; role_mesh.py: a role on its own
    sharded_experience/   an iteration's trajectories over the ranks: where each row trains, what travels
    rank_watch.py         a rank that fails ends all; one that hangs is named
    fsdp2.py              FSDP2Strategy: sharded models; offload.py: what waits in host memory
    fsdp2_model.py        one sharded model; planned_gather.py  its parameters whole, each on one rank
    parallel_3d.py        Parallel3DStrategy: pipeline x data x tensor parallelism
    stages.py             this rank's part of a model; pipeline.py: schedules and what runs them
    tensor_plans.py       how a model is split, from transformers' plans; tensor_parallel.py: parameters split over tp
    costs.py              what FSDP2 and 3D cost, on paper; empty_model.py: without memory, filled tensor by tensor
    precision.py          Lightning's precision plugins: batches as they are, gradients clipped over all ranks
    known_strategies.py   which strategies train an RLModule

May import: errors, checks, trajectory, experience, functional, weights, models, Lightning. To add a strategy, subclass
FSDP2Strategy.
"""

from lightrl.strategies.checkpoint import AtomicCheckpointIO
from lightrl.strategies.checkpoint_folder import read_rest, read_tensors
from lightrl.strategies.fsdp2 import FSDP2Strategy
from lightrl.strategies.fsdp2_model import whole
from lightrl.strategies.known_strategies import check_strategy, named_strategy, parallel_model, ranks_of
from lightrl.strategies.packed_attention import NAME as PACKED_ATTENTION
from lightrl.strategies.parallel_3d import Parallel3DStrategy
from lightrl.strategies.ranks import Message, ProcessRanks, Ranks, is_on_all_ranks, mark_as_on_all_ranks
from lightrl.strategies.safe_reader import load_plain
from lightrl.strategies.sharded_experience import Microbatches, ShardedExperience
from lightrl.strategies.single import LogprobSettings, SingleModel
from lightrl.strategies.tensor_parallel import local

__all__ = ["PACKED_ATTENTION", "AtomicCheckpointIO", "FSDP2Strategy", "LogprobSettings", "Message"]
__all__ += ["Microbatches", "Parallel3DStrategy", "ProcessRanks", "Ranks", "ShardedExperience", "SingleModel"]
__all__ += ["check_strategy", "is_on_all_ranks", "load_plain", "local"]
__all__ += ["mark_as_on_all_ranks", "named_strategy", "parallel_model", "ranks_of", "read_rest", "read_tensors"]
__all__ += ["whole"]
