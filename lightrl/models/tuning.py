"""Tuning: defines which weights training changes: all weights of a model, or weights added to a frozen base.

Strategies, engines and weight sync call a model's tuning (`tuning_of`) without knowing its kind. To add a kind, write a
subclass and add a setting to Role in role.py.
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

ATTRIBUTE = "lightrl_tuning"  # set on models with a tuning other than `ALL_WEIGHTS`

# Which weights to export: the base with the added weights merged, the base alone, or only the added weights.
Part = Literal["whole", "base", "added"]


@dataclass(frozen=True)
class Tuning:
    """Trains all weights of a model and adds none."""

    kind: ClassVar[str] = ""  # the name used in checkpoints
    keeps_base: ClassVar[bool] = False  # whether the loaded weights are frozen and left out of checkpoints
    config_file: ClassVar[str] = "config.json"  # marks folders that `save` has written

    def add_to(self, model: PreTrainedModel, *, seed: int = 0) -> None:
        """Freezes untrained weights and adds new ones, initialized from the seed (not on the meta device)."""

    def check_split(self, role: str, model: PreTrainedModel, modules: Collection[str] | None) -> None:
        """Raises ValueError if weights are added outside the layers, or to modules of a layer that `modules` omits."""

    def split_experts(self, experts: torch.nn.Module, part: int) -> None:
        """Makes a MoE block's experts compute on a rank that holds only the `part`-th share of them."""

    def split_styles(self, name: str, module: torch.nn.Module, style: str) -> dict[str, str]:
        """Maps a linear layer's modules to their tensor-parallel style: `colwise`, `rowwise` or `replicate`."""
        return {name: style}

    def adds(self, name: str) -> bool:
        """Whether this parameter was added to the base."""
        return False

    def added_values(self, seed: int) -> Callable[[str, torch.Size], Tensor]:
        """Returns a function that makes an added parameter's initial values from its name and shape."""
        return lambda name, shape: torch.zeros(shape)

    def base_name(self, name: str) -> str:
        """Returns the Hugging Face name of a base parameter."""
        return name

    def base_modules(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside this context, the model has only its base's modules, so parameters have the base's names."""
        return contextlib.nullcontext()

    def base_only(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside this context, the model computes what its base would, without a copy of the base."""
        raise ValueError("Training changes all weights of this model, so the initial model is no longer available.")

    def sources(self, model: torch.nn.Module, part: Part = "whole") -> dict[str, list[str]]:
        """Maps each exported Hugging Face name to the names of the `held_tensors` that `merge` combines."""
        return {} if part == "added" else {name: [name] for name in held_tensors(model)}

    def merge(self, model: torch.nn.Module, name: str, tensors: Sequence[Tensor]) -> Tensor:
        """Returns the exported tensor of this name, merged from its sources, which are whole tensors."""
        return plain_weight(model, name, tensors[0])

    def saved_name(self, name: str) -> str:
        """Returns an added parameter's name in exported folders and on servers."""
        raise KeyError(name)

    def served_form(self, model: PreTrainedModel, num_versions: int) -> ServedForm:
        """Returns how servers hold `num_versions` versions of the added weights; raises ValueError if they cannot."""
        raise NotImplementedError

    def saved_config(self, model: PreTrainedModel, base: str | None) -> str | None:
        """Returns the JSON for `save` and `add_saved`, with the base's name; None if checkpoints hold all weights."""
        return None

    def save(self, tensors: Mapping[str, Tensor], config: str, folder: Path) -> None:
        """Writes the added parameters to an existing folder."""
        raise NotImplementedError

    def check_saved(self, base: PreTrainedModel, tensors: Mapping[str, Tensor], config: str, name: str) -> None:
        """Raises ValueError if other tools would load a different model from `save`'s files; `base` has no weights."""

    def add_saved(self, model: PreTrainedModel, tensors: Mapping[str, Tensor], config: str) -> None:
        """Adds a checkpoint's extra parameters to the base `model`."""
        raise NotImplementedError


ALL_WEIGHTS = Tuning()


@dataclass(frozen=True)
class ServedForm:
    """How servers hold the weights that training adds to a model's base."""

    tuning: Tuning
    num_versions: int  # how many versions a server holds at the same time
    config: dict[str, Any]  # sent to a server with each version
    server_args: dict[str, Any]  # SGLang's arguments for servers that the run starts
    how_to_start: str  # for users who start the servers themselves


def tuning_of(model: torch.nn.Module) -> Tuning:
    tuning: Tuning = getattr(model, ATTRIBUTE, ALL_WEIGHTS)
    return tuning


def unwrapped(layer: Any) -> Any:
    """Returns the base's layer; adapters wrap it, once for each adapted parameter."""
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    return layer


def plain_weight(model: torch.nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Returns a base tensor as the model computes with it: dequantized if its layer holds it in fewer bits."""
    layer: Any = unwrapped(model.get_submodule(name.rpartition(".")[0])) if tensor.dtype == torch.uint8 else None
    plain: Tensor = layer.dequantized(tensor.detach()) if hasattr(layer, "dequantized") else tensor
    return plain


def held_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the model's parameters and persistent buffers, for example a router's biases."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: value for name, value in model.state_dict().items() if name not in parameters}
    return {**dict(model.named_parameters()), **buffers}


def whole_parameters(model: torch.nn.Module, part: Part = "whole") -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a part with their Hugging Face names; in "whole", the added weights are merged."""
    tuning, held = tuning_of(model), held_tensors(model)
    for name, sources in tuning.sources(model, part).items():
        yield name, tuning.merge(model, name, [held[source] for source in sources])
