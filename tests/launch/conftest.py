import importlib.util
from pathlib import Path

import pytest


@pytest.fixture
def settings():
    """Those of the command's tests."""
    file = Path(__file__).parents[1] / "commands" / "conftest.py"
    spec = importlib.util.spec_from_file_location("commands_conftest", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.settings.__wrapped__()
