"""Lightning's precision plugins in subclasses that leave batches as they are, or clip as their strategy does."""

from __future__ import annotations

import copy
from typing import Protocol, TypeVar, cast

from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer


class ClipsByNorm(Protocol):
    """A strategy that clips gradients itself."""

    def clip_by_norm(self, optimizer: Optimizer, clip_val: float) -> None: ...


class LeavesBatches(Precision):
    """Leaves prompts alone: Lightning's walk through a batch for floats fails at frozen dataclasses."""

    def convert_input(self, data: object) -> object:
        return data


class ClipsByStrategy(Precision):
    """Precision for parameters that are sharded over ranks."""

    strategy: ClipsByNorm

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        self.strategy.clip_by_norm(optimizer, clip_val)


_Change = TypeVar("_Change", bound=Precision)


def subclassed(plugin: Precision, change: type[_Change]) -> _Change:
    """Return a copy of the plugin as a subclass with the methods of `change`, under the name that checkpoints keep."""
    kind = type(plugin)
    changed = copy.copy(plugin)
    changed.__class__ = type(kind.__name__, (change, kind), {"__qualname__": kind.__qualname__})
    return cast(_Change, changed)
