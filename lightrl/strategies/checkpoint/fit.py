"""Checks whether a checkpoint fits the configuration that resumes from it; errors name the difference.

In all functions `where` is the checkpoint's path, or None if unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Where = str | Path | None
_MAX_NAMES = 3  # maximum number of names of each kind in a message

Shapes = Mapping[str, Sequence[int]]


def check_weights(saved: Shapes, expected: Shapes, where: Where) -> None:
    """Raises ValueError if the weights' names or shapes differ from the run's; the error names the first few."""
    reshaped = [
        f"{name} {list(saved[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in saved and list(saved[name]) != list(shape)
    ]
    unexpected = [name for name in saved if name not in expected]
    missing = [name for name in expected if name not in saved]
    kinds = (("of a different shape", reshaped), ("only in the checkpoint", unexpected), ("only in this run", missing))
    differences = "; ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in kinds if names)
    if differences:
        raise ValueError(refusal(f"its weights differ: {differences}", where))


def check_optimizers(states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], where: Where) -> None:
    """Raises ValueError if optimizers saved by Lightning, matched by position, have different settings or groups."""
    for state, optimizer in zip(states, optimizers, strict=False):
        saved = state["param_groups"]
        _check_complete({key for group in saved for key in optimizer.defaults.keys() - group.keys()}, optimizer, where)
        sizes, own_sizes = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
        if sizes != own_sizes:
            raise ValueError(
                refusal(f"its optimizer groups have {sizes} parameters, but this run's have {own_sizes}", where)
            )


def check_optimizer_names(saved: Collection[str], needed: Collection[str], optimizer: Optimizer, where: Where) -> None:
    """Rejects an optimizer state that lacks entries. A parameter that never had a gradient needs no `state.` entries.

    Args:
        saved: entry names, like `state.policy.lm_head.weight.exp_avg` and `param_groups.policy.lm_head.weight.lr`.
        needed: entry names of this run's `optimizer`.

    Raises:
        ValueError: if an entry is missing; the error names the parameters or the missing part of the optimizer's state.
    """
    parameters = {parameter_of(name) for name in saved}
    missing = list(dict.fromkeys(parameter_of(name) for name in needed if parameter_of(name) not in parameters))
    if missing:
        raise ValueError(refusal(f"its optimizer lacks {len(missing)} of the parameters ({_first(missing)})", where))
    stepped = {parameter_of(name) for name in saved if name.startswith("state.")}
    missing = [name for name in {*needed} - {*saved} if not name.startswith("state.") or parameter_of(name) in stepped]
    _check_complete({name.rpartition(".")[2] for name in missing}, optimizer, where)


def check_named_optimizer(
    state: Mapping[str, object], optimizer: Optimizer, names: Mapping[Tensor, str], where: Where
) -> None:
    """Rejects an optimizer state keyed by parameter name that was saved with different parameter groups.

    Args:
        state: entry name (see `check_optimizer_names`) → value.
        names: the names of the optimizer's parameters.

    Raises:
        ValueError: if parameters in one group have different settings; torch would apply the first parameter's to all.
    """
    settings = [  # for each setting of each group, the names of its entries
        [f"param_groups.{names[parameter]}.{setting}" for parameter in group["params"] if parameter in names]
        for group in optimizer.param_groups
        for setting in sorted(group.keys() - {"params"})
    ]
    for keys in settings:
        other = next((key for key in keys if state[key] != state[keys[0]]), None)
        if other is not None:
            setting = other.rpartition(".")[2]
            first, second = (f"{state[key]} for {parameter_of(key)}" for key in (keys[0], other))
            raise ValueError(refusal(f"within one of this run's groups, its {setting} is {first} and {second}", where))


def parameter_of(name: str) -> str:
    """Returns `policy.lm_head.weight` for `state.policy.lm_head.weight.exp_avg`."""
    return name.partition(".")[2].rpartition(".")[0]


def refusal(difference: str, where: Where) -> str:
    config = None if where is None else Path(where).parent.parent / "config.yaml"
    run = f" ({config})" if config is not None and config.is_file() else ""
    return (
        f"{where or 'The checkpoint'} does not fit this configuration: {difference}. Model, algorithm and optimizer "
        f"must be the same. Resume with that run's configuration{run}, or start a new run from its weights: lightrl "
        f"export {where or 'CHECKPOINT'} --to FOLDER, then --model.policy FOLDER without --ckpt_path."
    )


def _check_complete(missing: Collection[str], optimizer: Optimizer, where: Where) -> None:
    if missing:
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        raise ValueError(refusal(f"its optimizer's state has no {', '.join(sorted(missing))}, which {kind} has", where))


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:_MAX_NAMES], *(["..."] if len(names) > _MAX_NAMES else [])])
