"""run_inside: code that reads a model's parameters by itself, where they may be sharded; reshard: frees whole ones."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_inside(model: PreTrainedModel, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, with the parameters of the model's root whole meanwhile; collective if they are sharded.

    Args:
        model: as it is, or sharded by FSDP2Strategy.
        function: gives tensors, in tuples or dicts if need be: FSDP looks there for where the backward will begin.
    """
    if not isinstance(model, FSDPModule):
        return function(*args)
    root: Any = model
    add_run_inside(root)
    found = root.run_inside(function, *args)
    if not torch.is_grad_enabled():
        reshard(root)
    return found


def add_run_inside(model: Any) -> None:
    """Gives a sharded model the method `run_inside(function, *args)`, in which its root's parameters are whole."""
    if not hasattr(model, "run_inside"):
        model.run_inside = MethodType(_call, model)
        register_fsdp_forward_method(model, "run_inside")


def reshard(model: torch.nn.Module) -> None:
    """After forwards without a backward, which leave parameters whole: each rank keeps its shards alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _call(model: Any, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)
