"""RoleMesh: the ranks that hold a role's model."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoleMesh:
    """Some of the run's ranks for one role's model, and how it lies on them; what is left of pp and tp is dp.

    Roles on ranks of their own work at the same time; one after another where they share a rank.

    Args:
        first_rank: the first of them, counted over the whole run.
        num_ranks: how many, in a row; None for all that follow.
        pp: pipeline stages, as of Parallel3DStrategy; 1 under FSDP2Strategy.
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
                raise ValueError(f"A role's mesh has {name}={value}, expected at least {least}. Raise it.")

    def ranks(self, world_size: int) -> range:
        """Of the run's ranks, those of this mesh.

        Raises:
            ValueError: if the run has too few, or pp · tp does not divide their number.
        """
        num = max(0, world_size - self.first_rank) if self.num_ranks is None else self.num_ranks
        if num == 0 or self.first_rank + num > world_size:
            raise ValueError(
                f"A role's mesh has first_rank={self.first_rank} and num_ranks={self.num_ranks}, expected ranks 0 to "
                f"{world_size - 1} of this run. Mend it, or raise trainer.devices or trainer.num_nodes."
            )
        if num % (self.pp * self.tp):
            raise ValueError(
                f"A role's mesh has {num} ranks for pp={self.pp} x tp={self.tp}, expected a multiple of "
                f"{self.pp * self.tp}. Change num_ranks, pp or tp."
            )
        return range(self.first_rank, self.first_rank + num)
