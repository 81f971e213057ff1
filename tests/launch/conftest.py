import pytest
from launched import run_settings

settings = pytest.fixture(run_settings, name="settings")
