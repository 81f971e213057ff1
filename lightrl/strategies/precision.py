"""Precision: changes how Lightning's plugins treat batches and clip shards; sets experts' dtypes under autocast."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.optim import Optimizer

from lightrl.models.moe import moe_blocks, router_of
from lightrl.strategies.ranks.processes import local


class LeavesBatches(Precision):
    """Keeps Lightning from converting floats in batches, which fails for frozen dataclasses."""

    def convert_input(self, data: object) -> object:
        return data


class ClipsByStrategy(Precision):
    """Clips gradients of parameters that are sharded over ranks."""

    strategy: Any  # an FSDP2Strategy

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clips this rank's shards by the norm of the whole gradient, over all meshes. Collective."""
        shards = gradients(optimizer)
        scale = clip_val / (self.strategy.ranks.total_norm(shards) + 1e-6)
        for gradient in shards if scale < 1 else ():
            local(gradient).mul_(scale)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        for gradient in gradients(optimizer):  # torch's function rejects a mix of shards and whole tensors
            local(gradient).clamp_(-clip_val, clip_val)


def gradients(optimizer: Optimizer) -> list[Tensor]:
    """Returns the gradients of an optimizer's parameters, skipping parameters that have none."""
    values = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    return [value for value in values if value is not None]


def set_expert_precision(model: torch.nn.Module) -> None:
    """Makes MoE routers compute in float32 under autocast, and experts in the autocast dtype.

    Autocast alone would leave fused experts in float32, and round router logits, which sends tokens to other experts.
    """
    for block in moe_blocks(model).values():
        experts: Any = block.experts
        parts: list[tuple[Any, Any]] = [(router_of(block), _call_in_float32), (experts, _call_in_autocast_dtype)]
        for module, call in parts:
            if not (isinstance(module.forward, functools.partial) and module.forward.func is call):
                module.forward = functools.partial(call, module, module.forward)


def _call_in_float32(router: torch.nn.Module, forward: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
    if not torch.is_autocast_enabled(hidden.device.type):
        return forward(hidden, *others)
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float(), *others)


def _call_in_autocast_dtype(experts: torch.nn.Module, forward: Callable[..., Any], hidden: Tensor, *others: Any) -> Any:
    device = hidden.device.type
    is_peft_wrapper = hasattr(experts, "base_layer")  # the wrapper also has parameters
    if not torch.is_autocast_enabled(device) or is_peft_wrapper:
        return forward(hidden, *others)
    dtype = torch.get_autocast_dtype(device)
    weights = dict(experts.named_parameters())
    if all(weight.dtype == dtype for weight in weights.values()):
        return forward(hidden.to(dtype), *others)
    cast = {name: weight.to(dtype) for name, weight in weights.items()}
    return torch.func.functional_call(experts, cast, (hidden, *others))


_Mixin = TypeVar("_Mixin", bound=Precision)


def subclassed(plugin: Precision, mixin: type[_Mixin]) -> _Mixin:
    """Returns a copy of the plugin that also has the methods of `mixin`; its class is a subclass of the same name."""
    kind = type(plugin)
    copied = copy.copy(plugin)
    copied.__class__ = type(kind.__name__, (mixin, kind), {"__qualname__": kind.__qualname__})
    return cast(_Mixin, copied)
