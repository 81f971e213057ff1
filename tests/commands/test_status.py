"""lightrl status: what it shows of a run that works, that failed, and that is gone."""

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from lightning.pytorch.utilities.exceptions import SIGTERMException

import lightrl
from lightrl.callbacks import run_files
from lightrl.callbacks.run_files import StatusFile
from lightrl.commands.main import main
from lightrl.commands.status import run, status_text


def shown(folder: str = "lightning_logs/version_0") -> str:
    return status_text(Path(folder))


def test_a_finished_run_shows_its_iterations(settings, config, capsys, monkeypatch):
    phases = []
    write = run_files.write_whole

    def write_whole(path: Path, text: str) -> None:
        if path.name == "status.json":
            phases.append(json.loads(text)["phase"])
        write(path, text)

    monkeypatch.setattr(run_files, "write_whole", write_whole)
    assert main(["fit", "--config", config(settings)]) == 0
    assert re.search(r"phase +done, 0 s ago", shown())
    assert "iteration  2 of 2; weight version 2" in shown()
    assert [phase for phase in phases[:-1] if phase == "rollout"] == ["rollout"] * 2
    for phase in ("scores and rewards", "update", "sync", "end of the iteration"):
        assert phase in phases
    capsys.readouterr()
    assert run(["."]) == 0  # the run's root
    assert "weight version 2" in capsys.readouterr().out


def test_a_run_of_plain_python_is_shown_too(tmp_path: Path) -> None:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0, "max_steps": 2}
    trainer = lightrl.Trainer(accelerator="cpu", default_root_dir=tmp_path, **quiet)
    trainer.fit(BoringModel(), datamodule=BoringDataModule())
    assert re.search("phase +done", status_text(tmp_path))
    assert "iteration  2 of 2; weight" in status_text(tmp_path)


def test_a_failed_run_shows_its_error(settings, config, capsys):
    settings["model"]["init_args"]["reward"] = "tiny_rewards.broken"
    assert main(["fit", "--config", config(settings)]) == 1
    assert re.search(r"phase +failed", shown())
    assert "this reward is broken" in shown()


def test_a_run_whose_process_is_gone_is_not_taken_for_a_slow_one(tmp_path):
    server = {"url": "http://node2:30000", "state": "lost", "weight_version": 6, "num_requests": 0,
              "outstanding_tokens": 0, "reason": "connection refused"}  # fmt: skip
    status = {"phase": "update", "since": time.time() - 300, "at": time.time() - 240, "progress": "3 of 8 minibatches",
              "iteration": 8, "num_finished": 7, "max_steps": -1, "weight_version": 7, "servers": [server],
              "pid": 2**22 + 1, "host": socket.gethostname()}  # fmt: skip
    (tmp_path / "status.json").write_text(json.dumps(status))
    text = status_text(tmp_path)
    assert "update, 3 of 8 minibatches, for 5 min (written 4 min ago; its process 4194305 is gone)" in text
    assert "iteration  8, 7 finished; weight version 7" in text
    assert "http://node2:30000  lost  version 6, 0 requests of 0 tokens (connection refused)" in text
    (tmp_path / "status.json").write_text(json.dumps(status | {"pid": os.getpid()}))
    assert f"process {os.getpid()} on {socket.gethostname()}, silent since" in status_text(tmp_path)


def test_a_launch_alone_shows_its_processes(tmp_path):
    process = {"host": "node2", "log": "runs/launch-0/node2/servers-0.log", "state": "exit code 1"}
    launch = {"launcher": "slurm", "state": "submitted", "job": 12, "processes": {"servers-0": process}}
    (tmp_path / "launch-0").mkdir()
    (tmp_path / "launch-0" / "launch.json").write_text(json.dumps(launch))
    for folder in (tmp_path, tmp_path / "launch-0"):
        text = status_text(folder)
        assert f"launch     {tmp_path}/launch-0: slurm, submitted, job 12" in text
        assert "servers-0  node2  exit code 1  runs/launch-0/node2/servers-0.log" in text


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    with pytest.raises(ValueError, match="has no run and no launch"):
        status_text(tmp_path)
    assert run([]) == 2


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), SIGTERMException()], ids=["Ctrl-C", "SIGTERM"])
def test_an_interruption_is_no_failure(interruption: BaseException, tmp_path: Path) -> None:
    callback = StatusFile()
    trainer = SimpleNamespace(
        engine=None, iteration=1, global_step=0, max_steps=2, log_dir=tmp_path, loggers=["one"], is_global_zero=True
    )
    callback.setup(trainer, None, "fit")  # type: ignore[arg-type]
    callback.on_exception(trainer, None, interruption)  # type: ignore[arg-type]
    callback.teardown(trainer, None, "fit")  # type: ignore[arg-type]
    text = status_text(tmp_path)
    assert "phase      interrupted" in text
    assert "iteration  1 of 2, 0 finished" in text
    assert "error" not in text


def test_the_command_imports_neither_torch_nor_lightning(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(json.dumps({"launcher": "local", "state": "running", "processes": {}}))
    code = (
        "import sys; from lightrl.commands.main import main; assert main(['status', sys.argv[1]]) == 0; "
        "assert not {'torch', 'lightning', 'transformers', 'jsonargparse'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
