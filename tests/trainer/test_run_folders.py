"""Two runs never share a folder, and a run that does not start leaves none."""

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tiny_run import CONFIG, Digits, TinyGRPO, make_trainer, train

from lightrl import HuggingFaceExport, LearningCurve, ModelSpec, Trace, TrajectoryLog


@contextlib.contextmanager
def held_by_another_run(folder: Path) -> Iterator[None]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def test_runs_that_see_the_same_free_folder_get_one_each(tmp_path: Path) -> None:
    runs = [make_trainer(tmp_path, logger=[CSVLogger(tmp_path), TensorBoardLogger(tmp_path)]) for _ in range(3)]
    assert {run.log_dir for run in runs} == {str(tmp_path / "lightning_logs/version_0")}  # as at the same time
    for run in runs:
        run.fit(TinyGRPO(), datamodule=Digits())
    folders = [Path(str(run.log_dir)) for run in runs]
    assert [folder.name for folder in folders] == ["version_0", "version_1", "version_2"]
    for folder in folders:
        assert len((folder / "metrics.csv").read_text().splitlines()) == 4  # a header and three iterations
        assert len([*folder.glob("events.out.tfevents*")]) == 1


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (lambda folder: {"logger": CSVLogger(folder.parent, name="", version=folder.name)}, "CSVLogger.version"),
        (lambda folder: {"callbacks": ModelCheckpoint(folder)}, "ModelCheckpoint.dirpath"),
        (lambda folder: {"callbacks": HuggingFaceExport(str(folder))}, "to"),
    ],
    ids=["logger", "checkpoints", "export"],
)
def test_a_folder_with_a_name_is_for_one_run_at_a_time(settings: Any, setting: str, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "mine"
    with held_by_another_run(folder), pytest.raises(ValueError, match=rf"{setting}='.*mine' is in use by another run"):
        train(tmp_path, enable_checkpointing=True, **settings(folder))
    train(tmp_path, enable_checkpointing=True, **settings(folder))
    assert [path.name for path in folder.parent.iterdir()] == ["mine"]


def test_without_a_logger_the_checkpoints_of_a_root_are_for_one_run_at_a_time(tmp_path: Path) -> None:
    message = r"checkpoints in trainer.default_root_dir='\S+/checkpoints' is in use by another run"
    with held_by_another_run(tmp_path / "checkpoints"):
        with pytest.raises(ValueError, match=message):
            train(tmp_path, enable_checkpointing=True)
        train(tmp_path, enable_checkpointing=False)  # saves nothing
    train(tmp_path, enable_checkpointing=True)


@pytest.mark.parametrize("callback", [TrajectoryLog(), LearningCurve(), Trace()], ids=lambda item: type(item).__name__)
def test_without_a_logger_the_files_of_a_callback_are_for_one_run_at_a_time(callback: Any, tmp_path: Path) -> None:
    message = f"{type(callback).__name__} in default_root_dir='.*{callback.run_folder_output}' is in use by another run"
    with held_by_another_run(tmp_path / callback.run_folder_output):
        with pytest.raises(ValueError, match=message):
            train(tmp_path, callbacks=callback)
        train(tmp_path, callbacks=callback, logger=CSVLogger(tmp_path))
    train(tmp_path, callbacks=callback)
    assert (tmp_path / callback.run_folder_output).exists()


def test_a_validation_beside_a_fit_may_name_its_checkpoints(tmp_path: Path) -> None:
    with held_by_another_run(tmp_path / "mine"):
        make_trainer(tmp_path, enable_checkpointing=True, callbacks=ModelCheckpoint(tmp_path / "mine")).validate(
            TinyGRPO(), datamodule=Digits()
        )


def test_a_run_that_fails_before_its_first_iteration_leaves_no_folder(tmp_path: Path) -> None:
    policy = ModelSpec(config=CONFIG | {"num_hidden_layers": 0}, tokenizer="tiny_run.tokenizer")
    with pytest.raises(ValueError, match="num_hidden_layers >= 1"):
        train(tmp_path, TinyGRPO(policy), logger=TensorBoardLogger(tmp_path))
    assert not [*tmp_path.glob("lightning_logs/*")]


def test_a_run_that_fails_later_keeps_its_folder(tmp_path: Path) -> None:
    module = TinyGRPO()
    module.on_experience_ready = lambda experience: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, module, logger=TensorBoardLogger(tmp_path))
    assert [path.name for path in tmp_path.glob("lightning_logs/*")] == ["version_0"]
