"""Tuning: what training changes of a model: all of its weights, or weights that are added to a frozen base.

Strategies, engines and weight sync ask a model's tuning (`tuning_of`), and not which kind it is. To add a kind, write a
subclass, and a setting of Role in role.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ATTRIBUTE = "lightrl_tuning"  # of a model whose tuning is not `ALL_WEIGHTS`

# What leaves the trainer: the weights with what training added to them, the weights without it, or that alone.
Part = Literal["whole", "base", "added"]


@dataclass(frozen=True)
class Tuning:
    """Train all weights of a model; nothing is added to them."""

    kind: ClassVar[str] = ""  # in checkpoints
    keeps_base: ClassVar[bool] = False  # the weights stay as they were loaded, and checkpoints hold what was added
    config_file: ClassVar[str] = "config.json"  # in folders that `save` has written

    def add_to(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        """Freezes what is not trained, and adds weights that depend on the seed; without values on the meta device."""

    def check_split(self, role: str, model: PreTrainedModel, modules: Collection[str] | None) -> None:
        """Raises ValueError if weights are added outside of the layers, or to others than these modules of a layer."""

    def split_styles(self, name: str, module: torch.nn.Module, style: str) -> dict[str, str]:
        """Maps the modules of a linear layer to how tensor ranks split them: `colwise`, `rowwise` or `replicate`."""
        return {name: style}

    def adds(self, name: str) -> bool:
        """Whether the parameter of this name is added to the base."""
        return False

    def added_values(self, seed: int) -> Callable[[str, torch.Size], Tensor]:
        """Returns the values that added parameters start with, by name and shape."""
        return lambda name, shape: torch.zeros(shape)

    def base_name(self, name: str) -> str:
        """The Hugging Face name of a parameter of the base."""
        return name

    def base_modules(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside, the model has its base's modules alone, so that parameters have the base's names."""
        return contextlib.nullcontext()

    def base_only(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside, the model computes as its base, at no cost of memory."""
        raise ValueError("Training changes all weights of this model, so it cannot compute as it did at the start.")

    def sources(self, model: torch.nn.Module, part: Part = "whole") -> dict[str, list[str]]:
        """Maps each exported Hugging Face name to the `held_tensors` that `merge` makes it of."""
        return {} if part == "added" else {name: [name] for name in held_tensors(model)}

    def merge(self, model: torch.nn.Module, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """The exported tensor of this name, from its whole sources."""
        return tensors[0]

    def saved_name(self, name: str) -> str:
        """The name of an added parameter in exported folders and on servers."""
        raise KeyError(name)

    def served_form(self, model: PreTrainedModel, num_versions: int) -> ServedForm:
        """How servers hold this many versions of what is added; raises ValueError if they cannot."""
        raise NotImplementedError

    def saved_config(self, model: PreTrainedModel, base: str | None) -> str | None:
        """JSON that `save` and `add_saved` need; None if checkpoints hold all weights. `base`: its folder or name."""
        return None

    def save(self, tensors: Mapping[str, Tensor], config: str, folder: Path) -> None:
        """Writes added parameters, by name, to a folder that exists."""
        raise NotImplementedError

    def add_saved(self, model: PreTrainedModel, tensors: Mapping[str, Tensor], config: str) -> None:
        """Adds a checkpoint's parameters, by name, to the base."""
        raise NotImplementedError


ALL_WEIGHTS = Tuning()


@dataclass(frozen=True)
class ServedForm:
    """How servers hold what training adds to a model, next to the base."""

    tuning: Tuning
    num_versions: int  # that a server holds at once
    config: dict[str, Any]  # a server gets it with each version
    server_args: dict[str, Any]  # SGLang's, for servers that are started here
    how_to_start: str  # tells users how to start other servers


def tuning_of(model: torch.nn.Module) -> Tuning:
    """What training changes of this model."""
    tuning: Tuning = getattr(model, ATTRIBUTE, ALL_WEIGHTS)
    return tuning


def held_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """The model's parameters, and the buffers that belong to its weights, such as a mixture's biases."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    return {**dict(model.named_parameters()), **buffers}


def whole_parameters(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters under their Hugging Face names, with what was added merged into them."""
    tuning, held = tuning_of(model), held_tensors(model)
    for name, sources in tuning.sources(model).items():
        yield name, tuning.merge(model, name, [held[source] for source in sources])
