"""The loggers that people use, from YAML and offline: hyper-parameters, metrics, and a folder for each run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightrl.commands.main import main


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_CACHE_DIR": str(tmp_path),
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


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


def test_two_runs_of_weights_and_biases_have_folders_of_their_own(settings: Any, config: Any) -> None:
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed: pip install 'lightrl[loggers]'")
    options = {"save_dir": "runs", "project": "tiny", "offline": True}
    settings["trainer"]["logger"] = [{"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": options}]
    settings["trainer"]["callbacks"] = [{"class_path": "TrajectoryLog", "init_args": {"every_n_iterations": 1}}]
    found = []
    for _ in range(2):
        assert main(["fit", "--config", config(settings)]) == 0
        found.append(dict(wandb.run.config))
        wandb.finish()
    folders = sorted(Path("runs/tiny").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert (folder / "config.yaml").exists()
        assert (folder / "trajectories" / "iteration-000000.jsonl").exists()
    assert not Path("runs/trajectories").exists()
    assert found[0]["trainer"]["max_steps"] == 2
    assert len(list(Path("runs/wandb").glob("offline-run-*"))) == 2


def test_mlflow_has_parameters_metrics_and_a_folder_for_each_run(settings: Any, config: Any) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed: pip install 'lightrl[loggers]'")
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    settings["trainer"]["logger"] = [
        {"class_path": "lightning.pytorch.loggers.MLFlowLogger", "init_args": {"tracking_uri": "file:./mlruns"}}
    ]
    for _ in range(2):
        assert main(["fit", "--config", config(settings)]) == 0
    runs = [path.parent for path in Path("mlruns").glob("*/*/params")]
    assert len(runs) == 2
    for run in runs:
        assert (run / "params" / "trainer" / "max_steps").read_text() == "2"
        assert (run / "metrics" / "rollout" / "reward").exists()
        assert (run / "config.yaml").exists()
