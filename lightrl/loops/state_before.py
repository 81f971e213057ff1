"""StateBefore: a start that fails gives the trainer back as it was; the next `fit` goes on from nothing it restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch


class StateBefore:
    """What loops, callbacks and torch's random numbers are before a fit restores a checkpoint.

    A checkpoint may be refused when half of it is restored: the optimizer's state comes last.

    Args:
        trainer: a lightrl Trainer.
    """

    def __init__(self, trainer: Any) -> None:
        owners = [*_loops(trainer.fit_loop), trainer.rollout_loop.guard, *trainer.callbacks]
        self._attributes = [(owner, _copied(vars(owner))) for owner in owners]
        self._random_state = torch.get_rng_state()

    def give_back(self) -> None:
        """Undoes what was restored; the module keeps the weights that it has."""
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        torch.set_rng_state(self._random_state)


def _loops(loop: Any) -> Iterator[Any]:
    """A loop of Lightning's and those inside."""
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "restarting"):
            yield from _loops(inner)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lightning's counters count on in place; everything else that a checkpoint brings is set anew."""
    return {name: copy.deepcopy(value) if _is_counter(value) else value for name, value in attributes.items()}


def _is_counter(value: Any) -> bool:
    return is_dataclass(value) and hasattr(value, "load_state_dict")
