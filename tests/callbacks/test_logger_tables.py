"""log_table with loggers that other tests do not run with: Comet's, and one without tables."""

import logging
from typing import Any
from unittest.mock import Mock

import pytest
from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger

from lightrl.callbacks.loggers import log_table

ROWS = [{"prompt": "1+1", "reward": 1.0}, {"prompt": "2+2", "format": 0.5}]


class _Comet(CometLogger):
    """Without its package: only what a table needs."""

    experiment: Any = None

    def __init__(self) -> None:
        self.experiment = Mock()


class _Plain(Logger):
    name = version = "plain"

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None: ...


def test_comet_gets_a_table_for_each_iteration() -> None:
    logger = _Comet()
    log_table([logger], "samples", ROWS, 12)
    (call,) = logger.experiment.log_table.call_args_list
    assert call.args == ("samples-000012.csv",)
    assert call.kwargs["headers"] == ["prompt", "reward", "format"]
    assert call.kwargs["tabular_data"] == [["1+1", 1.0, None], ["2+2", None, 0.5]]


def test_a_logger_without_tables_is_warned_of_once_and_csv_never(
    caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    with caplog.at_level(logging.WARNING, "lightrl"):
        for step in range(3):
            log_table([_Plain(), CSVLogger(tmp_path)], "samples", ROWS, step)
    assert [record.getMessage() for record in caplog.records] == [
        "_Plain has no tables, so the table samples is only in the run's folder."
    ]
