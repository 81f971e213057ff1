"""The optimizer for an RLModule: parameter groups by role, and a learning-rate schedule over iterations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch

from lightrl.models.role import Role


def model_children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Returns a module's models, and a critic's head on one of them, keyed by attribute name."""
    return {key: child for key, child in module.named_children() if key == "value_head" or hasattr(child, "base_model")}


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters outside the module's models, keyed by name, for example a learned coefficient."""
    models = model_children(module)
    return {name: item for name, item in module.named_parameters() if name.partition(".")[0] not in models}


def by_role(
    module: torch.nn.Module, roles: Iterable[str], parameters: Iterable[torch.nn.Parameter]
) -> dict[str, list[torch.nn.Parameter]]:
    """Groups parameters by role. Each role is an attribute of the module; other parameters go to the policy."""
    role_of = {item: name for name in roles if name != "policy" for item in getattr(module, name).parameters()}
    items_of: dict[str, list[torch.nn.Parameter]] = {name: [] for name in ("policy", *roles)}
    for item in parameters:
        items_of[role_of.get(item, "policy")].append(item)
    return items_of


def parameter_groups(
    module: torch.nn.Module, roles: Mapping[str, Role], *, lr: float | None = None
) -> list[dict[str, Any]]:
    """Makes a parameter group for each trained role, with the role's `lr` and `weight_decay`.

    Args:
        module: has each role's model as an attribute.
        roles: the trained roles, the policy first.
        lr: learning rate for roles that do not set one; None means the optimizer's.
    """
    trained = [item for item in module.parameters() if item.requires_grad]
    groups: list[dict[str, Any]] = []
    for name, items in by_role(module, roles, trained).items():
        settings = {"lr": lr if roles[name].lr is None else roles[name].lr, "weight_decay": roles[name].weight_decay}
        groups.append({"params": items, **{key: value for key, value in settings.items() if value is not None}})
    return groups


def adamw(module: torch.nn.Module, parameters: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    fused = not own_parameters(module)  # own parameters are not sharded, unlike models
    optimizer = torch.optim.AdamW(parameters, fused=fused, **settings)
    optimizer._step_supports_amp_scaling = False  # otherwise Lightning refuses to clip in mixed precision
    return optimizer


def with_schedule(
    optimizer: torch.optim.Optimizer,
    num_iterations: float,
    warmup: float,
    lr_decay: Literal["constant", "linear", "cosine"],
    min_lr_ratio: float = 0.0,
    decay_start: int = 0,
) -> dict[str, Any]:
    """Builds the return value of `configure_optimizers`: a linear warm-up and a decay, stepped once per iteration.

    Args:
        num_iterations: number of iterations in the run; infinite if unknown.
        warmup: a number of iterations, or a fraction of the run if below 1.
        min_lr_ratio: the fraction of the learning rate at which the decay ends.
        decay_start: the iteration at which the decay starts.
    """
    if num_iterations == math.inf and (lr_decay != "constant" or 0 < warmup < 1):
        setting = f"{lr_decay=}" if lr_decay != "constant" else f"warmup_iterations={warmup}"
        raise ValueError(f"{setting} needs to know when the run ends. Set max_steps or max_epochs.")
    warmup_iterations = round(warmup * num_iterations) if 0 < warmup < 1 else warmup

    def factor(iteration: int) -> float:
        warm = min(1.0, (iteration + 1) / max(1, warmup_iterations))
        if lr_decay == "constant":
            return warm
        done = min(1.0, max(0, iteration - decay_start) / max(1, num_iterations - decay_start))
        left = 1 - done if lr_decay == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return warm * (min_lr_ratio + (1 - min_lr_ratio) * left)

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
