"""StepLog: the numbers that an iteration logs, kept as one dict beside what Lightning keeps for each name.

For each value Lightning's `log` makes metadata, compares it with that of the call before, and updates a torchmetrics
Metric: 0.3 ms, of which an iteration with 30 values has 30. A plain number of the present step needs none of this.
Everything that reads metrics (loggers, callbacks, progress bar) gets both kinds together, in one row.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector


class StepLog(_LoggerConnector):
    """As in Lightning, a number that is not logged again keeps its value until the end of the epoch."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self._numbers: dict[str, float] = {}
        self._in_bar: set[str] = set()

    def put(self, name: str, value: float, *, prog_bar: bool) -> bool:
        """Keeps a number of this training batch; False outside a batch, where Lightning logs for the epoch."""
        if not self._is_in_batch:
            return False
        self._numbers[name] = value
        if prog_bar:
            self._in_bar.add(name)
        return True

    @property
    def _is_in_batch(self) -> bool:
        return bool(self.trainer.training) and self._first_loop_iter is not None

    @property
    def metrics(self) -> Any:
        metrics: Any = super().metrics
        if self._numbers and self._is_in_batch:
            # float32, as Lightning's; the bar too shows what is logged.
            values = dict(zip(self._numbers, torch.tensor([*self._numbers.values()]).unbind(), strict=True))
            metrics["log"].update(values)
            metrics["callback"].update(values)
            metrics["pbar"].update({name: values[name].item() for name in self._numbers if name in self._in_bar})
        return metrics

    def reset_results(self) -> None:
        super().reset_results()
        self._numbers, self._in_bar = {}, set()
