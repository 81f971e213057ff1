from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`pytest -m examples` runs all tests of this folder."""
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker("examples")


@pytest.fixture
def as_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the repository's root, with what the command sets before it imports."""
    monkeypatch.chdir(FOLDER.parents[1])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it
