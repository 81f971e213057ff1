"""Role: what a model is in a run: where it comes from, how it is trained, and on which ranks it lies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lightrl.models.lora import LoRA
from lightrl.models.model_spec import ModelSpec
from lightrl.models.optimizer import check_adamw

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self


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
        """The ranks of this mesh in a run of `world_size`.

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


@dataclass(frozen=True)
class Role:
    """A model in a run, such as the policy, the critic or a teacher.

    Args:
        model: where it comes from: a hub name, a local folder, or a ModelSpec.
        lr: learning rate of this role, which may be 0; None is the module's.
        weight_decay: of this role; None is the module's.
        frozen: do not train this critic; the policy is always trained.
        lora: train small adapters instead of the weights; needs `pip install lightrl[lora]`.
        offload: keep the model in CPU memory between uses; for roles that are not trained.
        mesh: ranks of its own for this role's model; None for all ranks, split as the strategy says.

    Example:
        Role("my/model", lora=LoRA(rank=8), lr=1e-5)
    """

    model: str | ModelSpec
    lr: float | None = None
    weight_decay: float | None = None
    frozen: bool = False
    lora: LoRA | None = None
    offload: bool = False
    mesh: RoleMesh | None = None

    def __post_init__(self) -> None:
        check_adamw(lr=self.lr, weight_decay=self.weight_decay)
        if self.spec.url is not None and self.mesh is not None:
            raise ValueError(f"The model at {self.spec.url} has devices of its own. Leave out mesh.")

    @classmethod
    def of(cls, role: str | ModelSpec | Role) -> Role:
        """A Role as it is; a path or a ModelSpec as a role without further settings."""
        if not isinstance(role, str | ModelSpec | Role):
            raise TypeError(
                f"A model must be a hub name, a folder, a ModelSpec or a Role, got {type(role).__name__}. If your "
                "module's own __init__ takes it from YAML, annotate it there: `policy: str | ModelSpec | Role`."
            )
        return role if isinstance(role, Role) else cls(role)

    @property
    def spec(self) -> ModelSpec:
        """The source of the model."""
        return ModelSpec.of(self.model)

    def with_scalar_head(self) -> Self:
        return replace(self, model=replace(self.spec, head="scalar"))

    def load_model(self) -> PreTrainedModel:
        """`ModelSpec.load_model`, with the adapters. Inside `models_made_by` it is what that function makes."""
        make = _MAKE.get()
        if make is not None:
            return make(self)
        model = self.spec.load_model()
        if self.lora is not None:
            self.lora.add_to(model, seed=self.spec.random_seed)
        return model


# What makes models instead of Role itself.
_MAKE: ContextVar[Callable[[Role], PreTrainedModel] | None] = ContextVar("make_model", default=None)


@contextlib.contextmanager
def models_made_by(make: Callable[[Role], PreTrainedModel]) -> Iterator[None]:
    """Inside, `Role.load_model` returns what `make` returns: for strategies that spread models over processes."""
    token = _MAKE.set(make)
    try:
        yield
    finally:
        _MAKE.reset(token)
