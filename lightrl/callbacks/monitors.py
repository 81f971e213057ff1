"""Finds mistyped metric names in callbacks and schedulers before they cost a run its checkpoints.

A name close to one that every run logs causes a warning before the run starts. The error follows once all names are
known: after the sanity check, or after one iteration.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from lightrl.checks.printable import did_you_mean

if TYPE_CHECKING:
    import lightning as L

    from lightrl.trajectory import Group

log = logging.getLogger(__name__)

# Every run that validates logs these, whatever its reward and loss.
ALWAYS_LOGGED = frozenset(
    f"{prefix}/{name}"
    for prefix, names in {
        "rollout": "reward reward_std length_tokens truncated_fraction mixed_version_fraction dropped_trajectories",
        "val": "reward length_tokens truncated_fraction failed_fraction prompts",
        "policy": "loss grad_norm skipped_updates",
    }.items()
    for name in names.split()
)
_NEAR = 0.85  # difflib's ratio; 1 for equal names


def warn_of_monitors(trainer: L.Trainer) -> None:
    """Warns about monitored names that look mistyped, before models are loaded."""
    for name, monitor in _monitors(trainer):
        hint = did_you_mean(monitor, ALWAYS_LOGGED, num=1, cutoff=_NEAR)
        if hint and monitor not in ALWAYS_LOGGED:
            text = "%s monitors %s, which is logged only if your reward, module or a callback logs it.%s"
            log.warning(text, name, monitor, hint)


def check_monitors(trainer: L.Trainer, *prefixes: str, upcoming: Collection[str] = ()) -> None:
    """Raises ValueError if a callback or scheduler waits for a metric with one of these prefixes that is not logged.

    Args:
        prefixes: prefixes of the metrics that have been logged, for example `val/`.
        upcoming: metrics that will be logged.
    """
    logged = {*trainer.callback_metrics, *upcoming}
    for name, monitor in _monitors(trainer):
        if monitor.startswith(prefixes) and monitor not in logged:
            hint = did_you_mean(monitor, logged, num=1)
            names = ", ".join(sorted(other for other in logged if other.startswith(prefixes)))
            raise ValueError(f"{name} monitors {monitor}, which is not logged.{hint} Logged metrics: {names}.")


def names_of_validation(groups: Iterable[Group], group_size: int) -> set[str]:
    """Returns the metrics that a validation will log, judging by the metrics of rewarded training groups."""
    names = {name for group in groups for item in group.trajectories for name in item.metrics}
    names = {"accuracy_fraction" if name == "accuracy" else name for name in names}
    names |= {f"pass_at_{group_size}_fraction"} if group_size > 1 else set()
    return {*ALWAYS_LOGGED, *(f"val/{name}" for name in names)}


def are_names_known(trainer: Any, module: Any) -> bool:
    """Whether no user code but the reward can log validation metrics, so that all their names are known."""
    classes = [type(module), *map(type, trainer.callbacks)]
    has_user_code = any(not cls.__module__.startswith(("lightrl.", "lightning.")) for cls in classes)
    return not has_user_code and not module.validation_metrics


def _monitors(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each callback or scheduler that needs a metric, and the metric."""
    plateaus = (config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
    for item in (*trainer.callbacks, *plateaus):
        monitor = getattr(item, "monitor", None)
        if isinstance(monitor, str) and getattr(item, "strict", True):
            yield type(getattr(item, "scheduler", item)).__name__, monitor
