"""SFT, then GRPO, then PPO with a reward model as its critic; DPO and distillation: the examples' own files, cut short.

Run where a new user would be, except that the folder is empty: what the files write to `runs/` and read there fits.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from lightrl import ModelSpec
from lightrl.commands.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
QUIET = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.logger=false", "--data.batch_size=4"]
QUIET += ["--trainer.enable_progress_bar=false", "--trainer.limit_val_batches=1", "--data.num_validation=20"]
QUIET += ["--trainer.num_sanity_val_steps=0"]


def fit(name: str, *options: str) -> None:
    assert main(["fit", "--config", str(EXAMPLES / name), *QUIET, *options]) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`runs/` after the documented path, with `start.pt` for each stage: the weights it began with."""
    folder = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
        patch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
        keep = "--trainer.callbacks+=start_weights.StartWeights"
        fit("sft/sft.yaml", keep, "--trainer.max_steps=40", "--data.batch_size=32")  # till some answers are right
        fit("sft/grpo.yaml", keep)
        fit("reward_model/reward_model.yaml", keep)
        fit("ppo/from_export.yaml", keep, "--model.critic_warmup_iterations=1")
        yield folder / "runs"


def begun_with(run: Path, role: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(run / "start.pt", weights_only=True)
    return {name.removeprefix(f"{role}."): value for name, value in state.items() if name.startswith(f"{role}.")}


def assert_same(found: dict[str, Tensor], folder: Path) -> None:
    """All that the folder's file has; the second name of a shared weight is not in it."""
    expected = load_file(folder / "model.safetensors")
    assert expected
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.extra
def test_each_stage_begins_with_the_weights_that_the_one_before_ended_with(runs: Path) -> None:
    for stage, role, from_stage in (
        ("sft_grpo", "policy", "sft"),
        ("ppo_from_export", "policy", "sft_grpo"),
        ("ppo_from_export", "reference", "sft_grpo"),
        ("ppo_from_export", "critic", "reward_model"),
    ):
        assert_same(begun_with(runs / stage, role), runs / from_stage / "export")


def test_no_stage_ends_with_the_weights_that_it_began_with(runs: Path) -> None:
    roles = {"sft": "policy", "sft_grpo": "policy", "reward_model": "reward_model", "ppo_from_export": "policy"}
    ends = [(runs / stage, role, "export") for stage, role in roles.items()]
    for run, role, folder in [*ends, (runs / "ppo_from_export", "critic", "critic")]:
        before, after = begun_with(run, role), load_file(run / folder / "model.safetensors")
        assert not all(torch.equal(before[name], value) for name, value in after.items()), (run, role)


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_the_export_command_makes_of_a_stages_checkpoint_what_its_callback_wrote(
    runs: Path, role: str, tmp_path: Path
) -> None:
    run = runs / "ppo_from_export"
    (checkpoint,) = (run / "checkpoints").glob("*step=2.ckpt")
    assert main(["export", str(checkpoint), "--to", str(tmp_path / "model"), "--role", role]) == 0
    assert_same(load_file(tmp_path / "model/model.safetensors"), run / ("export" if role == "policy" else role))


def test_the_last_export_is_a_language_model_of_its_own(runs: Path) -> None:
    loaded, info = AutoModelForCausalLM.from_pretrained(runs / "ppo_from_export/export", output_loading_info=True)
    assert not info["unexpected_keys"]
    assert_same(loaded.state_dict(), runs / "ppo_from_export/export")


@pytest.mark.extra
def test_dpo_and_distillation_start_from_the_same_exports(runs: Path) -> None:
    fit("dpo/dpo.yaml", "--trainer.callbacks+=start_weights.StartWeights")
    fit("distillation/distillation.yaml", "--trainer.callbacks=start_weights.StartWeights")
    fit("distillation/topk.yaml")
    assert_same(begun_with(runs / "dpo", "policy"), runs / "sft/export")
    assert_same(begun_with(runs / "distillation", "teacher"), runs / "sft_grpo/export")


@pytest.mark.extra
def test_a_reward_models_export_is_a_reward_and_the_start_of_a_critic(runs: Path, tmp_path: Path) -> None:
    reward_model = runs / "reward_model/export"
    assert "ForSequenceClassification" in (reward_model / "config.json").read_text()
    options = [f"--model.reward_model={reward_model}", "--model.reward=null", "--trainer.logger=CSVLogger"]
    options += [f"--trainer.logger.save_dir={tmp_path}", "--trainer.log_every_n_steps=1"]
    fit("ppo/from_export.yaml", *options)
    assert ModelSpec(path=str(runs / "ppo_from_export/critic"), head="scalar").load_model().score.weight.any()
    with next(tmp_path.glob("**/metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["rollout/reward_model"]]
    assert len(rows) == 2
    assert all(float(row["rollout/reward_model"]) != 0 and float(row["rollout/reward"]) == 0 for row in rows)


def test_the_table_names_every_example() -> None:
    table = (EXAMPLES / "README.md").read_text()
    listed = [path for path in EXAMPLES.glob("*/*.yaml") if path.parent.name != "gpu"]  # recipes that have not run
    assert [path.name for path in listed if path.name not in table] == []
