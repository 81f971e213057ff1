"""A run on two hosts in a box: folders that are not shared are refused, and a host without power is named."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts import Hosts, why_not
from rank_scripts import TESTS

WHY_NOT = why_not()
SCRIPT = Path(__file__).with_name("two_hosts_run.py")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.slow,
    pytest.mark.skipif(WHY_NOT is not None, reason=f"hosts in a box: {WHY_NOT}"),
]


class Rank:
    """A rank of each run, on a host of its own."""

    def __init__(self, hosts: Hosts, rank: int, folder: Path) -> None:
        paths = [str(SCRIPT.parent), str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, str(SCRIPT), str(rank), str(folder)]
        env = {"PYTHONPATH": os.pathsep.join(paths)}
        self.process = hosts.popen(rank + 1, command, env=env, text=True, stdin=-1, stdout=-1, stderr=-1)
        assert self.line() == {"ready": rank}

    def start(self, run: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{run}\n")
        self.process.stdin.flush()

    def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            stream.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("two-hosts")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(2, are_named=True) as made:
        yield made


@pytest.fixture(scope="module")
def ranks(hosts: Hosts, folder: Path) -> Iterator[list[Rank]]:
    made = [Rank(hosts, rank, folder) for rank in range(2)]
    yield made
    for rank in made:
        rank.close()


def test_a_folder_that_hosts_do_not_share_is_refused_before_a_rollout(
    hosts: Hosts, ranks: list[Rank], folder: Path
) -> None:
    own = folder / "unshared"
    own.mkdir()
    assert hosts.popen(2, ["mount", "-t", "tmpfs", "tmpfs", str(own)]).wait(10) == 0
    for rank in ranks:
        rank.start("unshared")
    expected = f"ValueError: Checkpoints go to {own}/checkpoints, where rank 1 on node2 cannot see the files of rank 0"
    for rank in ranks:
        assert rank.line()["raised"].startswith(expected)
        assert rank.line()["ended"] == "unshared"
    assert not list(own.iterdir())


@pytest.mark.parametrize("run", ["update", "sync"])
def test_a_host_without_power_is_named_and_the_other_ends(
    run: str, hosts: Hosts, ranks: list[Rank], folder: Path
) -> None:
    """In a sync, rank 0 is in a phase that has a deadline of its own, a longer one."""
    for rank in ranks:
        rank.start(run)
    assert ranks[0].line() == {"holds": run}
    hosts.cut(2)
    ended = ranks[0].line()
    assert ended["ended"] == run
    assert f"Rank 1 has not been heard of for hang_timeout_s=12, since it was in {run!r}" in ended["stderr"]
    assert "on node2. Its process is stopped or blocked, or it was killed, or its machine" in ended["stderr"]
    # The same silence, seen from the other side: to rank 1 it is rank 0's host that is gone.
    alone = ranks[1].line()
    alone = ranks[1].line() if "holds" in alone else alone
    hosts.join(2)
    assert "Rank 0 has not been heard of for hang_timeout_s=12" in alone["stderr"]
