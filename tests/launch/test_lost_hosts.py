"""Hosts of a Slurm job killed at random moments: `pytest -m "extra and cluster" tests/launch/test_lost_hosts.py -s`."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_box import Slurm, why_not

from benchmarks.recovery import LONGEST_S, LaunchedRun, all_equal

WHY_NOT = why_not()
NUM_KILLS = 10


class RunOnSlurm(LaunchedRun):
    """The quickstart, made small, on two hosts; Slurm's controller has a host of its own."""

    def __init__(self, slurm: Slurm, folder: Path, **settings: Any) -> None:
        self.slurm = slurm
        launch = {"launcher": "slurm", "nodes": 2, "gpus_per_node": 1, "options": {"exclude": "node1"}}
        folder.mkdir()
        (folder / "slurm.yaml").write_text(yaml.safe_dump({"launch": launch}))
        super().__init__(folder, ranks=2, **settings)

    def start(self, *words: str) -> None:
        super().start("--config", str(self.folder / "slurm.yaml"), "--wait", *words)

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        options["env"] = self.slurm.environment | {"PYTHONPATH": options["env"]["PYTHONPATH"]}
        return self.slurm.popen(1, ["sh", "-c", 'cd "$0" && exec "$@"', str(options.pop("cwd")), *command], **options)

    def hosts(self) -> list[int]:
        """Those of the job, rank 0's first."""
        shown = self.slurm.run("squeue", "--noheader", "--states=RUNNING", "--format=%N").strip()
        names = self.slurm.run("scontrol", "show", "hostnames", shown) if shown else ""
        return [int(name.removeprefix("node")) for name in names.split()]

    def lose(self, rank: int) -> dict[str, Any]:
        """Kills a rank's host; returns once the run has trained again, with what that cost."""
        lost, began = self.hosts()[rank], time.monotonic()
        self.slurm.kill(lost)
        while lost in self.hosts():
            assert time.monotonic() < began + LONGEST_S, self.output()
        num_before = len(self.losses())
        self.wait_for(num_before + 1)
        back_s = time.monotonic() - began
        before, after = (self.losses()[index]["iteration"] for index in (num_before - 1, num_before))
        return {"rank": rank, "back_s": round(back_s, 1), "lost_iterations": before + 1 - after}


@pytest.mark.extra
@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(WHY_NOT is not None, reason=f"Slurm: {WHY_NOT}")
def test_hosts_killed_at_random_moments_cost_one_iteration_at_most_and_no_loss_differs(tmp_path: Path) -> None:
    iterations = 7 * (NUM_KILLS + 1)
    with LaunchedRun(tmp_path / "reference", ranks=2, iterations=iterations) as reference:
        assert reference.finish() == 0, reference.output()
    (tmp_path / "slurm").mkdir()
    source = random.Random(0)
    with (
        Slurm(NUM_KILLS + 3, tmp_path / "slurm") as slurm,
        RunOnSlurm(slurm, tmp_path / "disturbed", iterations=iterations, retries=NUM_KILLS) as run,
    ):
        for _ in range(NUM_KILLS):
            run.wait_for(len(run.losses()) + 2)  # a checkpoint is there
            *_, before, last = run.losses()
            time.sleep(source.uniform(0, 2) * (last["at"] - before["at"]))
            cost = run.lose(source.choice([0, 1]))
            sys.stdout.write(f"{cost}\n")
            assert cost["lost_iterations"] <= 1
        assert run.finish() == 0, run.output()
    assert all_equal(run, reference)
