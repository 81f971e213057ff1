"""The agent's example, run in a short form through the command line's own door."""

from pathlib import Path

import pytest

from lightrl.commands.cli import run

EXAMPLE = Path(__file__).parents[2] / "examples" / "agent"


def test_the_agent_example_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
    short = ["--trainer.max_steps=2", "--trainer.val_check_interval=2", "--trainer.callbacks=[]"]
    small = ["--data.batch_size=2", "--data.num_validation=2", f"--trainer.default_root_dir={tmp_path}"]
    assert run(["fit", "--config", str(EXAMPLE / "grpo.yaml"), *short, *small]) == 0
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *lines = metrics.read_text().splitlines()
    turns = [line.split(",")[header.split(",").index("rollout/turns")] for line in lines]
    assert {float(value) for value in turns if value} == {2.0}


def test_the_example_has_at_most_60_lines() -> None:
    assert sum(len(path.read_text().splitlines()) for path in EXAMPLE.iterdir() if path.is_file()) <= 60
