"""Functions that Lightning's Logger lacks: they log tables, models, and settings (in MLflow's format).

Weights & Biases and MLflow support all of them; TensorBoard and Comet support only tables. Call them on rank 0;
other ranks have dummy loggers. If a logger fails, the run only logs a warning: its folder also has everything.
"""

from __future__ import annotations

import contextlib
import html
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers import CometLogger, CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

log = logging.getLogger(__name__)

_MLFLOW_NAME_CHARS = 250  # the longest parameter name allowed
_warned_about_tables: set[type[Logger]] = set()


def log_table(loggers: Iterable[Logger], name: str, rows: Sequence[Mapping[str, object]], step: int) -> None:
    """Logs rows as a table with all columns of all rows; MLflow appends them to the run's table of that name.

    Warns once about each class of logger without tables, except CSVLogger, whose folder contains the rows anyway.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row))
    for logger in loggers:
        with warn_of_errors(logger, f"the table {name}"):
            if isinstance(logger, WandbLogger):
                logger.log_table(name, columns, [[row.get(column) for column in columns] for row in rows], step=step)
            elif isinstance(logger, MLFlowLogger):
                data = {"iteration": [step] * len(rows)} | {key: [row.get(key) for row in rows] for key in columns}
                logger.experiment.log_table(logger.run_id, data, f"{name}.json")
            elif isinstance(logger, TensorBoardLogger):
                logger.experiment.add_text(name, _html_table(columns, rows), step)
            elif isinstance(logger, CometLogger):
                cells = [[row.get(column) for column in columns] for row in rows]
                logger.experiment.log_table(f"{name}-{step:06d}.csv", tabular_data=cells, headers=columns)
            elif not isinstance(logger, CSVLogger | DummyLogger) and type(logger) not in _warned_about_tables:
                _warned_about_tables.add(type(logger))
                logger_class = type(logger).__name__
                log.warning("%s has no tables, so the table %s is only in the run's folder.", logger_class, name)


def loggers_of_models(loggers: Iterable[Logger], *, is_last: bool) -> list[Logger]:
    """Selects the loggers that log this model: `log_model: all` logs every export, `true` only the last of a run."""
    return [item for item in loggers if getattr(item, "_log_model", False) in (("all", True) if is_last else ("all",))]


def log_model(loggers: Iterable[Logger], name: str, folder: Path, step: int) -> None:
    """Logs the files of an exported model as an artifact."""
    for logger in loggers:
        with warn_of_errors(logger, f"the exported {name}"):
            if isinstance(logger, WandbLogger):
                from wandb import Artifact

                artifact = Artifact(f"{name}-{logger.version}", type="model", metadata={"iteration": step})
                artifact.add_dir(str(folder), policy=logger.add_file_policy)
                logger.experiment.log_artifact(artifact, aliases=["latest", f"iteration-{step}"])
            elif isinstance(logger, MLFlowLogger):
                logger.experiment.log_artifacts(logger.run_id, str(folder), f"{name}/iteration-{step:06d}")


def log_settings(loggers: Iterable[Logger], settings: Mapping[str, object], as_yaml: str) -> None:
    """Logs settings as hyperparameters; MLflow gets a parameter per number or string, and the YAML as `config.yaml`.

    MLflow's parameters cannot change, so a run continued with the same `run_id` keeps its first values.
    """
    for logger in loggers:
        if not isinstance(logger, MLFlowLogger):
            logger.log_hyperparams(dict(settings))
            continue
        logged = logger.experiment.get_run(logger.run_id).data.params
        logger.log_hyperparams({name: value for name, value in _leaves(settings) if name not in logged})
        logger.experiment.log_text(logger.run_id, as_yaml, "config.yaml")


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yields settings under names that MLflow accepts; a list of numbers is one setting."""
    if isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping) or not value:
        yield name[-_MLFLOW_NAME_CHARS:].lstrip("/"), value
        return
    for key, item in value.items():
        part = re.sub(r"[^\w. -]|^\.+$", "_", str(key)) or "_"
        yield from _leaves(item, f"{name}/{part}" if name else part)


def _html_table(columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> str:
    """Formats a table as HTML for TensorBoard, which would render plain completions as Markdown."""
    cells = [columns, *([_text(row.get(column)) for column in columns] for row in rows)]
    lines = ["".join(f"<td><pre>{html.escape(cell)}</pre></td>" for cell in row) for row in cells]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def warn_of_errors(logger: Logger, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001  # loggers raise any exception, and none should end a run
        log.warning(
            "%s could not log %s: %s: %s. The run continues, and its folder has the data.",
            type(logger).__name__,
            what,
            type(error).__name__,
            error,
        )
