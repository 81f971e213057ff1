"""Sandbox: runs untrusted programs with limits, for code_tests, the `python` tool and agents' commands.

Reading order:
    local.py  Sandbox, the protocol; LocalSandbox, which asks a guard to run a program; Limits and Run
    guard/    the guard: a process that runs one program after another and cleans up after each

May import: the same as rewards/. guard/ imports only the standard library.
"""

from lightrl.rewards.sandbox.guard.guard import remove_folder
from lightrl.rewards.sandbox.guard.layers import unprotected_by
from lightrl.rewards.sandbox.guard.network import split_host
from lightrl.rewards.sandbox.local import (
    GUARD_COMMAND,
    RELAY_COMMAND,
    SYSTEM_PATHS,
    Limits,
    LocalSandbox,
    Run,
    Sandbox,
    guard_prefix,
    what_to_allow,
)

__all__ = ["GUARD_COMMAND", "RELAY_COMMAND", "SYSTEM_PATHS", "Limits", "LocalSandbox", "Run", "Sandbox"]
__all__ += ["guard_prefix", "remove_folder", "split_host", "unprotected_by", "what_to_allow"]
