"""Numbers that an iteration logs reach loggers, callbacks and the bar as Lightning's own would, in one row."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tiny_run import TinyGRPO, train

from lightrl.experience import Experience


class Rows(DummyLogger):
    """Keeps what it is given, a row for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


class Logging(TinyGRPO):
    """Logs the iteration's number in each way that a user may."""

    def on_experience_ready(self, experience: Experience) -> None:
        value = float(self.weight_version)
        self.log("own/number", value, prog_bar=True)
        self.log("own/tensor", torch.tensor(value))
        self.log("own/epoch", value, on_step=False, on_epoch=True)
        self.log("own/hidden", value, logger=False)
        if value == 0:
            self.log("own/once", 0.1)

    def on_train_epoch_end(self) -> None:
        self.log("own/at_end", 5.0)


@pytest.fixture
def logger(tmp_path: Path) -> Rows:
    logger = Rows()
    trainer = train(tmp_path, Logging(), max_epochs=1, logger=logger)
    logger.trainer = trainer  # type: ignore[attr-defined]
    return logger


def test_a_step_is_one_row_with_numbers_and_tensors_together(logger: Rows) -> None:
    steps = [(step, row) for step, row in logger.rows if "own/number" in row]
    assert [(step, row["own/number"], row["own/tensor"]) for step, row in steps] == [(1, 0, 0), (2, 1, 1), (3, 2, 2)]
    for _, row in steps:
        assert {"policy/loss", "rollout/reward", "time/update_s", "staleness/max_versions"} <= set(row)
        assert "own/hidden" not in row
        assert row["own/once"] == torch.tensor(0.1).item()  # a value stays until the epoch ends, as float32


def test_what_is_logged_for_the_epoch_is_lightnings(logger: Rows) -> None:
    (_, last) = logger.rows[-1]
    assert last.keys() == {"own/epoch", "own/at_end", "epoch"}
    assert (last["own/epoch"], last["own/at_end"]) == (1.0, 5.0)


def test_callbacks_and_the_bar_see_the_numbers(logger: Rows) -> None:
    trainer: Any = logger.trainer  # type: ignore[attr-defined]
    assert trainer.callback_metrics["own/number"] == 2
    assert isinstance(trainer.callback_metrics["own/number"], torch.Tensor)
    assert trainer.callback_metrics["own/hidden"] == 2
    assert trainer.progress_bar_metrics["own/number"] == 2.0


class Grumbling(TinyGRPO):
    """Logs under a name that no file takes as it is."""

    def on_experience_ready(self, experience: Experience) -> None:
        self.log("own/\ud800", 1.0)


def test_a_resumed_run_continues_the_csv_file_of_its_fixed_folder(tmp_path: Path) -> None:
    def fit(steps: int, **settings: Any) -> Any:
        logger = CSVLogger(tmp_path, name="", version="")
        return train(tmp_path, module=Grumbling(), max_steps=steps, logger=logger, log_every_n_steps=1, **settings)

    fit(2).save_checkpoint(tmp_path / "two.ckpt")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1.0,")  # of a row, when its process was killed
    fit(3, ckpt_path=tmp_path / "two.ckpt")
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["own/\\ud800"]] == ["1", "2", "3"]
    assert not list(tmp_path.glob("*.kept"))
    with pytest.warns(UserWarning, match="Previous log files in this directory will be deleted"):
        fit(1)
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 2  # of the new run alone


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_a_full_disk_below_the_metrics_names_their_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").symlink_to("/dev/full")
    with pytest.raises(OSError, match=rf"Metrics could not be written to {tmp_path}/metrics.csv: the disk .* is full"):
        train(tmp_path, max_steps=1, logger=CSVLogger(tmp_path, name="", version=""), log_every_n_steps=1)
