import os
from pathlib import Path

import pytest
import yaml
from launched import run_settings

settings = pytest.fixture(run_settings, name="settings")


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Writes settings to a file in the working folder, which is empty else, and gives its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # Lightning's, as the command sets it
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # so that what a test seeds is undone with it

    def write(settings, name="run.yaml"):
        Path(name).write_text(yaml.safe_dump(settings))
        return name

    return write
