"""StepLog: keeps an iteration's logged numbers in one dict, next to Lightning's results for other values.

For each value, Lightning's `log` makes metadata, compares it with the previous call's, and updates a torchmetrics
Metric. That takes 0.3 ms for each of about 30 values per iteration. A plain number for one step needs none of this.
Everything that reads metrics (loggers, callbacks, progress bar) gets all values together, in one row.
Rows count iterations from 1; Lightning counts from 0. Row 0 is the validation before training.
"""

from __future__ import annotations

import csv
import os
import traceback
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from torch import Tensor

from lightrl.checks.files import cause_to_show, write_problem

_T = TypeVar("_T")


class StepLog(_LoggerConnector):
    """Keeps a number's last value until the end of the epoch, as Lightning does."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._numbers: dict[str, float] = {}
        self._in_bar: set[str] = set()
        self._tensors: dict[str, Tensor] = {}  # `_numbers` as float32, as in Lightning; empty until read
        trainer.fit_loop.epoch_loop._batches_that_stepped = 1  # the row's number, also for Lightning's callbacks

    def put(self, name: str, value: float, settings: Mapping[str, object]) -> bool:
        """Keeps a number for this training batch. Returns False if Lightning must log it (e.g. an epoch's mean)."""
        given = {name for name, value in settings.items() if value not in (None, False, "mean")}
        is_logged = settings.get("on_step") is not False and settings.get("logger") is not False
        is_plain = is_logged and given <= {"prog_bar", "logger", "on_step", "add_dataloader_idx", "batch_size"}
        if not self._is_in_batch or not is_plain:  # other settings ask for more than the value at this step
            return False
        self._numbers[name] = float(value)
        self._tensors = {}
        if settings.get("prog_bar"):
            self._in_bar.add(name)
        return True

    @property
    def metrics(self) -> Any:
        metrics: Any = super().metrics
        metrics["log"].update(self._as_tensors())
        metrics["callback"].update(self._as_tensors())
        metrics["pbar"].update(self._in_progress_bar())
        return metrics

    # Lightning derives the following properties from `metrics` only if something was logged through Lightning.

    @property
    def callback_metrics(self) -> dict[str, Tensor]:
        return _updated(super().callback_metrics, self._as_tensors())

    @property
    def logged_metrics(self) -> dict[str, Tensor]:
        return _updated(super().logged_metrics, self._as_tensors())

    @property
    def progress_bar_metrics(self) -> dict[str, float]:
        return _updated(super().progress_bar_metrics, self._in_progress_bar())

    @property
    def should_update_logs(self) -> bool:
        trainer: Any = self.trainer
        if not trainer.training or trainer.log_every_n_steps == 0:
            return super().should_update_logs
        number = trainer.fit_loop.epoch_loop._batches_that_stepped  # Lightning adds 1; here it starts at 1
        return bool(trainer.should_stop) or number % trainer.log_every_n_steps == 0

    def update_eval_epoch_metrics(self) -> Any:
        if not self.trainer.sanity_checking:
            return super().update_eval_epoch_metrics()
        return self.metrics["log"] if self.trainer.num_sanity_val_steps == float("inf") else {}

    def log_eval_end_metrics(self, metrics: Any) -> None:
        self.log_metrics(metrics)  # Lightning would leave out a sanity check's metrics

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Sends a row to the loggers; raises OSError with the file's name if it cannot be written."""
        trainer = self.trainer
        is_counting = trainer.state.fn == "fit" and not trainer.sanity_checking
        if metrics and step is None and "step" not in metrics and not is_counting:
            metrics, step = {"epoch": trainer.current_epoch} | metrics, trainer.global_step
        writable = {name.encode("utf-8", "backslashreplace").decode(): value for name, value in metrics.items()}
        try:
            super().log_metrics(writable, step)
        except OSError as error:
            _name_file(error)
            raise

    def reset_results(self) -> None:
        super().reset_results()
        self._numbers, self._in_bar, self._tensors = {}, set(), {}

    @property
    def _is_in_batch(self) -> bool:
        return bool(self.trainer.training) and self._first_loop_iter is not None

    def _as_tensors(self) -> dict[str, Tensor]:
        if not self._numbers or not self._is_in_batch:
            return {}
        if not self._tensors:
            values = torch.tensor([*self._numbers.values()], dtype=torch.float32)
            self._tensors = dict(zip(self._numbers, values.unbind(), strict=True))
        return self._tensors

    def _in_progress_bar(self) -> dict[str, float]:
        return {name: value.item() for name, value in self._as_tensors().items() if name in self._in_bar}


def keep_rows(loggers: Iterable[Logger]) -> None:
    """Makes CSVLogger append to the resumed run's metrics.csv, which Lightning would delete."""
    for logger in [logger for logger in loggers if isinstance(logger, CSVLogger)]:
        path = Path(logger.log_dir, "metrics.csv")
        if not path.is_file():
            continue
        backup = path.with_name(f"{path.name}.kept")
        path.replace(backup)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Experiment logs directory", UserWarning)
                writer = logger.experiment
        finally:
            backup.replace(path)
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a killed process may have left a partial row
        with path.open(newline="", encoding="utf-8") as file:
            writer.metrics_keys = next(csv.reader(file), [])


def _name_file(error: OSError) -> None:
    """Raises an OSError that names the file, if CSVLogger raised this one."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    for logger in [owner for owner in owners if isinstance(owner, CSVLogger)]:
        logger.experiment.metrics = []  # otherwise finalizing the logger would fail again
        place = Path(logger.log_dir) / logger.experiment.NAME_METRICS_FILE
        raise OSError(
            f"Metrics could not be written to {place}: {write_problem(error, place)}. Free some space, or set a "
            "different default_root_dir or the logger's save_dir."
        ) from cause_to_show(error)


def _updated(metrics: dict[str, _T], values: dict[str, _T]) -> dict[str, _T]:
    metrics.update(values)
    return metrics
