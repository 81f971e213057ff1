"""RoleMesh: the ranks that hold a role's model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoleMesh:
    """The ranks of one role's model, and how they split it; dp is what pp and tp leave.

    Roles on different ranks work at the same time, roles that share a rank one after another.

    Args:
        first_rank: the first rank, counted over the whole run.
        num_ranks: how many consecutive ranks; None for all that follow.
        pp: pipeline stages, as in Parallel3DStrategy; 1 under FSDP2Strategy.
        tp: tensor slices, likewise.

    Example:
        Role("my/reward", mesh=RoleMesh(first_rank=4, num_ranks=2, tp=2))
    """

    first_rank: int = 0
    num_ranks: int | None = None
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name, least in (("first_rank", 0), ("num_ranks", 1), ("pp", 1), ("tp", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} of a role's mesh must be at least {least}, got {value}.")

    def ranks(self, world_size: int) -> range:
        """This mesh's ranks in a run of `world_size`.

        Raises:
            ValueError: if the run has too few, or pp · tp does not divide their number.
        """
        num = max(0, world_size - self.first_rank) if self.num_ranks is None else self.num_ranks
        if num == 0 or self.first_rank + num > world_size:
            raise ValueError(
                f"A role's mesh of first_rank={self.first_rank}, num_ranks={self.num_ranks} does not fit ranks 0 to "
                f"{world_size - 1} of this run. Change it, or increase trainer.devices or trainer.num_nodes."
            )
        if num % (self.pp * self.tp):
            raise ValueError(
                f"num_ranks of a role's mesh must be a multiple of pp * tp = {self.pp * self.tp}, got {num}. Change "
                "num_ranks, pp or tp."
            )
        return range(self.first_rank, self.first_rank + num)
