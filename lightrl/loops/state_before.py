"""StateBefore: a start that fails leaves the trainer as it was, so the next `fit` uses nothing that it restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import torch

from lightrl.loops.rollout_loop import RolloutLoop
from lightrl.rollout.rl_trainer import RLTrainer


class StateBefore:
    """The state of loops, callbacks and torch's random numbers before a fit restores a checkpoint.

    A checkpoint may be refused when half of it is restored: the optimizer's state comes last.
    """

    def __init__(self, trainer: RLTrainer, loop: RolloutLoop) -> None:
        owners = [*_loops(trainer.fit_loop), loop.guard, loop.resume, *trainer.callbacks]
        self._attributes = [(owner, _copied(vars(owner))) for owner in owners]
        self._random_state = torch.get_rng_state()

    def give_back(self) -> None:
        """Undoes what was restored; the module keeps its present weights."""
        for owner, attributes in self._attributes:
            vars(owner).clear()
            vars(owner).update(attributes)
        torch.set_rng_state(self._random_state)


def _loops(loop: Any) -> Iterator[Any]:
    """A loop of Lightning's and the loops inside it."""
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "restarting"):
            yield from _loops(inner)


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Lightning's counters change in place; everything else that a checkpoint restores is set anew."""
    return {name: copy.deepcopy(value) if _is_counter(value) else value for name, value in attributes.items()}


def _is_counter(value: Any) -> bool:
    return is_dataclass(value) and hasattr(value, "load_state_dict")
