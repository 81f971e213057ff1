"""Claude Code and Codex as scripts/agents installs them, and the small task that they do in a folder."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parents[3] / "scripts" / "agents"


def script(name: str) -> Any:
    """A module of scripts/agents."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


install = script("install")
record = script("record")
