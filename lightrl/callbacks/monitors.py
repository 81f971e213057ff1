"""Finds mistyped metric names in callbacks and schedulers before they cost a run its checkpoints.

Before the run starts, a warning names metrics that are close to one that every run logs. An error follows once all
names are known: after the sanity check, one iteration or the first validation. An unchecked metric causes a warning.
"""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightrl.callbacks.rl_callback import RLCallback
from lightrl.checks.printable import did_you_mean

if TYPE_CHECKING:
    import lightning as L

    from lightrl.module import RLModule
    from lightrl.rollout.rl_trainer import RLTrainer
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
LATER = ("staleness/", "sync/", "time/", "eval/")  # prefixes of metrics that the first iteration may not log yet
_NUM_SHOWN = 8  # number of logged metrics that an error lists
_NEAR = 0.85  # minimum of difflib's ratio; equal names have 1


class MonitorCheck(RLCallback):
    """Checks the metrics that callbacks and schedulers monitor; the Trainer adds it to every run."""

    def __init__(self) -> None:
        self._metric_names: set[str] | None = None  # the reward's metrics, from a run's first iteration

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._metric_names = None
        if trainer.is_global_zero:
            warn_of_unchecked(trainer)

    def on_sanity_check_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_monitors(trainer, "val/")

    def on_rewards_ready(self, trainer: RLTrainer, module: RLModule, groups: list[Group]) -> None:
        if self._metric_names is None:
            self._metric_names = {name for group in groups for item in group.trajectories for name in item.metrics}

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        if self._metric_names is None or not trainer.fit_loop.total_batch_idx == batch_idx == 1:
            return
        if are_names_known(trainer, pl_module):  # the first iteration has logged its metrics
            upcoming = names_of_validation(self._metric_names, cast("RLModule", pl_module).validation_group_size)
            checked = ("val/",) if trainer.num_sanity_val_steps else ()
            check_monitors(trainer, "", except_for=(*LATER, *checked), upcoming=upcoming)
        else:
            check_monitors(trainer, "rollout/", "policy/")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for stop in trainer.early_stopping_callbacks:
            if stop.stopping_reason_message and not stop.verbose and trainer.is_global_zero:
                log.info("EarlyStopping after iteration %d: %s", trainer.global_step, stop.stopping_reason_message)

    @staticmethod
    def before_start(trainer: L.Trainer) -> None:
        """Warns about monitored names that look mistyped, before models are loaded."""
        for name, monitor in _monitors(trainer):
            hint = did_you_mean(monitor, ALWAYS_LOGGED, num=1, cutoff=_NEAR)
            if hint and monitor not in ALWAYS_LOGGED:
                text = "%s monitors %s, which is logged only if your reward, module or a callback logs it.%s"
                log.warning(text, name, monitor, hint)

    @staticmethod
    def explain(trainer: L.Trainer, error: Exception) -> None:
        """Raises a clearer ValueError if Lightning raised `error` because a monitored metric is not logged."""
        if "conditioned on metric" in str(error) or "could not find the monitored key" in str(error):
            check_monitors(trainer, "")


def check_monitors(
    trainer: L.Trainer, *prefixes: str, except_for: tuple[str, ...] = (), upcoming: Collection[str] = ()
) -> None:
    """Raises ValueError if a callback or scheduler monitors a metric that has one of these prefixes but is not logged.

    Args:
        prefixes: prefixes of the metrics that have been logged, for example `val/`; "" for all.
        except_for: prefixes of metrics that may be logged later.
        upcoming: metrics that will be logged.
    """
    logged = {*trainer.callback_metrics, *upcoming, "epoch", "step"}  # ModelCheckpoint adds the last two
    for name, monitor in _monitors(trainer):
        is_logged = monitor in logged or monitor.rpartition("/")[0] in upcoming  # val/reward/LABEL
        if monitor.startswith(prefixes) and not (is_logged or monitor.startswith(except_for)):
            hint = did_you_mean(monitor, logged, num=1)
            names = sorted(other for other in logged if other.startswith(prefixes))
            near = names if len(names) <= _NUM_SHOWN else difflib.get_close_matches(monitor, names, _NUM_SHOWN, 0.0)
            shown = f"Logged metrics: {', '.join(near)}"
            if len(near) < len(names):
                shown = (
                    f"The closest of {len(names)} logged metrics: {', '.join(near)}. docs/reference/metrics.md has all"
                )
            raise ValueError(f"{name} monitors {monitor}, which is not logged.{hint} {shown}.")


def names_of_validation(metric_names: Collection[str], group_size: int) -> set[str]:
    """Returns the metrics that a validation will log if the reward reports metrics with these names."""
    names = {"accuracy_fraction" if name == "accuracy" else name for name in metric_names}
    names |= {f"pass_at_{group_size}_fraction"} if group_size > 1 else set()
    return {*ALWAYS_LOGGED, *(f"val/{name}" for name in names)}


def are_names_known(trainer: Any, module: Any) -> bool:
    """Whether the reward is the only user code that can log validation metrics, so that all their names are known."""
    classes = [type(module), *map(type, trainer.callbacks)]
    has_user_code = any(not cls.__module__.startswith(("lightrl.", "lightning.")) for cls in classes)
    return not has_user_code and not module.validation_metrics


def warn_of_unchecked(trainer: Any) -> None:
    """Warns about callbacks that never check their metric because the run ends before a validation or save is due."""
    length, num_epochs = trainer.num_training_batches, trainer.check_val_every_n_epoch  # between validations
    max_epochs = trainer.max_epochs if trainer.max_epochs is not None else -1
    lasts = [
        *([trainer.max_steps] if trainer.max_steps > 0 else []),
        *([max_epochs * length] if max_epochs > 0 else []),
    ]
    last = min(lasts, default=math.inf) if trainer.accumulate_grad_batches == 1 else math.inf  # else steps != batches
    remaining = range(0) if last == math.inf else range(trainer.global_step + 1, int(last) + 1)
    interval, why = trainer.val_check_batch, ""  # `interval`: None for a time; `why`: why no validation runs

    def is_due(step: int) -> bool:
        epoch, batch = divmod(step - 1, length)
        is_epoch_due = num_epochs is not None and (epoch + 1) % num_epochs == 0
        return bool(step % interval == 0 if num_epochs is None else is_epoch_due and (batch + 1) % interval == 0)

    is_read = trainer.fit_loop.epoch_loop.val_loop._combined_loader is not None  # False before the first validation
    if not trainer.enable_validation or (is_read and not sum(trainer.num_val_batches)):
        why = "the run has no validation. Set data.validation, and trainer.limit_val_batches above 0"
    elif remaining and interval not in (None, math.inf) and not any(map(is_due, remaining)):
        why = f"the run ends after iteration {int(last)}, before a validation. Lower trainer.val_check_interval"
    for item in trainer.callbacks:
        name, monitor, reason = type(item).__name__, getattr(item, "monitor", None), ""
        if isinstance(item, EarlyStopping):
            is_late = bool(remaining) and remaining[-1] <= math.ceil(remaining[0] / length) * length
            late = "it checks only after an epoch, but the run ends no later than the first one. Validate more often"
            reason = why if not item._check_on_train_epoch_end else late if is_late else ""
        elif isinstance(item, ModelCheckpoint) and monitor is not None:
            steps = item._every_n_train_steps
            reason = why if monitor.startswith("val/") else ""
            if remaining and steps > 0 and not any(step % steps == 0 for step in remaining):
                reason = f"every_n_train_steps={steps}, but the run ends after iteration {int(last)}. Lower it"
        if reason:
            log.warning("%s never checks %s: %s.", name, monitor, reason)


def _monitors(trainer: Any) -> Iterator[tuple[str, str]]:
    """Yields the name of each callback or scheduler that needs a metric, and that metric."""
    plateaus = (config for config in trainer.lr_scheduler_configs if config.reduce_on_plateau)
    for item in (*trainer.callbacks, *plateaus):
        monitor = getattr(item, "monitor", None)
        if isinstance(monitor, str) and getattr(item, "strict", True):
            yield type(getattr(item, "scheduler", item)).__name__, monitor
