"""Several ranks, staleness 2 and a server of its own each: the run of one process, whose schedule they repeat."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, left_by, run_once

SCRIPT = Path(__file__).with_name("replay_ranks_run.py")

pytestmark = pytest.mark.replay


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What rank 0 of each run left, by the number of its ranks, with the weights that the others hold."""
    folder = run_once(SCRIPT, tmp_path_factory)
    left = {size: left_by(size, folder / f"ranks-{size}") for size in (1, 2, 4)}
    for ranks in left.values():
        for other in ranks[1:]:
            ranks[0]["weights"] |= other["weights"]
    return {size: ranks[0] for size, ranks in left.items()}


@pytest.mark.parametrize("size", [2, 4], ids=["FSDP2 on 2", "3D on 4"])
def test_ranks_repeat_the_schedule_of_one_process(size: int, runs: Any) -> None:
    one, several = runs[1], runs[size]
    lags = [version - int(rows[rows >= 0].min()) for version, rows in enumerate(one["versions"])]
    assert max(lags) == 2
    assert any(len(set(row[row >= 0].tolist())) > 1 for rows in one["versions"] for row in rows)  # a sync amid a row
    assert several["trained"] == one["trained"]
    for name in ("token_ids", "versions"):
        assert all(torch.equal(left, right) for left, right in zip(several[name], one[name], strict=True))
    assert several["losses"] == pytest.approx(one["losses"], rel=ROUNDING, abs=ROUNDING)
    for name, weight in one["weights"].items():
        assert (several["weights"][name] - weight).abs().max() <= ROUNDING * weight.abs().max(), name
