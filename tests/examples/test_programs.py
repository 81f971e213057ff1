"""Examples whose agent is a program: a script, a task of verifiers, the real Claude Code and Codex."""

import asyncio
import csv
import importlib
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples.agent.programs.rewards import repaired_half, reported, wrote_largest_digit
from lightrl import Prompt, Trajectory
from lightrl.commands.cli import run

ROOT = Path(__file__).parents[2]
PROGRAMS = "examples/agent/programs"

pytestmark = pytest.mark.usefixtures("as_a_command")


def metrics(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.rglob("metrics.csv")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["rollout/turns"]]


def left(workspace: Path | None) -> Trajectory:
    prompt = Prompt("3719=", token_ids=[1])
    trajectory = Trajectory(prompt, 0, 0, [1, 2], [False, True], [0.0, -1.0], [-1, 0], [2], "")
    trajectory.workspace = None if workspace is None else str(workspace)
    return trajectory


@pytest.mark.parametrize("reward", [wrote_largest_digit, repaired_half, reported])
def test_the_rewards_read_what_a_program_left(reward: Any, tmp_path: Path) -> None:
    assert reward(left(None)) == 0
    assert reward(left(tmp_path)) == 0
    (tmp_path / "answer.txt").write_text("9")
    (tmp_path / "reward.txt").write_text("1.0")
    (tmp_path / "half.py").write_text((ROOT / PROGRAMS / "half" / "half.py").read_text().replace("/ 3", "/ 2"))
    assert reward(left(tmp_path)) == 1
    (tmp_path / "answer.txt").write_text("7")
    (tmp_path / "reward.txt").write_text("0.0")
    (tmp_path / "half.py").write_text("def half(number): return 2")
    assert reward(left(tmp_path)) == 0


def test_programs_know_the_context_limit_that_their_workflow_sets() -> None:
    for name, setting in {"codex": "model_context_window=", "claude_code": 'CLAUDE_CODE_MAX_CONTEXT_TOKENS: "'}.items():
        text = (ROOT / PROGRAMS / f"{name}.yaml").read_text()
        limit = yaml.safe_load(text)["model"]["init_args"]["workflow"]["init_args"]["max_tokens"]
        assert f"{setting}{limit}" in text


@pytest.mark.extra
def test_the_script_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    few = ["--data.batch_size=2", "--data.num_validation=2", "--model.group_size=2", "--trainer.callbacks=[]"]
    few += ["--trainer.max_steps=2", "--trainer.val_check_interval=2", f"--trainer.default_root_dir={tmp_path}"]
    assert run(["fit", "--config", f"{PROGRAMS}/openai_script.yaml", *few]) == 0
    assert [float(row["rollout/turns"]) for row in metrics(tmp_path)] == [1, 1]


def test_tasks_in_folders_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few = ["--model.group_size=2", "--trainer.callbacks=[]", "--trainer.max_steps=1", "--trainer.log_every_n_steps=1"]
    assert run(["fit", "--config", "examples/agent/tasks.yaml", *few, f"--trainer.default_root_dir={tmp_path}"]) == 0
    (row,) = metrics(tmp_path)
    assert float(row["rollout/dropped_trajectories"]) == 0
    assert float(row["rollout/tests_without_reward"]) == 0
    assert "rollout/has_form" in row


def test_the_patch_of_a_repository_earns_the_reward_and_no_work_earns_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = runpy.run_path(str(ROOT / "scripts" / "task_folders" / "solve.py"))
    assert asyncio.run(script["main"]([str(ROOT / "examples" / "agent" / "repositories")])) == 0
    assert capsys.readouterr().out == "1 of 1 tasks: solution 1, no work 0\n"


def says_largest(prompt: list[int], sampling: Any, sample: int) -> list[int]:
    """The largest digit of a prompt `3719=`, whose tokens are in the digits' order, and the end."""
    return [max(prompt[:4]), 1]


@pytest.mark.extra
def test_a_task_of_verifiers_is_run_and_rewarded_by_its_own_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = [sys.executable, str(ROOT / "scripts" / "environments" / "build.py"), "verifiers", "--check"]
    found = subprocess.run(build, capture_output=True, text=True)
    if found.returncode != 0:
        pytest.skip(found.stderr.strip())
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PATH", f"{Path(found.stdout.strip()).parent}:{os.environ['PATH']}")
    few = ["--data.batch_size=1", "--model.group_size=2", "--trainer.callbacks=[]", "--trainer.max_steps=2"]
    few += ["--trainer.limit_val_batches=0", "--trainer.num_sanity_val_steps=0", "--trainer.log_every_n_steps=1"]
    few += [f"--trainer.default_root_dir={tmp_path}"]
    engine = ["--trainer.engine=lightrl.FakeEngine", "--trainer.engine.script=test_programs.says_largest"]
    assert run(["fit", "--config", f"{PROGRAMS}/verifiers.yaml", *few, *engine]) == 0
    assert [float(row["rollout/reward"]) for row in metrics(tmp_path)] == [1, 1]


@pytest.mark.extra
@pytest.mark.slow
@pytest.mark.parametrize(("name", "program"), [("claude_code", "claude"), ("codex", "codex")])
def test_the_real_program_trains_for_two_iterations(
    name: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "workflows"))
    agents = importlib.import_module("test_real_agents")
    if agents.install.program(program) is None:
        pytest.skip("scripts/agents/install.py has not installed it")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / program).symlink_to(agents.install.program(program))
    for folder in (tmp_path, tmp_path.parent, tmp_path.parents[1]):
        folder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    row = {"question": f"{agents.record.TASK}\n{program}", "answer": "/ 2", "folder": "half"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    trainer = {
        "accelerator": "cpu", "devices": 1, "strategy": "auto", "callbacks": [], "max_steps": 2, "log_every_n_steps": 1,
        "default_root_dir": str(tmp_path), "limit_val_batches": 0, "num_sanity_val_steps": 0,
        "engine": {"class_path": "lightrl.FakeEngine", "init_args": {"script": "test_real_agents.says"}},
    }  # fmt: skip
    policy = {"config": agents.CONFIG, "tokenizer": "test_real_agents.tokenizer", "seed": 3}
    model = {"policy": policy, "group_size": 2, "sampling": {"max_new_tokens": 400}, "decoupled": False}
    model["workflow"] = {"init_args": {"max_tokens": 16_000}}
    data = {"init_args": {"train": str(tmp_path / "rows.jsonl")}}
    other = {"trainer": trainer, "model": {"init_args": model}, "data": data}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(other))
    configs = [f"{PROGRAMS}/{name}.yaml", str(tmp_path / "other.yaml")]
    assert run(["fit", "--config", configs[0], "--config", configs[1]]) == 0
    rows = metrics(tmp_path)
    assert [float(row["rollout/turns"]) for row in rows] == [4, 4]
    assert [float(row["rollout/dropped_trajectories"]) for row in rows] == [0, 0]
