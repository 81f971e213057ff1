"""Two ranks write their shares of the weights for a server: what it gets, and what happens when a rank cannot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_scripts import finished, left_by, run_once
from rank_shares_run import RUNS

from lightrl.weights.disk import is_whole

SCRIPT = Path(__file__).with_name("rank_shares_run.py")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 found, by run."""
    folder = run_once(SCRIPT, tmp_path_factory, "run")
    return dict(left_by(2, folder)[0])


@pytest.mark.parametrize("name", RUNS)
def test_the_server_has_the_weights_of_the_trainer(name: str, runs: dict[str, Any]) -> None:
    assert runs[name]["probe"] < 1e-5
    assert runs[name]["versions"][0] == 0


@pytest.mark.parametrize("name", ["plain", "merged"])
def test_each_rank_writes_a_share_and_together_they_are_the_model(name: str, runs: dict[str, Any]) -> None:
    found = runs[name]
    assert found["version"] == "version-00000003"
    shares = [{name for file, names in found["files"].items() if file.startswith(part) for name in names}
              for part in ("model-0", "model-0001-")]  # fmt: skip
    assert shares[1]
    assert shares[0] - shares[1]
    assert sorted(found["written"]) == sorted(found["weights"])
    assert all(torch.equal(found["written"][key], value) for key, value in found["weights"].items())


def test_served_adapters_leave_the_base_as_it_was_loaded_first(runs: dict[str, Any]) -> None:
    found = runs["served"]
    assert found["version"] == "version-00000000"
    assert any(not torch.equal(found["written"][key], value) for key, value in found["weights"].items())


@pytest.mark.extra
def test_a_rank_that_is_killed_amid_its_share_leaves_the_version_absent(tmp_path: Path) -> None:
    done = finished(SCRIPT, tmp_path, "kills")
    assert done.returncode != 0
    versions = [path.name for path in (tmp_path / "weights").glob("version-*")]
    assert all(is_whole(tmp_path / "weights" / name) for name in versions)
    assert "version-00000002" not in versions
    assert list((tmp_path / "weights" / ".share-1").glob("*.safetensors"))
