"""Two ranks write their shares of the weights for a server: what it gets, and what happens when a rank cannot."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import finished, left_by, run_once

from lightrl.weights.disk import is_whole

SCRIPT = Path(__file__).with_name("rank_shares_run.py")
RunOf = Callable[[str], dict[str, Any]]


MERGED = pytest.param("merged", marks=pytest.mark.extra)


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> RunOf:
    """Results of rank 0 in a run; the runs that are no extra are started together."""

    @functools.cache
    def started(which: str) -> dict[str, Any]:
        return dict(left_by(2, run_once(SCRIPT, tmp_path_factory, which))[0])

    return lambda name: started("merged" if name == "merged" else "run")[name]


@pytest.mark.parametrize("name", ["plain", MERGED, "served"])
def test_the_server_has_the_weights_of_the_trainer(name: str, run_of: RunOf) -> None:
    assert run_of(name)["probe"] < 1e-5
    assert run_of(name)["versions"][0] == 0


@pytest.mark.parametrize("name", ["plain", MERGED])
def test_each_rank_writes_a_share_and_together_they_are_the_model(name: str, run_of: RunOf) -> None:
    found = run_of(name)
    assert found["version"] == "version-00000003"
    shares = [{name for file, names in found["files"].items() if file.startswith(part) for name in names}
              for part in ("model-0", "model-0001-")]  # fmt: skip
    assert shares[1]
    assert shares[0] - shares[1]
    assert sorted(found["written"]) == sorted(found["weights"])
    assert all(torch.equal(found["written"][key], value) for key, value in found["weights"].items())


def test_served_adapters_leave_the_base_as_it_was_loaded_first(run_of: RunOf) -> None:
    found = run_of("served")
    assert found["version"] == "version-00000000"
    assert any(not torch.equal(found["written"][key], value) for key, value in found["weights"].items())


@pytest.mark.extra
def test_a_rank_that_is_killed_during_its_share_leaves_the_version_absent(tmp_path: Path) -> None:
    assert finished(SCRIPT, tmp_path, "kills").returncode != 0
    versions = [path.name for path in (tmp_path / "weights").glob("version-*")]
    assert all(is_whole(tmp_path / "weights" / name) for name in versions)
    assert "version-00000002" not in versions
    assert list((tmp_path / "weights" / ".share-1").glob("*.safetensors"))
