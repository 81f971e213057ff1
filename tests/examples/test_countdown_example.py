"""The countdown example, both commands in a short form, through the command line's own door."""

from pathlib import Path

import pytest

from lightrl.commands.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "countdown"


@pytest.fixture(autouse=True)
def _as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it


def test_the_countdown_example_trains_on_what_its_supervised_steps_export(tmp_path: Path):
    here = f"--trainer.default_root_dir={tmp_path}"
    few = ["--trainer.max_steps=2", "--data.max_validation_prompts=8", "--data.batch_size=2"]
    export = ["--trainer.callbacks=HuggingFaceExport", f"--trainer.callbacks.to={tmp_path}/sft"]
    assert run(["fit", "--config", str(EXAMPLE / "sft.yaml"), here, *few, *export]) == 0
    policy = [f"--model.policy={tmp_path}/sft", "--model.group_size=2", "--trainer.val_check_interval=2"]
    assert run(["fit", "--config", str(EXAMPLE / "grpo.yaml"), here, *few, *policy, "--trainer.callbacks=[]"]) == 0
