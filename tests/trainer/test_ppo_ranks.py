"""PPO on several ranks, sharded or split, against one process: the same gradients, weights, advantages and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_ranks_run import CASES, SETTINGS, Case
from rank_scripts import ROUNDING, left_by, run_once
from torch import Tensor

every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], Any]:
    """What each process found, by number of ranks and rank; all are started once for all tests."""
    folder = run_once(Path(__file__).with_name("ppo_ranks_run.py"), tmp_path_factory)
    found = {size: left_by(size, folder / str(size)) for size in (1, 2, 4)}
    return {(size, rank): found[size][rank] for size in found for rank in range(size)}


def one_process(name: str, runs: Any) -> dict[str, Any]:
    found: dict[str, Any] = runs[1, 0][CASES[name].settings]
    return found


def all_ranks(name: str, runs: Any) -> list[dict[str, Any]]:
    case: Case = CASES[name]
    return [runs[case.num_ranks, rank][name] for rank in range(case.num_ranks)]


def joined(kind: str, name: str, runs: Any) -> dict[str, Tensor]:
    """The tensors of all ranks by name: of a split model each has some of them."""
    return {key: value for rank in all_ranks(name, runs) for key, value in rank[kind].items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() >= expected.keys()
    assert len(expected) > 10
    for key in found.keys() - expected.keys():  # the ends of a pipeline have a weight that they share under both names
        assert torch.equal(found[key], found[key.replace("lm_head", "model.embed_tokens")])
    for key, value in expected.items():
        assert (found[key] - value).abs().max() <= ROUNDING * value.abs().max(), key


@every_case
def test_the_first_gradients_are_those_of_one_process(name: str, runs: Any) -> None:
    assert_same(joined("gradients", name, runs), one_process(name, runs)["gradients"])


@every_case
def test_each_role_is_clipped_by_itself_as_in_one_process(name: str, runs: Any) -> None:
    found, expected = joined("clipped", name, runs), one_process(name, runs)["clipped"]
    assert_same(found, expected)
    squares: dict[bool, float] = {}
    for key in expected:
        is_critic = key.startswith("critic.")
        squares[is_critic] = squares.get(is_critic, 0.0) + float(found[key].square().sum())
    assert list(squares.values()) == pytest.approx([0.5**2] * len(squares), rel=1e-5)


@every_case
def test_several_ranks_learn_what_one_process_learns(name: str, runs: Any) -> None:
    assert_same(joined("weights", name, runs), one_process(name, runs)["weights"])


@every_case
def test_the_same_parameters_are_trained(name: str, runs: Any) -> None:
    found = set.union(*(rank["trained"] for rank in all_ranks(name, runs)))
    assert found - {"policy.lm_head.weight"} == one_process(name, runs)["trained"] - {"policy.lm_head.weight"}


@every_case
def test_values_advantages_and_returns_are_those_of_one_process(name: str, runs: Any) -> None:
    found, expected = all_ranks(name, runs)[0], one_process(name, runs)
    assert found["state"] == pytest.approx(expected["state"], rel=ROUNDING)
    for tensors, reference in zip(found["experiences"], expected["experiences"], strict=True):
        assert {"values", "returns", "advantages", "style_rewards"} <= tensors.keys() == reference.keys()
        for key, value in reference.items():
            error = float((tensors[key].double() - value.double()).abs().max())
            assert error <= ROUNDING * max(1, float(value.double().abs().max())), key


@every_case
def test_metrics_are_those_of_one_process(name: str, runs: Any) -> None:
    updates, references = all_ranks(name, runs)[0]["updates"], one_process(name, runs)["updates"]
    assert len(updates) == len(references) >= 3
    for update, expected in zip(updates, references, strict=True):
        assert update == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
        assert update["min_surprise"] < update["surprise"] < update["max_surprise"]
        assert update["num_trajectories"] in (4, 8)


@every_case
def test_a_metric_of_the_second_data_rank_reaches_all(name: str, runs: Any) -> None:
    for rank in all_ranks(name, runs):
        assert rank["updates"]
        assert len(rank["only_here"]) == (len(rank["updates"]) if rank["dp_size"] > 1 else 0)
        for update, part in zip(rank["updates"], rank["only_here"], strict=False):
            assert update["min_surprise"] < part < update["max_surprise"]  # over that rank's tokens


@every_case
def test_every_rank_has_the_same_experience_metrics_and_state(name: str, runs: Any) -> None:
    first, *others = all_ranks(name, runs)
    local = {key for key in first["metrics"] if key.startswith("time/") or key.endswith("tokens_per_s")}
    assert first["experiences"]
    assert first["metrics"].keys() > local
    for other in others:
        assert first["state"] == other["state"]
        for left, right in zip(first["experiences"], other["experiences"], strict=True):
            assert all(torch.equal(left[key], right[key]) for key in left)
        for key in first["metrics"].keys() - local:
            assert first["metrics"][key] == other["metrics"][key], key


@every_case
def test_a_judge_of_the_module_is_asked_on_rank_0_alone(name: str, runs: Any) -> None:
    assert [rank["judged"] for rank in all_ranks(name, runs)] == [3] + [0] * (CASES[name].num_ranks - 1)


@every_case
def test_a_role_that_waits_in_cpu_memory_moves_for_each_of_its_calls_only(name: str, runs: Any) -> None:
    waits = "offload=True" in repr(SETTINGS[CASES[name].settings])
    expected = 1 + 2 * 3 if waits else 1  # the module once, the role there and back in each iteration
    assert [rank["num_moves"] for rank in all_ranks(name, runs)] == [expected] * CASES[name].num_ranks
