"""torchrun's scripts on three hosts in a box: a run with a server elsewhere, a torchrun that is killed, a resume."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from hosts import Hosts, why_not
from launched import engine
from waits import comes_true

from lightrl.commands.launch import launch
from lightrl.commands.status import status_text

WHY_NOT = why_not()
TASK = Path(__file__).parents[1] / "commands"
LONGEST_S = 600.0


@pytest.fixture
def scripts(settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a launch of two ranks on two hosts and a server on a third."""
    checkpoint = {"class_path": "ModelCheckpoint", "init_args": {"every_n_train_steps": 1, "save_last": True}}
    settings["trainer"] |= {"engine": engine(tmp_path), "default_root_dir": str(tmp_path / "runs"), "max_steps": 10_000}
    settings["trainer"]["callbacks"].append(checkpoint)
    names = ["node1", "node2", "node3"]
    settings["launch"] = {"launcher": "torchrun", "nodes": 3, "hosts": names, "gpus_per_node": 1, "ranks": 2,
                          "servers": 1, "warning_s": 5}  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.syspath_prepend(str(TASK))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    assert launch(["--config", str(tmp_path / "run.yaml")]) == 0
    return tmp_path / "runs" / "launch-0"


@pytest.fixture
def start(scripts: Path) -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """Starts a role's script on a host."""
    with Hosts(3, are_named=True) as hosts:

        def begin(role: str, number: int, *words: str) -> subprocess.Popen[Any]:
            paths = os.pathsep.join([str(TASK), *sys.path])
            command = ["bash", str(scripts / f"{role}-node{number}.sh"), *words]
            return hosts.popen(number, command, env={"PYTHONPATH": paths}, stdout=subprocess.DEVNULL)

        yield begin


def iteration(runs: Path) -> int:
    files = sorted(runs.glob("lightning_logs/*/status.json"), key=lambda file: file.stat().st_mtime)
    return int(json.loads(files[-1].read_text())["iteration"]) if files else -1


@pytest.mark.extra
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.skipif(WHY_NOT is not None, reason=f"hosts in a box: {WHY_NOT}")
def test_a_killed_torchrun_leaves_no_rank_and_the_run_continues_from_its_checkpoint(scripts, start):
    runs = scripts.parent
    start("servers", 3)
    first, second = start("trainer", 1), start("trainer", 2)
    assert comes_true(lambda: iteration(runs) >= 4 or first.poll() is not None, LONGEST_S), log(scripts)
    assert first.poll() is None, log(scripts)
    assert "http://node3:" in status_text(runs)  # found by what it announced
    processes = [process for one in (first, second) for process in psutil.Process(one.pid).children(recursive=True)]
    agents = [process for process in processes if "torch.distributed.run" in process.cmdline()]
    assert len(agents) == 2
    agents[1].kill()
    _, alive = psutil.wait_procs(processes, LONGEST_S)
    assert not alive, f"{alive}\n{log(scripts)}"
    assert first.wait(LONGEST_S) != 0

    last = iteration(runs) + 3
    resumed = [start("trainer", number, "--ckpt_path", "last", "--trainer.max_steps", str(last)) for number in (1, 2)]
    assert [one.wait(LONGEST_S) for one in resumed] == [0, 0], log(scripts)
    assert f"iteration  {last} of {last}; weight version {last}" in status_text(runs)


def log(folder: Path) -> str:
    """What the ranks and the server wrote last."""
    return "\n".join(file.read_text()[-3000:] for file in sorted(folder.glob("*/*.log")))
