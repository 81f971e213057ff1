"""Launcher: the protocol for classes that start, watch and stop a plan's processes; and the folder of a launch.

FOLDER/config.yaml                the run's settings, including tokens; only this user can read it
FOLDER/layout.yaml                the plan's changes to these settings
FOLDER/launch.json                the processes and their states, for `lightrl status`
FOLDER/token                      the servers' token; only this user can read it
FOLDER/HOST/trainer-0.log, …      the output of each process
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import yaml

from lightrl.callbacks.run_files import write_whole
from lightrl.checks.files import STATE_FILE, with_hosts
from lightrl.commands.launch.plan import CONFIG, LAYOUT, Plan, Process
from lightrl.concurrency.streams import LineBuffer
from lightrl.engines.servers.addresses import TOKEN_VARIABLE
from lightrl.trajectory import JsonObject

TOKEN_FILE = "token"
_READ_BYTES = 1 << 20


class Launcher(Protocol):
    """Starts a plan's processes on their hosts, watches them, and stops them in order: the trainer first."""

    def files(self) -> Mapping[str, str]:
        """Returns the files to write, none by default: maps names in the launch's folder to texts."""
        return {}

    def start(self) -> None:
        """Starts or submits the processes; returns immediately."""
        ...

    def wait(self) -> int:
        """Waits for the run and returns its exit code. The default, 0, is for runs that another program watches."""
        return 0

    def end(self) -> None:
        """Stops the run: asks the trainer to save its checkpoint, waits for the trainer, then stops the servers."""


def make_folder(root: str | Path) -> Path:
    """Creates and returns a new folder `launch-N` in the run's root folder."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(one.name[7:]) for one in root.glob("launch-*") if one.name[7:].isdecimal()), default=-1)
    while True:
        folder = root / f"launch-{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another launch was faster
            number += 1
            continue
        return folder.absolute()


def write_files(plan: Plan, config: str, files: Mapping[str, str]) -> None:
    """Writes the settings, the token and the launcher's files to the launch's folder."""
    folder = Path(plan.folder)
    contents = {CONFIG: config, LAYOUT: yaml.safe_dump(dict(plan.settings), sort_keys=False), **files}
    private = {CONFIG: contents.pop(CONFIG), TOKEN_FILE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)}
    for name, text in contents.items():
        (folder / name).write_text(text)
    for name, text in private.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)


class LaunchState:
    """The `launch.json` file, which `lightrl status` reads; `facts` describe the whole launch, such as its job."""

    def __init__(self, plan: Plan, **facts: object) -> None:
        self._path = Path(plan.folder) / STATE_FILE
        processes = {one.name: {"host": plan.hosts[one.host], "log": plan.log_file(one)} for one in plan.processes}
        self._content: JsonObject = {"launcher": plan.launch.launcher, **facts, "processes": processes}
        self.set({}, state="starting")

    def set(self, of_processes: Mapping[str, str], **facts: object) -> None:
        """Records the state of each process by its name, and properties of the launch."""
        for name, state in of_processes.items():
            self._content["processes"][name]["state"] = state
        self._content |= facts | {"at": time.time()}
        write_whole(self._path, json.dumps(self._content, indent=1))


def script_head(plan: Plan, environment: Mapping[str, str], *, before: Sequence[str] = ()) -> list[str]:
    """Returns shell lines: `before`, the servers' token, the environment, and the user's setup."""
    return [
        "#!/bin/bash",
        "set -e",
        *before,
        f"export {TOKEN_VARIABLE}=$(cat {shlex.quote(plan.folder)}/{TOKEN_FILE})",
        *(f"export {name}={quoted(value)}" for name, value in environment.items()),
        *plan.launch.setup,
    ]


def quoted(word: str) -> str:
    """Quotes a word for the shell, but lets the shell expand variables in it."""
    return f'"{word}"' if "$" in word else shlex.quote(word)


def inside(plan: Plan, command: Sequence[str]) -> str:
    """Returns a shell command that runs `command` inside the launch's container."""
    words = [] if plan.launch.launcher == "kubernetes" else shlex.split(plan.launch.container or "")
    return " ".join(quoted(word) for word in [*words, *command])


def with_addresses(plan: Plan, addresses_and_gpus: Sequence[tuple[str, Sequence[str]]]) -> Plan:
    """Returns the plan with each host's address, and with the names of its GPUs instead of their numbers."""
    hosts = [host for host, _ in addresses_and_gpus]

    def on_host(process: Process) -> Process:
        def gpu_names(numbers: str) -> str:
            return ",".join(addresses_and_gpus[process.host][1][int(number)] for number in numbers.split(","))

        command = [with_hosts(word, hosts) for word in process.command]
        environment = {name: with_hosts(value, hosts) for name, value in process.environment.items()}
        if "--devices" in command:
            index = command.index("--devices") + 1
            command[index] = gpu_names(command[index])
        if "CUDA_VISIBLE_DEVICES" in environment:
            environment["CUDA_VISIBLE_DEVICES"] = gpu_names(environment["CUDA_VISIBLE_DEVICES"])
        return replace(process, command=tuple(command), environment=environment)

    names = tuple(with_hosts(name, hosts) for name in plan.hosts)
    return replace(plan, hosts=names, processes=tuple(on_host(one) for one in plan.processes))


class FollowedLog:
    """Shows lines added to a log file from now on, or all lines if `from_start`; the file need not exist yet."""

    def __init__(self, path: Path, prefix: str, write: Callable[[str], object], *, from_start: bool = False) -> None:
        self._path, self._prefix, self._write = path, prefix, write
        self._position = path.stat().st_size if path.exists() and not from_start else 0
        self._buffer = LineBuffer()

    def follow(self) -> None:
        """Shows the lines completed since the last call, each with the prefix."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._position)
            while new := file.read(_READ_BYTES):
                self._position += len(new)
                for line in self._buffer.lines(new):
                    self._write(f"{self._prefix}{line.decode(errors='replace')}\n")
