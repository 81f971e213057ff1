"""Whether a checkpoint fits the configuration that goes on from it, and what to say where it does not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
    from torch.nn import Parameter
    from torch.optim import Optimizer

NAMED = 3  # so many weights of a kind are named in a message

Shapes = Mapping[str, Sequence[int]]


def check_weights(saved: Shapes, own: Shapes, checkpoint: str | Path | None) -> None:
    """Refuses a checkpoint whose weights have other names or shapes than the configuration's.

    Args:
        saved: of the checkpoint.
        own: of the models as they are configured.
        checkpoint: where it is; None if that is not known.

    Raises:
        ValueError: if they differ; it names the first few.
    """
    other = [
        f"{name} {list(saved[name])} there and {list(own[name])} here" for name in own if _differ(name, saved, own)
    ]
    only_there = [name for name in saved if name not in own]
    only_here = [name for name in own if name not in saved]
    kinds = (("of another shape", other), ("only in the checkpoint", only_there), ("only in this run", only_here))
    found = "; ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in kinds if names)
    if found:
        raise ValueError(refusal(f"its weights are others: {found}", checkpoint))


def check_optimizers(states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], where: str | None) -> None:
    """Refuses optimizer states, by position as Lightning saves them, of other kinds of optimizers.

    Raises:
        ValueError: if they have other parameter groups.
    """
    for state, optimizer in zip(states, optimizers, strict=False):
        saved = state["param_groups"]
        missing = sorted({key for group in saved for key in optimizer.defaults.keys() - group.keys()})
        if missing:
            raise ValueError(refusal(_without(missing, optimizer), where))
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                refusal(f"its optimizer's groups have {sizes[0]} parameters, those of this run's {sizes[1]}", where)
            )


def check_optimizer_names(
    saved: Collection[str], needed: Collection[str], optimizer: Optimizer, where: str | Path | None
) -> None:
    """Refuses an optimizer state by parameter name that lacks something of this run's.

    Args:
        saved: its names, such as `state.policy.lm_head.weight.exp_avg` and `param_groups.policy.lm_head.weight.lr`.
        needed: those of this run.
        optimizer: of this run.
        where: the checkpoint is; None if that is not known.

    Raises:
        ValueError: if one is missing; it says what of the optimizer, or of which parameters.
    """
    there = {parameter_of(name) for name in saved}
    absent = list(dict.fromkeys(parameter_of(name) for name in needed if parameter_of(name) not in there))
    if absent:
        raise ValueError(refusal(f"its optimizer has not {len(absent)} of the parameters ({_first(absent)})", where))
    missing = sorted({name.rpartition(".")[2] for name in needed if name not in saved})
    if missing:
        raise ValueError(refusal(_without(missing, optimizer), where))


def check_named_optimizer(
    state: Mapping[str, Any], optimizer: Optimizer, names: Mapping[Parameter, str], where: str | Path | None
) -> None:
    """Refuses an optimizer state by parameter name of another kind of optimizer, or with other parameter groups.

    Args:
        state: as in `check_optimizer_names`, with values.
        optimizer: of this run.
        names: of its parameters.
        where: the checkpoint is; None if that is not known.

    Raises:
        ValueError: if parameters of one group have different settings there: torch would take the first one's for all.
    """
    settings = [  # of one group each, by parameter
        [f"param_groups.{names[parameter]}.{setting}" for parameter in group["params"] if parameter in names]
        for group in optimizer.param_groups
        for setting in sorted(group.keys() - {"params"})
    ]
    check_optimizer_names(state.keys(), [key for keys in settings for key in keys], optimizer, where)
    for keys in settings:
        other = next((key for key in keys if state[key] != state[keys[0]]), None)
        if other is not None:
            first, second = (f"{parameter_of(key)}, whose {key.rpartition('.')[2]} is" for key in (keys[0], other))
            said = f"{first} {state[keys[0]]} there, and {second} {state[other]}"
            raise ValueError(refusal(f"one of this run's parameter groups has {said}", where))


def parameter_of(name: str) -> str:
    """`policy.lm_head.weight` of `state.policy.lm_head.weight.exp_avg`."""
    return name.partition(".")[2].rpartition(".")[0]


def refusal(what: str, checkpoint: str | Path | None) -> str:
    """The message that refuses it.

    Args:
        what: differs.
        checkpoint: where it is; None if that is not known.
    """
    config = None if checkpoint is None else Path(checkpoint).parent.parent / "config.yaml"
    run = f" ({config})" if config is not None and config.is_file() else ""
    return (
        f"{checkpoint or 'The checkpoint'} does not fit this configuration: {what}. Expected one of a run with the "
        f"same model, algorithm and optimizer. Resume with that run's configuration{run}; or start a new run from its "
        f"weights: lightrl export {checkpoint or 'CHECKPOINT'} --to FOLDER, then --model.policy FOLDER without "
        "--ckpt_path."
    )


def load_model(strategy: Strategy, load: Callable[..., None], checkpoint: dict[str, Any], strict: bool = True) -> None:
    """Lightning's load of the module's weights, with an error that says what does not fit."""
    module = strategy.lightning_module
    assert module is not None
    try:
        load(checkpoint, strict=strict)
    except RuntimeError as error:
        saved, own = checkpoint["state_dict"], module.state_dict()
        try:
            check_weights(_shapes(saved), _shapes(own), module.trainer.ckpt_path)
        except ValueError as refusal:
            raise refusal from None  # torch's error has a line for each weight
        raise error


def _without(missing: Sequence[str], optimizer: Optimizer) -> str:
    kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
    return f"its optimizer's state has no {', '.join(missing)}, which {kind} has"


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    return {name: value.shape for name, value in tensors.items() if hasattr(value, "shape")}


def _differ(name: str, saved: Shapes, own: Shapes) -> bool:
    return name in saved and list(saved[name]) != list(own[name])


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])
