"""Kill -9 of a rank; random ones, of the launcher too: `python -m benchmarks.recovery`."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import forked
import pytest

from benchmarks.recovery import LaunchedRun, all_equal


class PlainRun(LaunchedRun):
    """One process of `lightrl fit`."""

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        return forked.Popen(["fit" if word == "launch" else word for word in command], **options)


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.extra
def test_a_killed_run_loses_one_iteration_at_most_and_no_loss_differs(tmp_path: Path) -> None:
    with PlainRun(tmp_path / "reference", ranks=1, iterations=6) as reference:
        assert reference.finish() == 0, reference.output()
    with LaunchedRun(tmp_path / "disturbed", ranks=1, iterations=6, retries=1) as run:
        run.wait_for(2)  # a checkpoint is there
        assert 0 <= run.kill("rank 0")["lost_iterations"] <= 1
        assert run.finish() == 0, run.output()
    assert all_equal(run, reference)
