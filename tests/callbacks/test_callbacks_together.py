"""All callbacks of this room in one run of lightrl's own Trainer, with the embedded engine and a tiny policy."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lightrl import (
    GRPO,
    HuggingFaceExport,
    LearningCurve,
    ModelSpec,
    Prompt,
    PromptDataModule,
    Sampling,
    Trainer,
    Trajectory,
    TrajectoryLog,
)
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


def digit_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<unk>": 0, "<eos>": 1} | {str(digit): digit + 2 for digit in range(6)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<eos>"
    )


class Digits(PromptDataModule):
    def make_prompts(self, split: str) -> list[Prompt]:
        return [Prompt(f"{split}-{digit}", token_ids=[digit + 2, 2, digit + 2]) for digit in range(6)]


def first_token_is_a_digit(trajectory: Trajectory) -> dict[str, float]:
    right = float(trajectory.completion_ids[0] >= 4)
    return {"reward": right, "accuracy": right}


def fit(folder: Path, num_iterations: int = 4) -> tuple[Trainer, GRPO]:
    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32,
        "eos_token_id": 1,
    }
    policy = ModelSpec(config=config, tokenizer="test_callbacks_together.digit_tokenizer")
    module = GRPO(policy, reward=first_token_is_a_digit, group_size=4, sampling=Sampling(max_new_tokens=4), lr=0.01)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=num_iterations,
        val_check_interval=1,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=CSVLogger(folder),
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[
            TrajectoryLog(every_n_iterations=2, table_every_n_iterations=3),
            HuggingFaceExport(str(folder / "policy")),
            LearningCurve(constant_baseline=0.3),
        ],
    )
    trainer.fit(module, datamodule=Digits(None, batch_size=2))
    return trainer, module


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, GRPO]:
    return fit(tmp_path_factory.mktemp("run"))


def test_every_metric_of_the_contract_is_in_the_csv_file_for_every_iteration(run: tuple[Trainer, GRPO]) -> None:
    trainer, _ = run
    rows = list(csv.DictReader((Path(str(trainer.log_dir)) / "metrics.csv").read_text().splitlines()))
    for name in (f"{room}/{name}" for room, names in NAMES.items() for name in names.split()):
        values = [row[name] for row in rows if row.get(name)]
        assert len(values) == 4, name
        assert all(torch.isfinite(torch.tensor(float(value))) for value in values), name


def test_the_logged_trajectories_are_an_iterations_experience(run: tuple[Trainer, GRPO]) -> None:
    trainer, _ = run
    folder = Path(str(trainer.log_dir)) / "trajectories"
    files = ["iteration-000000.jsonl", "iteration-000002.jsonl", "tokens.jsonl"]
    assert sorted(path.name for path in folder.iterdir()) == files
    trajectories = list(read_trajectories(folder / "iteration-000002.jsonl"))
    experience = Experience.from_trajectories(trajectories)
    assert len(experience) == 8
    assert set(experience.weight_versions[experience.loss_mask].tolist()) == {2}
    assert [item.sample for item in trajectories] == [0, 1, 2, 3] * 2


def test_the_export_is_the_trained_policy(run: tuple[Trainer, GRPO]) -> None:
    trainer, module = run
    loaded = AutoModelForCausalLM.from_pretrained(Path(str(trainer.log_dir)).parents[1] / "policy").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in module.policy.state_dict().items())


def test_the_picture_is_in_the_runs_folder(run: tuple[Trainer, GRPO]) -> None:
    trainer, _ = run
    assert (Path(str(trainer.log_dir)) / "learning_curve.png").exists()


def test_a_person_reads_progress_table_and_where_things_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = fit(tmp_path)
    output = capsys.readouterr().out
    assert "validation after iteration 1  accuracy_fraction=" in output
    assert "iteration 4/4  reward=" in output
    assert output.count("advantage") == 2  # the tables of iterations 0 and 3
    assert f"Run folder: {trainer.log_dir}" in output
