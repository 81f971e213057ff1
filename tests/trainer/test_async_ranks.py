"""Several ranks at staleness 2 train on what one process trains on, with its losses and weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, left_by, run_once

SCRIPT = Path(__file__).with_name("async_ranks_run.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """Results of rank 0 of each run, by the number of its ranks, with the weights that the others hold."""
    folder = run_once(SCRIPT, tmp_path_factory)
    left = {size: left_by(size, folder / f"ranks-{size}") for size in (1, 2, 4)}
    for ranks in left.values():
        for other in ranks[1:]:
            ranks[0]["weights"] |= other["weights"]
    return {size: ranks[0] for size, ranks in left.items()}


@pytest.mark.parametrize("size", [2, 4], ids=["FSDP2 on 2", "3D on 4"])
def test_ranks_train_on_the_tokens_of_one_process(size: int, runs: Any) -> None:
    one, several = runs[1], runs[size]
    for run in (one, several):
        lags = [version - int(rows[rows >= 0].min()) for version, rows in enumerate(run["versions"])]
        assert max(lags) == 2
    assert several["trained"] == one["trained"]
    assert all(torch.equal(left, right) for left, right in zip(several["token_ids"], one["token_ids"], strict=True))
    assert several["losses"] == pytest.approx(one["losses"], rel=ROUNDING, abs=ROUNDING)
    for name, weight in one["weights"].items():
        assert (several["weights"][name] - weight).abs().max() <= ROUNDING * weight.abs().max(), name


@pytest.mark.parametrize("size", [2, 4], ids=["FSDP2 on 2", "3D on 4"])
def test_ranks_end_together_before_they_train_on_wrong_logprobs(size: int, runs: Any, tmp_path_factory: Any) -> None:
    steps = left_by(size, run_once(SCRIPT, tmp_path_factory) / f"lies-{size}")
    assert 3 <= steps[0] <= 5  # at iteration 5 all tokens are of version 3 or later
    assert len(set(steps)) == 1
