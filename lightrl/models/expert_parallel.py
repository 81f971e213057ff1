"""Expert parallelism: divides a MoE model's experts over ranks and sends each token to the ranks of its experts.

    ep 2, 4 experts       rank 0                             rank 1
    a MoE block           router, experts 0 and 1            router, experts 2 and 3
    its forward           tokens ── all-to-all ── experts ── all-to-all ── weighted sum, on the token's rank

Ranks have different tokens; each rank's backward computes the gradient of its experts for the tokens from all ranks.
transformers' semi-private code moves the tokens; conversion.py lists what lightrl imports from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightrl.models.conversion import semi_private
from lightrl.models.images import new_model
from lightrl.models.moe import moe_blocks, num_experts
from lightrl.models.trials import once_per_config
from lightrl.models.tuning import tuning_of, unwrapped

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def expert_mesh(device_type: str, *, num_replicas: int = 1, num_stages: int = 1, ep: int) -> DeviceMesh:
    """Makes the mesh that divides the experts of a model, or of each pipeline stage, over its ranks; collective.

    Adjacent ranks, along axis `ep`, hold different experts; ranks along axis `shard` shard the same experts. Axis
    `batch`, for ranks with the same tokens, has size 1.
    """
    sizes = (num_stages, num_replicas, dist.get_world_size() // (num_stages * num_replicas * ep), ep, 1)
    return init_device_mesh(device_type, sizes, mesh_dim_names=("stage", "replica", "shard", "ep", "batch"))


@once_per_config
def num_split_experts(config: PretrainedConfig) -> int:
    """Returns the number that `ep` must divide: the gcd of the MoE blocks' expert counts; 0 for a dense model.

    Builds the model on the meta device. Raises ValueError if transformers cannot divide the experts.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        model = new_model(config)
    _plan(model)  # raises ValueError if the experts cannot be divided
    return math.gcd(*map(num_experts, moe_blocks(model).values()))


def split_experts(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Replaces each MoE block's experts with this rank's share, as DTensors on axis `ep` of the mesh.

    Raises ValueError if transformers cannot divide the experts of this family.
    """
    tuning = tuning_of(model)
    for name in moe_blocks(model):
        tuning.split_experts(model.get_submodule(f"{name}.experts" if name else "experts"), mesh["ep"].get_local_rank())
    with tuning.base_modules(model):
        semi_private("apply_expert_parallelism")(model, mesh["ep"], mesh["batch"], _plan(model), "all_to_all")


def shard_experts(block: Any, mesh: DeviceMesh, *, num_ranks: int, **options: Any) -> None:
    """Shards a block's experts, after `split_experts`, over the ranks of `expert_mesh` that hold the same experts.

    `num_ranks` is the number of ranks over which the model's other gradients are averaged; `options` are FSDP2's.
    """
    axes = ("replica", "shard") if mesh["replica"].size() > 1 else "shard"
    module: Any = fully_shard(unwrapped(block.experts), mesh=mesh[axes], **options)
    # The backward already sums over the ep axis, so divide by all ranks. gloo cannot scale in a sum.
    module.set_gradient_divide_factor(num_ranks)
    module.set_force_sum_reduction_for_comms(mesh["shard"].size() > 1)


def _plan(model: PreTrainedModel) -> dict[str, str]:
    """Maps the names of a model's expert modules and parameters to how transformers divides them."""
    plan: dict[str, str] = model._expand_parallel_plan(model.ep_plan)
    experts = {f"{name}.experts" if name else "experts" for name in moe_blocks(model)}
    divided = {name for name, style in plan.items() if style == "ep_dispatch_experts"}
    if divided != experts or set(plan.values()) - {"ep_dispatch_experts", "grouped_gemm"}:
        raise ValueError(
            f"transformers has no plan to divide the experts of model_type {model.config.model_type!r} over ranks. Set "
            "ep to 1."
        )
    return plan
