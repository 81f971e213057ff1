"""Launcher: what starts a plan's processes, watches them and ends them; and the folder of a launch, one place to look.

FOLDER/config.yaml                the run's settings, also tokens; only this user can read it
FOLDER/layout.yaml                what the plan changes of them
FOLDER/launch.json                the processes and their states, for `lightrl status`
FOLDER/token                      of the servers; only this user can read it
FOLDER/HOST/trainer-0.log, …      what each process writes
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from lightrl.checks.status_files import STATE_FILE
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE
from lightrl.launch.plan import CONFIG, LAYOUT, Plan
from lightrl.strategies.atomic_write import write_whole

TOKEN_FILE = "token"


class Launcher(Protocol):
    """Starts a plan's processes where the plan says, watches them, and ends them in order: the trainer first."""

    def files(self) -> Mapping[str, str]:
        """File in the launch's folder → what it submits or prints; `--dry-run` shows them."""
        ...

    def start(self) -> None:
        """Starts or submits the processes; returns at once."""
        ...

    def wait(self) -> int:
        """Returns the run's exit code when it has ended; 0 at once if another program does the watching."""
        ...

    def end(self) -> None:
        """Ends what runs: asks the trainer to save its checkpoint, waits for that, ends the servers."""
        ...


def make_folder(root: str | Path) -> Path:
    """A new folder `launch-N` below the run's root folder."""
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(one.name[7:]) for one in root.glob("launch-*") if one.name[7:].isdigit()), default=-1)
    while True:
        folder = root / f"launch-{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another launch was faster
            number += 1
            continue
        return folder.absolute()


def write_files(plan: Plan, config: str, files: Mapping[str, str]) -> None:
    """Writes the launch's folder; the hosts' own folders too, where their names are known."""
    folder = Path(plan.folder)
    contents = {CONFIG: config, LAYOUT: yaml.safe_dump(dict(plan.settings), sort_keys=False), **files}
    private = {CONFIG: contents.pop(CONFIG), TOKEN_FILE: os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)}
    for name, text in contents.items():
        (folder / name).write_text(text)
    for name, text in private.items():
        with os.fdopen(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)


class LaunchState:
    """`launch.json`: what `lightrl status` reads of a launch.

    Args:
        facts: about the launch as a whole, such as the job's number.
    """

    def __init__(self, plan: Plan, **facts: Any) -> None:
        self._path = Path(plan.folder) / STATE_FILE
        processes = {one.name: {"host": plan.hosts[one.host], "log": plan.log_file(one)} for one in plan.processes}
        self._content: dict[str, Any] = {"launcher": plan.launch.launcher, **facts, "processes": processes}
        self.set({}, state="starting")

    def set(self, of_processes: Mapping[str, str], **facts: Any) -> None:
        """Notes states of processes by name, and facts about the launch."""
        for name, state in of_processes.items():
            self._content["processes"][name]["state"] = state
        self._content |= facts | {"at": time.time()}
        write_whole(self._path, json.dumps(self._content, indent=1))
