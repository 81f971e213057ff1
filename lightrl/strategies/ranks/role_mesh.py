"""Places: the ranks of a role's model (all ranks of the run, or a separate mesh), and a stand-in on other ranks.

    world 6    policy     RoleMesh(0, 4, tp=2)   ranks 0 1 2 3, dp 2
               critic     RoleMesh(4, 2)         ranks 4 5, dp 2: updated at the same time as the policy
               reference  no mesh                ranks 0 to 5, after these ranks' other work

Each role splits the rows over its dp axis, and every rank holds the rows that its roles work on. Results that a
different call needs are sent to the ranks that work on the same rows (sharded_experience/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import lightning as L
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightrl.models import Role, RoleMesh
from lightrl.models.conversion import Names
from lightrl.models.optimizer import own_parameters
from lightrl.models.tuning import Part
from lightrl.strategies.ranks.processes import START_TIMEOUT, OtherRanks, ProcessRanks, Ranks, allow_long_waits
from lightrl.weights import Bucket


@dataclass(frozen=True)
class Place:
    """The mesh and ranks of a role's model; on ranks outside it, `ranks.is_here` is False."""

    mesh: DeviceMesh
    ranks: Ranks


def planned_roles(module: Any) -> dict[str, Role]:
    """Returns the roles of an RLModule or of a module that trains on data; other modules have none."""
    name = "planned_roles" if hasattr(module, "planned_roles") else "models"
    roles: dict[str, Role] = getattr(module, name, dict)()
    return roles


def role_meshes(module: object) -> dict[str, RoleMesh]:
    """Returns the mesh of each role that has one."""
    return {name: role.mesh for name, role in planned_roles(module).items() if role.mesh is not None}


def check_meshes(module: L.LightningModule | None, world_size: int) -> None:
    """Raises ValueError if a mesh does not fit, the policy's mesh omits rank 0, or the module itself has parameters."""
    meshes = role_meshes(module)
    own = own_parameters(module) if meshes and module is not None else {}
    if names := [name for name, item in own.items() if item.requires_grad]:
        raise ValueError(
            f"{type(module).__name__} has its own parameters ({', '.join(names[:3])}), which all ranks train, so no "
            f"role may have a mesh, but {' and '.join(meshes)} has one. Remove the mesh."
        )
    for role, mesh in meshes.items():
        ranks = mesh.ranks(world_size)  # raises if the mesh does not fit
        if role == "policy" and ranks[0] != 0:
            raise ValueError(
                f"The policy's mesh.first_rank must be 0, got {ranks[0]}: rank 0 sends its weights to the engine. Use "
                "later ranks for other roles."
            )


def make_place(
    world: ProcessRanks, members: range, sizes: Sequence[int], names: Sequence[str], device: torch.device
) -> Place:
    """Creates a role's Place: a mesh of `members` with these axis `sizes` and `names`. All ranks must call this."""
    numbers = torch.arange(members.start, members.stop).reshape(*sizes)
    mesh = DeviceMesh(device.type, numbers, mesh_dim_names=tuple(names))
    control_group = dist.new_group(list(members), backend="gloo", timeout=START_TIMEOUT)
    if world.rank in members:
        allow_long_waits(control_group)
    dp_members = numbers.movedim(list(names).index("dp"), 0).reshape(sizes[list(names).index("dp")], -1).tolist()
    if world.rank not in members:
        return Place(mesh, OtherRanks(first_rank=members.start, size=len(members), dp_members=dp_members))
    groups = {"dp_group": mesh["dp"].get_group(), "control_group": control_group}
    return Place(mesh, ProcessRanks(**groups, device=device, watch=world.watch, dp_members=dp_members))


def empty_out(model: torch.nn.Module) -> None:
    """Removes all layers and parameters of a model that is on other ranks, but keeps its config."""
    for name, _ in [*model.named_children(), *model.named_parameters(recurse=False)]:
        setattr(model, name, None)


class OtherRanksModel:
    """The ParallelModel of a role whose model is on other ranks; it has no parameters and is never called here."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise AssertionError("This rank does not hold the model.")

    forward = forward_backward = measure = move_to = shares_prefixes = _refuse

    def full_parameters(
        self, bucket_bytes: int, *, part: Part = "whole", names: Names = "module", is_spread: bool = False
    ) -> Iterator[Bucket]:
        """Yields one empty bucket."""
        yield Bucket({}, is_last=True)
