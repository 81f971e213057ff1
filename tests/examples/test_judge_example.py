"""The judge example against its fake judge, in a short form through the command line's own door."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_make_model import make_folder

from lightrl.commands.cli import run
from lightrl.engines.sglang.servers.held_port import HeldPort

EXAMPLE = Path(__file__).parents[2] / "examples" / "judge"


def test_the_judge_example_trains_on_what_the_judge_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(EXAMPLE.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
    text = (EXAMPLE / "grpo.yaml").read_text()
    port = HeldPort("127.0.0.1")
    (tmp_path / "run.yaml").write_text(text.replace("8123", str(port.number)))
    policy = [f"--model.policy={make_folder(tmp_path)}", "--model.sampling.max_new_tokens=8", "--model.group_size=2"]
    data = [f"--data.train={tmp_path}/train.jsonl", "--data.batch_size=2", "--trainer.callbacks=[]"]
    judge = subprocess.Popen(
        [sys.executable, "-m", "examples.judge.fake_judge", str(port.number)], stdout=subprocess.DEVNULL
    )
    try:
        short = ["--trainer.max_steps=1", f"--trainer.default_root_dir={tmp_path}"]
        assert run(["fit", "--config", f"{tmp_path}/run.yaml", *policy, *data, *short]) == 0
    finally:
        judge.kill()
        judge.wait()
        port.close()
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "rollout/score" in metrics.read_text().splitlines()[0].split(",")


def test_the_example_has_at_most_60_lines():
    assert sum(len(path.read_text().splitlines()) for path in EXAMPLE.iterdir() if path.is_file()) <= 60
