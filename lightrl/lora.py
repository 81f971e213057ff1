"""LoRA: small trained adapters on a frozen model, through `peft`; merged where whole parameters are wanted.

The model keeps its Hugging Face class and the names of its weights: peft replaces its linear layers by ones that hold
the frozen weight W and the adapters A, B, and compute (W + scaling · B A) x.

Source: LoRA, https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ADAPTER = "default"  # peft's name of the one adapter that there is


@dataclass(frozen=True)
class LoRA:
    """What is trained instead of a model's own weights.

    Args:
        rank: of the adapters, the inner dimension of B A.
        alpha: the adapters count `alpha / rank` times.
        target_modules: names of the linear layers that get adapters; `all-linear` is all but the output head.
        adapter: a folder in peft's form whose adapters training goes on from; fresh ones, which change nothing yet,
            if None. Its rank, alpha and layers then hold, not those given here.
    """

    rank: int = 16
    alpha: int = 32
    target_modules: str | tuple[str, ...] = "all-linear"
    adapter: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}, expected at least 1. Raise it.")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha={self.alpha}, expected more than 0. Raise it.")
        if self.adapter is not None and not (Path(self.adapter) / "adapter_config.json").is_file():
            raise ValueError(
                f"lora.adapter={self.adapter!r} has no adapter_config.json, expected a folder in peft's form. Mend the "
                "path, or leave it out for fresh adapters."
            )

    def add_to(self, model: PreTrainedModel) -> None:
        """Freezes the model and adds the adapters, which are trained.

        Raises:
            ImportError: if peft is not installed.
            ValueError: if the model has no such layers.
        """
        try:
            from peft import LoraConfig
        except ImportError as error:
            raise ImportError(
                "lora= needs the package peft, expected it installed. pip install lightrl[lora]"
            ) from error
        model.requires_grad_(False)
        if self.adapter is not None:
            model.load_adapter(self.adapter, adapter_name=_ADAPTER)
        else:
            targets = self.target_modules if isinstance(self.target_modules, str) else list(self.target_modules)
            model.add_adapter(
                LoraConfig(r=self.rank, lora_alpha=self.alpha, lora_dropout=0.0, target_modules=targets), _ADAPTER
            )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(_is_adapter(name))
        model.eval()


def has_adapters(model: torch.nn.Module) -> bool:
    return bool(getattr(model, "_hf_peft_config_loaded", False))


@contextlib.contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Inside, the model computes what it did before it got adapters: the reference policy, at no cost of memory."""
    peft_model: Any = model
    peft_model.disable_adapters()
    try:
        yield
    finally:
        peft_model.enable_adapters()


def merged_parameters(
    model: torch.nn.Module, whole: Callable[[Tensor], Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, Tensor]]:
    """The parameters under their Hugging Face names, adapters merged into the weights they belong to.

    One at a time: the memory of one merged weight is all that is needed beside the model. As peft merges: in the
    adapters' dtype, then cast to the weight's.

    Args:
        model: with or without adapters.
        whole: gives the whole tensor of a shard; called once for each parameter, in the same order on every rank.
    """
    if not has_adapters(model):
        for name, parameter in model.named_parameters():
            yield name, whole(parameter)
        return
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if _is_adapter(name):
            continue
        if ".base_layer." not in name:
            yield name, whole(parameter)
            continue
        layer_name, _, rest = name.partition(".base_layer.")
        weight = whole(parameter).detach()
        if rest == "weight":
            layer: Any = model.get_submodule(layer_name)
            down = whole(parameters[f"{layer_name}.lora_A.{_ADAPTER}.weight"]).detach()
            up = whole(parameters[f"{layer_name}.lora_B.{_ADAPTER}.weight"]).detach()
            weight = weight + (up @ down * layer.scaling[_ADAPTER]).to(weight.dtype)
        yield f"{layer_name}.{rest}", weight


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name
