"""Shell scripts that start a process of a plan on its host, and their places once its hosts are known."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightrl.checks.status_files import with_hosts
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE
from lightrl.launch.launcher import TOKEN_FILE
from lightrl.launch.plan import Plan, Process


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


def placed(plan: Plan, places: Sequence[tuple[str, Sequence[str]]]) -> Plan:
    """The plan with each host's address, and the names of the GPUs there in place of their numbers."""
    hosts = [host for host, _ in places]

    def on_host(process: Process) -> Process:
        def real(numbers: str) -> str:
            return ",".join(places[process.host][1][int(number)] for number in numbers.split(","))

        command = [with_hosts(word, hosts) for word in process.command]
        environment = {name: with_hosts(value, hosts) for name, value in process.environment.items()}
        if "--devices" in command:
            at = command.index("--devices") + 1
            command[at] = real(command[at])
        if "CUDA_VISIBLE_DEVICES" in environment:
            environment["CUDA_VISIBLE_DEVICES"] = real(environment["CUDA_VISIBLE_DEVICES"])
        return replace(process, command=tuple(command), environment=environment)

    names = tuple(with_hosts(name, hosts) for name in plan.hosts)
    return replace(plan, hosts=names, processes=tuple(on_host(one) for one in plan.processes))
