"""Lightning's callbacks that cannot work with an RLModule, each refused with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)

_INSTEAD: dict[type[Callback], str] = {
    LearningRateFinder: (
        "it looks for the fastest fall of the loss, but a policy's loss does not measure its progress. Compare short "
        "runs with several values of model.lr."
    ),
    BatchSizeFinder: (
        "it grows the batch until memory runs out, but microbatches are cut by tokens. Set model.microbatch_tokens; "
        "`lightrl plan` estimates the memory."
    ),
    GradientAccumulationScheduler: (
        "an update accumulates its microbatches' gradients already. Set model.microbatch_tokens, and "
        "model.num_minibatches for updates per iteration."
    ),
    StochasticWeightAveraging: (
        "it replaces the weights when training ends, after the last sync with the engine and the last validation. "
        "Average exported checkpoints instead."
    ),
}


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raises ValueError for the first callback that cannot work; `Tuner` is found by the finder that it adds."""
    for callback in callbacks:
        for kind, reason in _INSTEAD.items():
            if isinstance(callback, kind):
                raise ValueError(f"{kind.__name__} cannot be used with an RLModule: {reason}")
