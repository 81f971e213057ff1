"""The code example, in a short form through the command line's own door."""

from pathlib import Path

import pytest
from test_make_model import make_folder

from lightrl.commands.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "code"


def test_the_code_example_trains_and_runs_each_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
    policy = [f"--model.policy={make_folder(tmp_path)}", "--model.sampling.max_new_tokens=8", "--model.group_size=2"]
    short = ["--trainer.max_steps=1", "--trainer.callbacks=[]", f"--trainer.default_root_dir={tmp_path}"]
    assert run(["fit", "--config", str(EXAMPLE / "grpo.yaml"), *policy, *short]) == 0
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *lines = metrics.read_text().splitlines()
    assert "rollout/passed_fraction" in header.split(",")
    assert lines


def test_the_example_has_at_most_60_lines():
    assert len((EXAMPLE / "grpo.yaml").read_text().splitlines()) <= 60
