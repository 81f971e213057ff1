"""The bad inputs are many: a row of a table is an input and the words that its message must have."""

import importlib
from pathlib import Path

import pytest

pytestmark = pytest.mark.bad_input


def test_there_are_at_least_200_inputs():
    modules = [importlib.import_module(file.stem) for file in sorted(Path(__file__).parent.glob("test_bad_*.py"))]
    tables = [value for module in modules for value in vars(module).values() if isinstance(value, list)]
    assert sum(hasattr(item, "says") for table in tables for item in table) >= 200
