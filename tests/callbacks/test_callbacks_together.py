"""All callbacks of this room in one run of lightrl's own Trainer, with the embedded engine and a tiny policy."""

from __future__ import annotations

import contextlib
import csv
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from tiny_run import POLICY, Digits, make_trainer

from lightrl import GRPO, HuggingFaceExport, LearningCurve, Sampling, Trajectory, TrajectoryLog
from lightrl.callbacks.trajectory_log import read_trajectories
from lightrl.experience import Experience

NAMES = {
    "rollout": "reward reward_std accuracy_fraction zero_variance_fraction length_tokens truncated_fraction "
    "mixed_version_fraction dropped_trajectories tokens_per_s",
    "staleness": "mean_versions max_versions",
    "policy": "loss entropy_nats kl_behavior_nats ess_fraction grad_norm",
    "update": "tokens_per_s",
    "time": "rollout_s score_s update_s sync_s",
    "val": "reward accuracy_fraction",
}


def first_token_is_a_digit(trajectory: Trajectory) -> dict[str, float]:
    right = float(trajectory.completion_ids[0] >= 4)
    return {"reward": right, "accuracy": right}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GRPO, str]:
    """The folder of a run of four iterations, its module and what it printed."""
    folder = tmp_path_factory.mktemp("run")
    module = GRPO(POLICY, reward=first_token_is_a_digit, group_size=4, sampling=Sampling(max_new_tokens=4), lr=0.01)
    log = TrajectoryLog(every_n_iterations=2, table_every_n_iterations=3)
    callbacks: list[Any] = [log, HuggingFaceExport(str(folder / "policy")), LearningCurve(constant_baseline=0.3)]
    flags: dict[str, Any] = {"val_check_interval": 1, "limit_val_batches": 1.0, "enable_progress_bar": True}
    trainer = make_trainer(folder, max_steps=4, logger=CSVLogger(folder), callbacks=callbacks, **flags)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        trainer.fit(module, datamodule=Digits())
    return Path(str(trainer.log_dir)), module, output.getvalue()


def test_every_metric_of_the_contract_is_in_the_csv_file_for_every_iteration(run: tuple[Path, GRPO, str]) -> None:
    rows = list(csv.DictReader((run[0] / "metrics.csv").read_text().splitlines()))
    for name in (f"{room}/{name}" for room, names in NAMES.items() for name in names.split()):
        values = [row[name] for row in rows if row.get(name)]
        assert len(values) == 4, name
        assert all(torch.isfinite(torch.tensor(float(value))) for value in values), name


def test_the_logged_trajectories_are_an_iterations_experience(run: tuple[Path, GRPO, str]) -> None:
    folder = run[0] / "trajectories"
    files = ["iteration-000000.jsonl", "iteration-000002.jsonl", "tokens.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == files
    trajectories = list(read_trajectories(folder / "iteration-000002.jsonl"))
    experience = Experience.from_trajectories(trajectories)
    assert len(experience) == 8
    assert set(experience.weight_versions[experience.loss_mask].tolist()) == {2}
    assert [item.sample for item in trajectories] == [0, 1, 2, 3] * 2


def test_the_export_is_the_trained_policy_and_the_picture_is_in_the_runs_folder(run: tuple[Path, GRPO, str]) -> None:
    folder, module, _ = run
    loaded = AutoModelForCausalLM.from_pretrained(folder.parents[1] / "policy").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in module.policy.state_dict().items())
    assert (folder / "learning_curve.png").exists()


def test_a_person_reads_progress_table_and_where_things_are(run: tuple[Path, GRPO, str]) -> None:
    folder, _, output = run
    assert "validation after iteration 1  accuracy_fraction=" in output
    assert "iteration 4/4  reward=" in output
    assert output.count("advantage") == 2  # the tables of iterations 0 and 3
    assert f"Run folder: {folder}" in output
