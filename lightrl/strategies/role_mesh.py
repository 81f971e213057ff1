"""Places: which ranks hold a role's model, all of the run's or a mesh of its own, and what stands on the others.

    world 6    policy     RoleMesh(0, 4, tp=2)   ranks 0 1 2 3, dp 2
               critic     RoleMesh(4, 2)         ranks 4 5, dp 2: updated while the policy is
               reference  no mesh                ranks 0 to 5, after what these ranks did before

Every rank has the whole Experience, so each role shares the rows out over its own dp axis; what a role's ranks found is
sent to all when somebody needs it (dataflow.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightrl.experience import Experience
from lightrl.models import Backward, LossFunction, Outputs, Role, RoleMesh
from lightrl.strategies.ranks import OtherRanks, ProcessRanks, Ranks
from lightrl.weights import Bucket

if TYPE_CHECKING:
    import lightning as L

# Far beyond any rollout: who waits for rank 0 on the control group is watched otherwise.
CONTROL_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Place:
    """Where a role's model is.

    On a rank outside of it, `ranks.is_here` is false.
    """

    mesh: DeviceMesh
    ranks: Ranks


def role_meshes(module: L.LightningModule | None) -> dict[str, RoleMesh]:
    """The meshes of the roles that have one of their own."""
    any_module: Any = module
    roles: dict[str, Role] = any_module.models() if hasattr(module, "models") else {}
    return {name: role.mesh for name, role in roles.items() if role.mesh is not None}


def check_meshes(module: L.LightningModule | None, world_size: int) -> None:
    """Refuses meshes that do not fit the run, before a device is touched.

    Raises:
        ValueError: for a mesh outside of the world, and a policy without rank 0.
    """
    for role, mesh in role_meshes(module).items():
        ranks = mesh.ranks(world_size)
        if role == "policy" and ranks[0] != 0:
            raise ValueError(
                f"The policy has mesh.first_rank={ranks[0]}, expected 0: rank 0 hands its weights to the engine. Give "
                "the later ranks to other roles."
            )


def make_place(world: ProcessRanks, members: range, sizes: Sequence[int], names: Sequence[str], device: Any) -> Place:
    """A mesh of its own for a role; collective over all ranks of the run.

    Args:
        world: all ranks.
        members: those of the mesh.
        sizes, names: of its axes; `dp` is the one whose ranks have different rows.
        device: of this rank.
    """
    numbers = torch.arange(members.start, members.stop).reshape(*sizes)
    mesh = DeviceMesh(device.type, numbers, mesh_dim_names=tuple(names))
    control_group = dist.new_group(list(members), backend="gloo", timeout=CONTROL_TIMEOUT)
    if world.rank not in members:
        dp_size = sizes[list(names).index("dp")]
        return Place(mesh, OtherRanks(first_rank=members.start, size=len(members), dp_size=dp_size))
    dp_group = mesh["dp"].get_group()
    return Place(mesh, ProcessRanks(dp_group=dp_group, control_group=control_group, device=device, watch=world.watch))


def empty_out(model: torch.nn.Module) -> None:
    """Takes all layers and parameters out of a model that lives on other ranks; what is left knows its config."""
    model._modules.update(dict.fromkeys(model._modules))
    model._parameters.update(dict.fromkeys(model._parameters))


class OtherRanksModel:
    """The ParallelModel of a role that lives on other ranks: here it is never called, and has no parameters."""

    def forward(self, microbatches: Sequence[Experience], *, topk: int = 0) -> list[Outputs]:
        raise AssertionError("This rank does not hold the model.")

    def forward_backward(self, microbatches: Sequence[Experience], loss_fn: LossFunction, backward: Backward) -> None:
        raise AssertionError("This rank does not hold the model.")

    def full_parameters(self, bucket_bytes: int) -> Iterator[Bucket]:
        """Nothing, in one bucket."""
        yield Bucket({}, is_last=True)

    def move_to(self, device: torch.device) -> None:
        raise AssertionError("This rank does not hold the model.")
