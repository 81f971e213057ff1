"""The dtype that a trainer computes in, modules that stay float32 in bfloat16 models, and updates lost to rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_NUM_SAMPLED = 2**20  # maximum number of weights of a parameter to test
_MOST = 0.9  # fraction of the weights that an update must be able to change


def computing_dtype(precision: str, weights: torch.dtype) -> torch.dtype:
    """Returns the dtype of a trainer's matrix products under this `precision`, such as `bf16-mixed`."""
    return {"16": torch.float16, "bf16": torch.bfloat16}.get(precision.partition("-")[0], weights)


def keep_float32(module: torch.nn.Module) -> None:
    """Converts a module to float32 and keeps it in float32 when its model is converted, for example by `bf16-true`.

    Use it for weights whose updates are too small for bfloat16: adapters, heads and averages.
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
    """Returns a warning if a step of size `lr` changes too few of the low-precision trained weights, otherwise None.

    AdamW moves a weight by about `lr`; a step of less than half the distance to the next number is rounded away.

    Args:
        total: sums counts over ranks.
    """
    counts, lrs = torch.zeros(2, dtype=torch.float64), set[float]()  # counts: all weights, and those a step can change
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        lr = float(group.get("initial_lr", group["lr"]))
        for parameter in group["params"] if lr else ():
            shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if shard.element_size() < 4 and shard.numel():
                sample = shard.flatten()[:: shard.numel() // _NUM_SAMPLED + 1]
                moves_up, moves_down = ((sample.float() + step).to(sample.dtype) != sample for step in (lr, -lr))
                lrs.add(lr)
                counts += shard.numel() * torch.tensor([1.0, float((moves_up | moves_down).double().mean())])
    num, num_movable = total(counts).tolist()
    if num_movable >= _MOST * num:
        return None
    return (
        f"An update of size lr={' or '.join(f'{lr:g}' for lr in sorted(lrs))} changes only {num_movable / num:.1%} of "
        "the trained weights that are less precise than float32; the others round it away. Use float32 weights (no "
        "dtype, trainer.precision bf16-mixed), lora, whose adapters are float32, or a larger lr."
    )
