"""What the optimizer of an RLModule gets: parameters by role, and a learning rate that follows the iterations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from lightrl.models.model_spec import ModelSpec


def parameter_groups(module: torch.nn.Module, specs: Mapping[str, ModelSpec], *, lr: float) -> list[dict[str, Any]]:
    """A group for each trained role, with its own `lr`, which may be 0, and `weight_decay`.

    Args:
        module: has each role's model as an attribute.
        specs: of the trained roles. The policy's group also gets every parameter that is no role's.
        lr: of roles without one.
    """
    parameters = {
        role: [item for item in getattr(module, role).parameters() if item.requires_grad]
        for role in specs
        if role != "policy"
    }
    of_others = {id(item) for items in parameters.values() for item in items}
    rest = [item for item in module.parameters() if item.requires_grad and id(item) not in of_others]
    groups: list[dict[str, Any]] = []
    for role, items in {"policy": rest, **parameters}.items():
        spec = specs[role]
        decay = {} if spec.weight_decay is None else {"weight_decay": spec.weight_decay}
        groups.append({"params": items, "lr": lr if spec.lr is None else spec.lr, **decay})
    return groups


def with_schedule(
    optimizer: torch.optim.Optimizer,
    num_iterations: float,
    warmup_iterations: int,
    lr_decay: Literal["constant", "linear"],
) -> dict[str, Any]:
    """What `configure_optimizers` returns for a linear warm-up and decay, one step of them per iteration.

    Args:
        num_iterations: of the whole run; infinite if it has no known end.

    Raises:
        ValueError: if the decay needs an end and there is none.
    """
    if lr_decay == "linear" and num_iterations == float("inf"):
        raise ValueError("lr_decay='linear' needs the end of the run. Set max_steps or max_epochs.")

    def factor(iteration: int) -> float:
        warm = min(1.0, (iteration + 1) / max(1, warmup_iterations))
        return warm if lr_decay == "constant" else warm * max(0.0, 1 - iteration / num_iterations)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
