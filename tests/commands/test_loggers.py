"""Every logger gets the whole configuration, and each run has a folder of its own whichever logger comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers.logger import DummyLogger

from lightrl.commands.main import main


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        inner = flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
        found |= inner
    return found


def test_csv_and_tensorboard_have_the_whole_configuration(settings: Any, config: Any) -> None:
    assert main(["fit", "--config", config(settings)]) == 0
    folder = Path("lightning_logs/version_0")
    own, given = (flat(yaml.safe_load((folder / name).read_text())) for name in ("hparams.yaml", "config.yaml"))
    assert own["model/init_args/lr"] == given["model/init_args/lr"]
    assert own["trainer/max_steps"] == 2
    assert own["model/class_path"].endswith("GRPO")


class SharedFolder(DummyLogger):
    """Like those of Weights & Biases and MLflow: all runs have one save_dir, and each a version."""

    num_runs = 0

    def __init__(self, save_dir: str) -> None:
        super().__init__()
        self._save_dir = save_dir
        self._version = ""
        self.hyperparameters: dict[str, Any] = {}

    @property
    def experiment(self) -> Any:
        if not self._version:
            SharedFolder.num_runs += 1
            self._version = f"run{SharedFolder.num_runs}"
        return super().experiment

    @property
    def save_dir(self) -> str:
        return self._save_dir

    @property
    def name(self) -> str:
        return "tiny"

    @property
    def version(self) -> str:
        return self._version

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        Path(f"{self._version}.yaml").write_text(yaml.safe_dump(params))


def test_two_runs_do_not_mix_where_a_logger_has_one_folder_for_all(settings: Any, config: Any) -> None:
    settings["trainer"]["logger"] = [{"class_path": "test_loggers.SharedFolder", "init_args": {"save_dir": "runs"}}]
    settings["trainer"]["callbacks"] = [{"class_path": "TrajectoryLog", "init_args": {"every_n_iterations": 1}}]
    for _ in range(2):
        assert main(["fit", "--config", config(settings)]) == 0
    folders = sorted(Path("runs/tiny").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "config.yaml").exists()
        assert (folder / "trajectories" / "iteration-000000.jsonl").exists()
        assert yaml.safe_load(Path(f"{folder.name}.yaml").read_text())["trainer"]["max_steps"] == 2
    assert not Path("runs/trajectories").exists()
