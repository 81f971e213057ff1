"""Hours and bytes of a whole run, from two of its iterations and its own settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightrl.commands.doctor.trial import Measured

_EPOCHS_OF_LIGHTNING = 1000  # where neither epochs nor steps are set


@dataclass(frozen=True)
class RunLength:
    """What the run's trainer section asks for, before the trial shortened it."""

    max_steps: int
    max_epochs: int | None
    val_check_interval: int | float | None
    every_n_epochs: int | None  # None: val_check_interval counts iterations of the run
    checkpoints: Sequence[Mapping[str, Any]]  # the settings of each ModelCheckpoint
    log_every: int | None  # of TrajectoryLog; None without one

    def num_iterations(self, epoch_iterations: float) -> float:
        """Of the whole run; infinite if nothing ends it."""
        epochs = self.max_epochs if self.max_epochs is not None or self.max_steps >= 0 else _EPOCHS_OF_LIGHTNING
        by_epochs = math.inf if epochs in (None, -1) else epochs * epoch_iterations
        return min(by_epochs, math.inf if self.max_steps < 0 else self.max_steps)

    def num_validations(self, epoch_iterations: float) -> float:
        every = epoch_iterations * (self.every_n_epochs or 1)
        if isinstance(self.val_check_interval, int):
            every = self.val_check_interval
        elif self.val_check_interval is not None:
            every = self.val_check_interval * epoch_iterations
        return self.num_iterations(epoch_iterations) // max(every, 1)

    def num_checkpoints(self, epoch_iterations: float) -> float:
        """At most so many lie on the disk at the end."""
        total = 0.0
        for settings in self.checkpoints:
            top_k = settings.get("save_top_k", 1)
            every = settings.get("every_n_train_steps") or epoch_iterations
            saves = self.num_iterations(epoch_iterations) // max(every, 1)
            total += (saves if top_k == -1 else min(top_k, saves)) + (1 if settings.get("save_last") else 0)
        return total


@dataclass(frozen=True)
class Forecast:
    """Hours and bytes."""

    iterations: float
    iteration_s: float
    validation_s: float  # all of them
    checkpoint_bytes: float
    trajectory_bytes: float

    @property
    def seconds(self) -> float:
        return self.iterations * self.iteration_s + self.validation_s

    @property
    def bytes(self) -> float:
        return self.checkpoint_bytes + self.trajectory_bytes


def forecast(length: RunLength, measured: Measured, *, logged_bytes: int, validation_batches: int) -> Forecast:
    """Of the run, as if each iteration were like the last one of the trial.

    Args:
        length: the run's own.
        measured: in the trial, where one validation had one batch.
        logged_bytes: of one iteration in the trajectory log.
        validation_batches: of a validation in the run.
    """
    epoch = measured.epoch_iterations
    iterations = length.num_iterations(epoch)
    validations = length.num_validations(epoch) if measured.validation_batch_s else 0
    return Forecast(
        iterations=iterations,
        iteration_s=measured.iterations_s[-1],
        validation_s=validations * validation_batches * measured.validation_batch_s if validations else 0.0,
        checkpoint_bytes=length.num_checkpoints(epoch) * measured.checkpoint_bytes,
        trajectory_bytes=0
        if length.log_every is None
        else logged_bytes * math.ceil(iterations / length.log_every)
        if math.isfinite(iterations)
        else math.inf,
    )
