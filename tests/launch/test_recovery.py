"""Kill -9 of a rank; random ones, of the launcher too: `python -m benchmarks.recovery`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.recovery import LaunchedRun, all_equal


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_run_loses_one_iteration_at_most_and_no_loss_differs(tmp_path: Path) -> None:
    with LaunchedRun(tmp_path / "reference", ranks=1, iterations=12) as reference:
        assert reference.finish() == 0, reference.output()
    with LaunchedRun(tmp_path / "disturbed", ranks=1, iterations=12, retries=1) as run:
        run.wait_for(2)  # a checkpoint is there
        assert 0 <= run.kill("rank 0")["lost_iterations"] <= 1
        assert run.finish() == 0, run.output()
    assert all_equal(run, reference)
