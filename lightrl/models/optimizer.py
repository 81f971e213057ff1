"""The optimizer of an RLModule: parameters by role, their precision, a learning rate that follows the iterations."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lightrl.models.role import Role

_NUM_SAMPLED = 2**20  # weights of a parameter
_MOST = 0.9  # of the weights must be able to change


def check_adamw(
    *, lr: float | None = None, weight_decay: float | None = None, betas: Sequence[float] = (0.0, 0.0)
) -> None:
    """Raises ValueError if a setting of AdamW is out of its range, before there is a model."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0, got {value}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, such as (0.9, 0.95), got {betas}.")


def model_children(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The models of a module, and a critic's head on one, by attribute."""
    return {key: child for key, child in module.named_children() if key == "value_head" or hasattr(child, "base_model")}


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that are part of no model, such as a coefficient that is learned, by name."""
    models = model_children(module)
    return {name: item for name, item in module.named_parameters() if name.partition(".")[0] not in models}


def by_role(
    module: torch.nn.Module, roles: Iterable[str], parameters: Iterable[torch.nn.Parameter]
) -> dict[str, list[torch.nn.Parameter]]:
    """Sorts parameters by the role, an attribute of the module; the policy gets every one that is no other role's."""
    role_of = {item: name for name in roles if name != "policy" for item in getattr(module, name).parameters()}
    parts: dict[str, list[torch.nn.Parameter]] = {name: [] for name in ("policy", *roles)}
    for item in parameters:
        parts[role_of.get(item, "policy")].append(item)
    return parts


def parameter_groups(
    module: torch.nn.Module, roles: Mapping[str, Role], *, lr: float | None = None
) -> list[dict[str, Any]]:
    """A group for each trained role, with its own `lr`, which may be 0, and `weight_decay`.

    Args:
        module: has each role's model as an attribute.
        roles: the trained ones, the policy first.
        lr: of roles without one; None is the optimizer's.
    """
    trained = [item for item in module.parameters() if item.requires_grad]
    groups: list[dict[str, Any]] = []
    for name, items in by_role(module, roles, trained).items():
        settings = {"lr": lr if roles[name].lr is None else roles[name].lr, "weight_decay": roles[name].weight_decay}
        groups.append({"params": items, **{key: value for key, value in settings.items() if value is not None}})
    return groups


def keep_float32(module: torch.nn.Module) -> None:
    """Makes a module float32, which it stays when the model around it is rounded, as `bf16-true` does.

    For what changes by less than bfloat16 resolves: adapters, heads and averages.
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
    """The warning about trained weights below float32 that steps of their `lr` cannot change; None if most can.

    AdamW moves a weight by about `lr`, and less than half of the distance to the next number is rounded away.

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
        "trained weights that are below float32, bfloat16 for example: the others round it away. Use float32 weights "
        "(no dtype, trainer.precision bf16-mixed), lora, whose adapters are float32, or a larger lr."
    )


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
        num_iterations: of the whole run; infinite if it has no known end.
        warmup: iterations, or below 1 the share of the run.
        min_lr_ratio: of the learning rate at the end of the decay.
        decay_start: the iteration from which on it decays.
    """
    if num_iterations == math.inf and (lr_decay != "constant" or 0 < warmup < 1):
        setting = f"{lr_decay=}" if lr_decay != "constant" else f"warmup_iterations={warmup}"
        raise ValueError(f"{setting} needs the end of the run. Set max_steps or max_epochs.")
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
