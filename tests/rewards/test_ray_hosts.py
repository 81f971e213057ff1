"""Reward workers on the second of two hosts of a Ray cluster, and what the loss of that host costs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts
from hosts import why_not as why_no_hosts
from ray_box import Ray, why_not

from lightrl.rewards.pool import PLACE_VARIABLE

HERE = Path(__file__).parent
NUM = 200  # trajectories of a batch
WHY_NOT = why_not() or why_no_hosts()
LONGEST_S = 120.0
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.extra,
    pytest.mark.timeout(400),
    pytest.mark.skipif(WHY_NOT is not None, reason=f"Ray on hosts in a box: {WHY_NOT}"),
]


class Judging:
    """The process on the first host that has the pool."""

    def __init__(self, hosts: Hosts, ray: Ray) -> None:
        environment = {**ray.environment, PLACE_VARIABLE: "ray", "RAY_ADDRESS": ray.address}
        command = [sys.executable, str(HERE / "ray_hosts_run.py")]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = hosts.popen(1, command, env=environment, text=True, **pipes)

    def tell(self, word: str) -> None:
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def batch(self) -> dict[str, Any]:
        self.tell("batch")
        while not (line := self._process.stdout.readline()).startswith("{"):  # Ray tells of lost hosts there
            assert line, "it ended"
        return dict(json.loads(line))

    def batch_until(self, hosts: list[int]) -> None:
        """Judges until these hosts do, all of them and no other."""
        deadline = time.monotonic() + LONGEST_S
        while (answer := self.batch())["hosts"] != hosts:
            assert time.monotonic() < deadline, answer

    def end(self) -> None:
        with self._process:  # closes its pipes
            self._process.stdin.close()
        assert self._process.returncode == 0


def test_a_second_host_judges_and_its_loss_costs_at_most_the_call_that_it_had():
    with Hosts(2, are_named=True) as hosts, Ray(hosts, paths=(str(HERE), str(HERE.parents[1]))) as cluster:
        judging = Judging(hosts, cluster)
        assert judging.batch() == {"failed": [], "judged": NUM, "hosts": [2]}
        judging.tell("free")
        cluster.kill(2)
        answer = judging.batch()
        assert set(answer["failed"]) <= {"killed"}
        assert len(answer["failed"]) <= 2  # calls that the two workers had
        assert answer["judged"] == NUM - len(answer["failed"])
        judging.batch_until([1])
        judging.end()
