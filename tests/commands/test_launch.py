"""lightrl launch: what it plans of a configuration, and a run of two ranks and a server on this machine."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from launched import engine

from lightrl.commands.launch import launch, run
from lightrl.commands.status import status_text


@pytest.fixture
def launched(settings, tmp_path):
    """A run of two ranks and a server of its own."""
    settings["trainer"].update(engine=engine(tmp_path), default_root_dir="runs")
    settings["launch"] = {"ranks": 2, "servers": 1}
    return settings


@pytest.mark.parametrize("words", [[], ["--trainer.strategy", "null"]], ids=["no strategy", "null"])
def test_a_dry_run_shows_the_plan_and_makes_nothing(words, launched, config, capsys):
    launched["launch"] |= {"allocation": "sglang.d1t2+d2", "ranks": None, "servers": None}
    assert launch(["--config", config(launched), "--dry-run", *words]) == 0
    printed = capsys.readouterr().out
    assert "127.0.0.1 | rank 0 | rank 1 | server 0 | server 0" in printed
    assert "class_path: FSDP2Strategy" in printed
    assert not Path("runs").exists()


def test_what_does_not_fit_is_one_message_and_makes_nothing(launched, config, capsys):
    assert run(["--config", config(launched), "--launch.gpus_per_node", "2"]) == 2
    assert "has room for 0 servers" in capsys.readouterr().err
    assert run(["--config", config(launched), "--launch.nodes", "two"]) == 2
    assert "launch.nodes" in capsys.readouterr().err
    del launched["launch"]
    assert run(["--config", config(launched)]) == 2
    assert "needs a `launch:` section" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("allocation", "message"),
    [
        ("sglang:d9+d2", "servers=9 with tp=1 needs 9 GPUs"),
        ("sglang:d1t2+d1", "tp=2 must divide the model's"),
        ("vllm:d1|d1", "placement=colocated needs SGLangEngine"),
    ],
)
def test_an_allocation_that_does_not_fit_is_named_instead_of_what_it_sets(
    allocation, message, launched, config, capsys
):
    launched["trainer"].pop("engine")
    launched["launch"] = {"allocation": allocation, "gpus_per_node": 4, "launcher": "slurm"}
    launched["model"]["init_args"]["policy"]["config"] |= {"num_attention_heads": 1, "num_key_value_heads": 1}
    assert run(["--config", config(launched), "--dry-run"]) == 2
    text = capsys.readouterr().err
    assert f"launch.allocation='{allocation}' does not fit: {message}" in text
    assert not re.search(r"launch\.(servers|ranks|tp|placement)", text)


@pytest.mark.parametrize("options", [{"qos": "none"}, {"array": "1-2"}], ids=["sbatch refuses", "launch refuses"])
def test_a_job_that_was_not_submitted_leaves_no_folder(options, launched, config, capsys, tmp_path, monkeypatch):
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 'Invalid qos specification' >&2\nexit 1\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(sbatch.parent), prepend=os.pathsep)
    launched["launch"] |= {"launcher": "slurm", "options": options}
    assert run(["--config", config(launched)]) in (1, 2)
    assert {"qos": "Invalid qos", "array": "cannot be a job array"}[next(iter(options))] in capsys.readouterr().err
    assert not list(Path("runs").glob("launch-*"))


@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["dry run", "launch"])
def test_more_gpus_than_this_machine_has_are_refused_before_anything_is_made_or_planned(
    launched, config, capsys, words
):
    launched["trainer"]["accelerator"] = "gpu"
    launched["launch"] |= {"gpus_per_node": 16}
    assert run(["--config", config(launched), *words]) == (0 if words else 2)
    out, err = capsys.readouterr()
    assert re.search(r"launch.gpus_per_node=16, but torch sees \d+ GPUs? on", out if words else err)
    assert ("GPU 15" in out) is bool(words)
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_machine_without_gpus_says_that_it_assumed_cpus(launched, config, capsys):
    launched["trainer"]["accelerator"] = "auto"
    assert launch(["--config", config(launched), "--dry-run"]) == 0
    assert "accelerator is auto and this machine has no GPU: CPUs are assumed." in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_and_a_server_train_and_leave_their_logs_in_one_place(launched, config):
    command = [sys.executable, "-m", "lightrl", "launch", "--config", config(launched)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "trainer-0 | iteration: 2 groups x 2 = 4 trajectories" in done.stderr
    folder = Path("runs/launch-0/127.0.0.1")
    assert {file.stem for file in folder.glob("*.log")} >= {"trainer-0", "trainer-1", "servers-0", "server-0"}
    assert "MEMBER: 2/2" in (folder / "trainer-1.log").read_text()
    (checkpoint,) = Path("runs").glob("lightning_logs/version_0/checkpoints/last.ckpt")
    assert {file.name for file in checkpoint.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
    assert json.loads(Path("runs/launch-0/launch.json").read_text())["state"] == "ended"
    shown = status_text(Path("runs"))
    assert "iteration  2 of 2; weight version 2" in shown
    assert re.search(r"servers    http://127.0.0.1:\d+  routable  version 2, 0 requests of 0 tokens", shown)
    assert re.search(r"trainer-1 +127.0.0.1  exit code 0  \S+/launch-0/127.0.0.1/trainer-1.log", shown)


@pytest.mark.extra
@pytest.mark.slow
def test_ctrl_c_at_the_command_saves_a_checkpoint_and_leaves_no_process(launched, config):
    launched["trainer"]["max_steps"] = 10_000
    launched["launch"] = {"ranks": 1, "servers": 1}
    command = [sys.executable, "-m", "lightrl", "launch", "--config", config(launched)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        for line in launcher.stdout:
            if line.startswith("trainer-0 | iteration"):
                break
        else:
            raise AssertionError("the run ended before its first iteration")
        processes = psutil.Process(launcher.pid).children(recursive=True)
        assert len(processes) >= 5  # guards, a rank, lightrl serve, its server
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate()
        assert launcher.returncode == 130, output
    _, alive = psutil.wait_procs(processes, 600)
    assert not alive
    assert list(Path("runs").glob("lightning_logs/version_0/checkpoints/*.ckpt"))
    launch_state = json.loads(Path("runs/launch-0/launch.json").read_text())
    assert launch_state["state"] == "ended"
    assert launch_state["processes"]["servers-0"]["state"] == "exit code 0"
