"""Shell scripts that start a process of a plan on its host."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from lightrl.engines.sglang.addresses import TOKEN_VARIABLE
from lightrl.launch.launcher import TOKEN_FILE
from lightrl.launch.plan import Plan


def script_head(plan: Plan, environment: Mapping[str, str], *, before: Sequence[str] = ()) -> list[str]:
    """The token of the servers, the environment, and the user's setup lines, after the lines `before`."""
    return [
        "#!/bin/bash",
        "set -e",
        *before,
        f"export {TOKEN_VARIABLE}=$(cat {shlex.quote(plan.folder)}/{TOKEN_FILE})",
        *(f"export {name}={quoted(value)}" for name, value in environment.items()),
        *plan.launch.setup,
    ]


def quoted(word: str) -> str:
    """Quoted for the shell, which still expands variables."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def inside(plan: Plan, command: Sequence[str]) -> str:
    """A command inside the launch's container, as text."""
    words = [] if plan.launch.launcher == "kubernetes" else shlex.split(plan.launch.container or "")
    return " ".join(quoted(word) for word in [*words, *command])
