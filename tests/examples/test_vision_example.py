"""The counting example in a short form, through the command line's own door."""

from pathlib import Path

import pytest

from lightrl.commands.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "vision"


def test_the_vision_example_trains_and_exports_its_image_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
    few = [
        f"--trainer.default_root_dir={tmp_path}", "--trainer.max_steps=2", "--trainer.val_check_interval=2",
        "--data.batch_size=4", "--data.max_train_prompts=8", "--data.max_validation_prompts=4", "--model.group_size=2",
        "--trainer.callbacks=HuggingFaceExport", f"--trainer.callbacks.to={tmp_path}/policy",
    ]  # fmt: skip
    assert run(["fit", "--config", str(EXAMPLE / "grpo.yaml"), *few]) == 0
    assert (tmp_path / "policy" / "preprocessor_config.json").is_file()
    again = [*few[:-2], f"--model.policy={tmp_path}/policy", "--trainer.callbacks=[]"]
    assert run(["fit", "--config", str(EXAMPLE / "grpo.yaml"), *again]) == 0


def test_the_example_has_at_most_60_lines():
    lines = [line for path in EXAMPLE.iterdir() if path.is_file() for line in path.read_text().splitlines()]
    assert len([line for line in lines if line.strip() and not line.startswith("#")]) <= 60
