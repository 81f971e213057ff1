"""Entry points: leaves that the core finds by name, where neither a `class_path` nor a command names them.

Nothing in the core imports a leaf; it asks `entry_point` for one when it needs it. Commands have a table of their own,
in commands/main.py.
"""

from __future__ import annotations

import importlib
from typing import Any

ENTRY_POINTS = {
    "launch section": "lightrl.launch.Launch",  # the section `launch` of a configuration
    "memory estimate": "lightrl.plan.planned_run.use_estimate",  # what a GPU's memory decides in `lightrl fit`
    "gateway": "lightrl.engines.servers.gateway.Gateway",  # what `router` of an engine of servers names
    "fast decoder": "lightrl.engines.local.fast.decoder.fast_decoder",  # LocalEngine's, for models that it takes
}


def entry_point(name: str) -> Any:
    """The class or function under this name; imports its module."""
    module, _, attribute = ENTRY_POINTS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
