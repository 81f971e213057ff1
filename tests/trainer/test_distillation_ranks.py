"""A teacher's likeliest tokens on sharded, sliced and staged models: found and learned from as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distillation_ranks_run import CASES, play
from rank_scripts import ROUNDING, left_by, run_once

every_layout = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; they are started once for all tests."""
    folder = run_once(Path(__file__).with_name("distillation_ranks_run.py"), tmp_path_factory)
    return left_by(2, folder)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return play(tmp_path_factory.mktemp("one_process"))


@every_layout
def test_the_teacher_finds_the_same_tokens_on_every_layout(name: str, two_ranks: Any, one_process: Any) -> None:
    assert len(one_process["experiences"]) == 2
    for found, expected in zip(two_ranks[0][name]["experiences"], one_process["experiences"], strict=True):
        mask = expected["loss_mask"]
        ids = expected["teacher_topk_ids"]
        assert ids.dtype == torch.int64
        assert ids.shape == (*mask.shape, 5)
        assert 5 <= int(ids.max()) < 8  # of the student's tokens, though the teacher has more
        assert torch.equal(found["teacher_topk_ids"], ids)
        logprobs = expected["teacher_topk_logprobs"]
        assert logprobs[~mask].eq(0).all()
        assert logprobs[mask].diff(dim=1).le(0).all()  # the likeliest first
        torch.testing.assert_close(found["teacher_topk_logprobs"], logprobs, rtol=0, atol=ROUNDING)


@every_layout
def test_two_ranks_learn_what_one_process_learns(name: str, two_ranks: Any, one_process: Any) -> None:
    found = two_ranks[0][name]
    assert len(found["updates"]) == len(one_process["updates"]) == 4
    for update, expected in zip(found["updates"], one_process["updates"], strict=True):
        assert update == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
        assert update["teacher_divergence_nats"] > 0.01
        assert 0 < update["teacher_rest_fraction"] < 1
    for key, weight in one_process["weights"].items():
        assert (found["weights"][key] - weight).abs().max() <= ROUNDING * weight.abs().max(), key


@every_layout
def test_both_ranks_report_the_same_numbers(name: str, two_ranks: Any) -> None:
    assert two_ranks[0][name]["updates"] == two_ranks[1][name]["updates"]
