"""Limits of bfloat16 weights: modules that stay float32 in a rounded model, and a warning about the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_NUM_SAMPLED = 2**20  # weights of a parameter
_MOST = 0.9  # fraction of the weights that must be able to change


def keep_float32(module: torch.nn.Module) -> None:
    """Makes a module float32 and keeps it so when the model around it is rounded, as by `bf16-true`.

    For weights that change by less than bfloat16 resolves: adapters, heads and averages.
    """
    module.float()
    module._apply = functools.partial(_apply_unrounded, module)  # type: ignore[method-assign]


def _apply_unrounded(module: torch.nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
    def unrounded(tensor: Tensor) -> Tensor:
        changed = change(tensor)
        return changed if changed.element_size() >= tensor.element_size() else tensor.to(changed.device)

    return type(module)._apply(module, unrounded, recurse)  # type: ignore[no-untyped-call]


@torch.no_grad()
def rounding_warning(
    optimizers: Iterable[torch.optim.Optimizer], total: Callable[[Tensor], Tensor] = lambda counts: counts
) -> str | None:
    """Returns a warning about trained weights below float32 that a step of `lr` cannot change; None if most can.

    AdamW moves a weight by about `lr`; less than half of the distance to the next number is rounded away.

    Args:
        total: sums counts over ranks.
    """
    counts, lrs = torch.zeros(2, dtype=torch.float64), set[float]()
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        lr = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"] if lr else ():
            part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if part.element_size() < 4 and part.numel():
                some = part.flatten()[:: part.numel() // _NUM_SAMPLED + 1]
                up, down = ((some.float() + step).to(some.dtype) != some for step in (lr, -lr))
                lrs.add(lr)
                counts += part.numel() * torch.tensor([1.0, float((up | down).double().mean())])
    num, num_movable = total(counts).tolist()
    if num_movable >= _MOST * num:
        return None
    return (
        f"An update of {' or '.join(f'{lr:g}' for lr in sorted(lrs))} (lr) can change {num_movable / num:.1%} of the "
        "trained weights below float32 precision, for example bfloat16: the others round it away. Use float32 weights "
        "(no dtype, trainer.precision bf16-mixed), lora, whose adapters are float32, or a larger lr."
    )
