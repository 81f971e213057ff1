"""Roles on ranks of their own: PPO learns what it learns in one process, and calls on different ranks run at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_scripts
import torch
from rank_scripts import ROUNDING
from role_meshes_run import AT_ONCE, CASES, ON_BODY, RESUMED

HERE = Path(__file__).parent
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    """What each rank found, by number of ranks; all are started once for all tests."""
    folder = tmp_path_factory.mktemp("meshes")
    done = rank_scripts.finished(HERE / "role_meshes_run.py", folder)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "no gradient clipping" not in done.stderr  # what Lightning warns of on a rank without parameters
    return {size: rank_scripts.left_by(size, folder / str(size)) for size in (1, 2, 4)}


def over_all(runs: Any, name: str, what: str) -> dict[str, Any]:
    """The tensors of all ranks under their names."""
    size = CASES[name][0] if name in CASES else 4 if name == ON_BODY else 2
    found = {key: value for rank in runs[size] for key, value in rank[name][what].items()}
    for key in [key for key in found if key.endswith("lm_head.weight")]:  # the other end of a tie
        assert torch.equal(found.pop(key), found[key.replace("lm_head", "model.embed_tokens")])
    return found


@every_case
def test_each_rank_holds_its_roles_alone(name: str, runs: Any) -> None:
    size, _, meshes = CASES[name]
    for rank in range(size):
        held = {key.split(".")[0] for key in runs[size][rank][name]["weights"]}
        expected = {role for role in ("policy", "critic", "reference") if role not in meshes}
        assert held == expected | {role for role, mesh in meshes.items() if rank in mesh.ranks(size)}


@every_case
def test_the_first_gradients_are_those_of_one_process(name: str, runs: Any) -> None:
    found, expected = over_all(runs, name, "gradients"), runs[1][0][RESUMED]["gradients"]
    assert found.keys() == expected.keys()
    assert len(found) > 20
    for key, gradient in expected.items():
        assert (found[key] - gradient).abs().max() <= ROUNDING * gradient.abs().max(), key


@pytest.mark.parametrize("name", [*CASES, "resumed", ON_BODY])
def test_roles_on_ranks_of_their_own_learn_what_one_process_learns(name: str, runs: Any) -> None:
    alone = runs[1][0][ON_BODY if name == ON_BODY else RESUMED]
    found, expected = over_all(runs, name, "weights"), alone["weights"]
    assert found.keys() == expected.keys()
    for key, weight in expected.items():
        assert (found[key] - weight).abs().max() <= ROUNDING * weight.abs().max(), key


@every_case
def test_every_rank_reports_the_metrics_of_one_process(name: str, runs: Any) -> None:
    size = CASES[name][0]
    expected = runs[1][0][RESUMED]["updates"]
    assert expected
    for rank in range(size):
        updates = runs[size][rank][name]["updates"]
        assert updates == runs[size][0][name]["updates"]
        for update, reference in zip(updates, expected, strict=True):
            update = {key: value for key, value in update.items() if key != "only_here"}
            assert update == pytest.approx(reference, rel=ROUNDING, abs=ROUNDING)


def test_calls_on_different_ranks_and_judges_run_at_the_same_time(runs: Any) -> None:
    assert len(runs[2][0][AT_ONCE]["updates"]) == 1  # each waits for all others to have begun
