"""Runs on four and eight ranks in three directions against one process: the same trajectories, losses and weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import ROUNDING, left_by, run_once
from test_several_ranks import assert_close
from world_3d_run import CASES


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    """What each process found, by number of ranks and rank; all are started once for all tests."""
    folder = run_once(Path(__file__).with_name("world_3d_run.py"), tmp_path_factory)
    found = {size: left_by(size, folder / str(size)) for size in (1, 4, 8)}
    return {(size, rank): found[size][rank] for size in found for rank in range(size)}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_in_three_directions_learn_what_one_process_learns(name: str, runs: Any) -> None:
    expected, found = runs[1, 0][name], runs[CASES[name][0], 0][name]
    assert len(found["updates"]) == len(expected["updates"]) >= 2
    for left, right in zip(found["token_ids"], expected["token_ids"], strict=True):
        assert torch.equal(left, right)
    for update, reference in zip(found["updates"], expected["updates"], strict=True):
        assert update.keys() == reference.keys()
        for key, value in reference.items():
            assert_close(update[key], value, scale=1.0)
    assert found["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        assert (found["weights"][key] - weight).abs().max() <= ROUNDING * weight.abs().max(), key


@pytest.mark.parametrize("name", CASES)
def test_the_engine_has_the_weights_of_the_split_model(name: str, runs: Any) -> None:
    found = runs[CASES[name][0], 0][name]
    shared = found["engine"].keys() & found["weights"].keys()
    assert len(shared) > 20
    assert all(torch.equal(found["engine"][key], found["weights"][key]) for key in shared)


@pytest.mark.parametrize("name", CASES)
def test_every_rank_of_a_split_model_reports_the_same_numbers(name: str, runs: Any) -> None:
    size = CASES[name][0]
    assert runs[size, 0][name]["updates"]
    for rank in range(1, size):
        assert runs[size, rank][name]["updates"] == runs[size, 0][name]["updates"]
