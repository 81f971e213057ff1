"""Entry points: optional parts ("leaves") that the core never imports, but loads by name with `entry_point`.

A `class_path` needs no entry here, and commands have a table in commands/main.py.
"""

from __future__ import annotations

import importlib
from typing import Any

ENTRY_POINTS = {
    "launch section": "lightrl.commands.launch.Launch",  # the `launch` section of a configuration
    "memory estimate": "lightrl.plan.use_estimate",  # chooses the settings that depend on a GPU's memory
    "setting help": "lightrl.commands.setting_help.help_text",  # help for a command or a setting
    "agent advantages": "lightrl.algorithms.agents.agent_advantages",  # for trajectories with several agents
    "agent check": "lightrl.algorithms.agents.check_agents",  # rejects modules without advantages per agent
    "monitors": "lightrl.callbacks.monitors.MonitorCheck",  # reports callbacks that monitor an unknown metric
    "bottleneck": "lightrl.callbacks.bottleneck.Bottleneck",  # reports where an iteration spends most of its time
    "intervals": "lightrl.commands.intervals.interval_lines",  # pass@k, printed after validate and test
    "unused settings": "lightrl.commands.unused_settings.name_unused",  # reports user settings without effect
    "served model calls": "lightrl.engines.sglang.with_server",  # for roles whose model is at a `url`
    "gateway": "lightrl.engines.servers.gateway.Gateway",  # for a server engine's `router` setting
    "task folders": "lightrl.workflows.task_folders.rows",  # for a folder of tasks as the source of data
    "Muon": "lightrl.models.muon.MuonWithAdamW",  # for `optimizer: muon`
    "fast decoder": "lightrl.engines.local.fast.fast_decoder",  # for LocalEngine and the models it supports
    "quantization": "lightrl.models.quantized.NF4",  # for a base model in 4 bits
}


def entry_point(name: str) -> Any:
    """Imports and returns the class or function with this name in ENTRY_POINTS."""
    module, _, attribute = ENTRY_POINTS[name].rpartition(".")
    return getattr(importlib.import_module(module), attribute)
