"""PPO on two processes against one: critics, references, advantages of the whole iteration; metrics of any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_ranks_run import CASES, play
from rank_scripts import left_by, run

TOLERANCE = 1e-6  # relative to a tensor's largest number; float32 sums in another order
LATER = 1e-5  # after several updates
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found; they are started once for all tests."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run(Path(__file__).with_name("ppo_ranks_run.py"), folder)
    return left_by(2, folder)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("one_process")
    return {name: play(name, folder, devices=1) for name in CASES}


@every_case
def test_the_first_gradients_are_those_of_one_process(name: str, two_ranks: Any, one_process: Any) -> None:
    found, expected = two_ranks[0][name]["gradients"], one_process[name]["gradients"]
    assert len(found) == len(expected) > 10
    for key, gradient in expected.items():
        assert (found[key] - gradient).abs().max() <= TOLERANCE * gradient.abs().max(), key


@every_case
def test_two_ranks_learn_what_one_process_learns(name: str, two_ranks: Any, one_process: Any) -> None:
    found, expected = two_ranks[0][name]["weights"], one_process[name]["weights"]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert (found[key] - weight).abs().max() <= LATER * weight.abs().max(), key


@every_case
def test_values_advantages_and_returns_are_those_of_one_process(name: str, two_ranks: Any, one_process: Any) -> None:
    found, expected = two_ranks[0][name], one_process[name]
    assert found["state"] == pytest.approx(expected["state"], rel=LATER)
    iterations = list(zip(found["experiences"], expected["experiences"], strict=True))
    for index, (tensors, reference) in enumerate(iterations):
        assert {"values", "returns", "advantages", "style_rewards"} <= tensors.keys() == reference.keys()
        for key, value in reference.items():
            error = float((tensors[key].double() - value.double()).abs().max())
            assert error <= (LATER if index else TOLERANCE) * max(1, float(value.double().abs().max())), key


@every_case
def test_metrics_are_those_of_one_process(name: str, two_ranks: Any, one_process: Any) -> None:
    updates = two_ranks[0][name]["updates"]
    assert len(updates) == len(one_process[name]["updates"]) >= 3
    for index, (update, expected) in enumerate(zip(updates, one_process[name]["updates"], strict=True)):
        part = update.pop("only_here")  # of one rank's tokens, over all
        assert 0 < part < update["surprise"]
        tolerance = LATER if index else TOLERANCE
        assert update == pytest.approx(expected, rel=tolerance, abs=tolerance)
        assert update["min_surprise"] < update["surprise"] < update["max_surprise"]
        assert update["num_trajectories"] in (4, 8)


@every_case
def test_every_rank_has_the_same_experience_metrics_and_state(name: str, two_ranks: Any) -> None:
    first, second = (ranks[name] for ranks in two_ranks)
    assert first["state"] == second["state"]
    for left, right in zip(first["experiences"], second["experiences"], strict=True):
        assert all(torch.equal(left[key], right[key]) for key in left)
    local = {key for key in first["metrics"] if key.startswith("time/") or key.endswith("tokens_per_s")}
    for key in first["metrics"].keys() - local:
        assert first["metrics"][key] == second["metrics"][key], key
    assert "policy/only_here" in first["metrics"]


@every_case
def test_a_judge_of_the_module_is_asked_on_rank_0_alone(name: str, two_ranks: Any) -> None:
    assert [ranks[name]["judged"] for ranks in two_ranks] == [3, 0]
