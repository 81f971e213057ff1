"""SFT, GRPO from its export, DPO, a reward model, distillation: each in a short form through the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from lightrl import ModelSpec
from lightrl.cli import run

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.logger=false"]
QUIET += ["--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=1", "--data.num_validation=20"]


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it


def fitted(name: str, folder: Path, *options: str) -> Path:
    """Where the example's export is, if it makes one."""
    where = folder / Path(name).stem
    arguments = [*QUIET, "--data.batch_size=4", f"--trainer.default_root_dir={where}", *options]
    assert run(["fit", "--config", str(EXAMPLES / name), *arguments]) == 0
    return where / "export"


def exported_to(folder: Path) -> str:
    return f'--trainer.callbacks=[{{"class_path": "HuggingFaceExport", "init_args": {{"to": "{folder}"}}}}]'


def test_each_stage_begins_with_the_export_of_the_one_before(tmp_path: Path) -> None:
    sft = fitted("sft/sft.yaml", tmp_path, exported_to(tmp_path / "sft" / "export"))
    grpo = fitted("sft/grpo.yaml", tmp_path, f"--model.policy={sft}", exported_to(tmp_path / "grpo" / "export"))
    dpo = fitted("dpo/dpo.yaml", tmp_path, f"--model.policy={sft}", exported_to(tmp_path / "dpo" / "export"))
    fitted("distillation/distillation.yaml", tmp_path, f"--model.teacher={grpo}")
    assert all((folder / "model.safetensors").exists() for folder in (sft, grpo, dpo))


def test_a_reward_models_export_is_a_reward_and_the_start_of_a_critic(tmp_path: Path) -> None:
    judge = fitted("reward_model/reward_model.yaml", tmp_path, exported_to(tmp_path / "reward_model" / "export"))
    assert "ForSequenceClassification" in (judge / "config.json").read_text()
    sft = fitted("sft/sft.yaml", tmp_path, exported_to(tmp_path / "sft" / "export"))
    critic = tmp_path / "critic"
    options = [f"--model.policy={sft}", f"--model.reference={sft}", f"--model.critic={judge}"]
    options += [f"--model.reward_model={judge}", "--model.reward=null", "--trainer.logger=CSVLogger"]
    options += [f"--trainer.logger.save_dir={tmp_path}", "--trainer.log_every_n_steps=1"]
    options += [exported_to(critic).replace('"to"', '"role": "critic", "to"')]
    fitted("ppo/from_export.yaml", tmp_path, *options)
    assert (critic / "model.safetensors").exists()
    assert ModelSpec(path=str(critic), head="scalar").load_model().score.weight.any()
    with next(tmp_path.glob("**/metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/reward_model"]]
    assert len(rows) == 2
    assert all(float(row["rollout/reward_model"]) != 0 and float(row["rollout/reward"]) == 0 for row in rows)


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    missing = [path.name for path in EXAMPLES.glob("*/*.yaml") if path.name not in table]
    assert missing == []
