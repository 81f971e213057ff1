"""Resumes do not warn of what a test changed."""

from pathlib import Path
from typing import Any

import pytest
from rank_scripts import left_by, run_once
from tiny_run import POLICY

# Lightning's, about a resume with other callbacks or another folder than those of the run before
OF_RESUMES = (
    "ignore:Be aware that when using .ckpt_path., callbacks:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings(*OF_RESUMES))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model that adapters belong to."""
    folder = tmp_path_factory.mktemp("base")
    POLICY.load_model().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def several_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks leaves of the runs in several_run.py."""
    return left_by(2, run_once(Path(__file__).with_name("several_run.py"), tmp_path_factory))
