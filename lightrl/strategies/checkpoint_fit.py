"""Whether a checkpoint fits the configuration that goes on from it, and what to say where it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
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
        raise ValueError(_refusal(f"its weights are others: {found}", checkpoint))


def check_optimizers(states: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer], where: str | None) -> None:
    """Refuses optimizer states, by position as Lightning saves them, of other kinds of optimizers.

    Raises:
        ValueError: if they have other parameter groups.
    """
    for state, optimizer in zip(states, optimizers, strict=False):
        kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
        saved = state["param_groups"]
        missing = sorted({key for group in saved for key in optimizer.defaults.keys() - group.keys()})
        if missing:
            raise ValueError(_refusal(f"its optimizer's state has no {', '.join(missing)}, which {kind} has", where))
        sizes = [[len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups)]
        if sizes[0] != sizes[1]:
            raise ValueError(
                _refusal(f"its optimizer's groups have {sizes[0]} parameters, those of this run's {sizes[1]}", where)
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


def _shapes(tensors: Mapping[str, Any]) -> dict[str, Sequence[int]]:
    return {name: value.shape for name, value in tensors.items() if hasattr(value, "shape")}


def _differ(name: str, saved: Shapes, own: Shapes) -> bool:
    return name in saved and list(saved[name]) != list(own[name])


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:NAMED], *(["..."] if len(names) > NAMED else [])])


def _refusal(what: str, checkpoint: str | Path | None) -> str:
    config = None if checkpoint is None else Path(checkpoint).parent.parent / "config.yaml"
    run = f" ({config})" if config is not None and config.is_file() else ""
    return (
        f"{checkpoint or 'The checkpoint'} does not fit this configuration: {what}. Expected one of a run with the "
        f"same model and algorithm. Resume with that run's configuration{run}; or start a new run from its weights: "
        f"lightrl export {checkpoint or 'CHECKPOINT'} --to FOLDER, then --model.policy FOLDER without --ckpt_path."
    )
