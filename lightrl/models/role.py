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
from lightrl.models.role_mesh import RoleMesh

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from typing_extensions import Self


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
        return role if isinstance(role, Role) else cls(role)

    @property
    def spec(self) -> ModelSpec:
        """Where the model comes from."""
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
