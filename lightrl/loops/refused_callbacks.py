"""Lightning's callbacks that cannot work with an RLModule, each refused with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    Callback,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    RichProgressBar,
    SpikeDetection,
    StochasticWeightAveraging,
    ThroughputMonitor,
    WeightAveraging,
)

_AVERAGES = (
    "it puts averaged weights into the policy when training ends, after the last sync with the engine and the last "
    "validation. Average exported checkpoints instead."
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
    StochasticWeightAveraging: _AVERAGES,
    WeightAveraging: _AVERAGES,
    ThroughputMonitor: (
        "it counts the samples of a batch, but an iteration's batch is only its number. `rollout/tokens_per_s` and "
        "`update/tokens_per_s` are logged anyway."
    ),
    SpikeDetection: (
        "it compares the loss with earlier ones, but a policy's loss has no level of its own. Set "
        "trainer.gradient_clip_val; an update without a finite gradient is skipped anyway."
    ),
    ModelPruning: (
        "it renames the parameters, which the engine would look for in vain. Prune the exported model instead."
    ),
    RichProgressBar: (
        "its line has no room for an iteration's numbers and wraps. Leave it out for RolloutProgressBar, which shows "
        "the phases too, or use TQDMProgressBar."
    ),
    BaseFinetuning: (
        "it freezes layers before the models are loaded. Override configure_model: call super's, then requires_grad_ "
        "of what stays as it is."
    ),
}


def check_callbacks(callbacks: Iterable[object]) -> None:
    """Raises ValueError for the first callback that cannot work; `Tuner` is found by the finder that it adds."""
    for callback in callbacks:
        for kind, reason in _INSTEAD.items():
            if isinstance(callback, kind):
                raise ValueError(f"{type(callback).__name__} cannot be used with an RLModule: {reason}")
