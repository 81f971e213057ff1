"""Entry points: optional parts ("leaves") that the core loads by name, other than by `class_path` or as a command.

Nothing in the core imports a leaf; it calls `entry_point` when it needs one. Commands have their own table, in
commands/main.py.
"""

from __future__ import annotations

import importlib
from typing import Any

ENTRY_POINTS = {
    "launch section": "lightrl.commands.launch.Launch",  # the section `launch` of a configuration
    "memory estimate": "lightrl.plan.use_estimate",  # sets what depends on a GPU's memory in a fit
    "gateway": "lightrl.engines.servers.gateway.Gateway",  # for the setting `router` of a server engine
    "fast decoder": "lightrl.engines.local.fast.fast_decoder",  # LocalEngine's, for the models that it supports
}


def entry_point(name: str) -> Any:
    """Imports and returns the class or function under this name."""
    module, _, attribute = ENTRY_POINTS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
