"""Resumes do not warn of what a test changed."""

from pathlib import Path

import pytest

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
