"""Runtime: where agents and tests run; the common interface for this machine, containers and third-party sandboxes."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.checks.user_code import function_of
from lightrl.workflows.task_folders.folder import TaskFolder

NAMES = {
    "local": "lightrl.workflows.task_folders.local.LocalRuntime",
    "docker": "lightrl.workflows.task_folders.containers.Docker",
    "podman": "lightrl.workflows.task_folders.containers.Podman",
}
NO_ENDPOINT = 9  # the port of a program that calls no policy: nothing listens there
Json = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The machine that a program runs on: a task's environment, with folders copied into it.

    For tests, `left` is the agent's `work` folder on this machine; its version of the working directory replaces the
    environment's. First, the runtime must call `clean` with the paths in the environment's working directory.
    """

    task: TaskFolder
    image: str  # what `build` returned
    copies: Sequence[tuple[str, str]] = ()  # (folder on this machine, its path in the environment)
    left: str | None = None
    clean: Callable[[Collection[str]], None] = lambda _: None
    returned: str = ""  # the path in the environment that the run must leave in `<folder>/work`


class Runtime(ABC):
    """Runs programs in tasks' environments; each process creates one object, without arguments.

    Each run starts from the unchanged environment, and leaves nothing behind: a program's processes are killed when it
    exits, at its deadline, on cancellation, and if this process is killed.
    """

    @abstractmethod
    def missing(self) -> str | None:
        """Returns why this runtime cannot be used here, and what to install, or None; called before a run starts."""

    def problem(self, task: TaskFolder) -> str | None:
        """Returns why this runtime cannot run a task, or None."""
        return None

    @abstractmethod
    def build(self, task: TaskFolder) -> str:
        """Builds or pulls a task's environment unless it exists; returns its name. Called from several threads.

        Raises ValueError with the reason if that fails.
        """

    @abstractmethod
    async def run(self, machine: Machine, request: Json) -> Json:
        """Runs a program and waits until it ends; on cancellation, until it is killed.

        Args:
            machine: where it runs. Afterwards, `<folder>/work` must have `machine.returned`, without links out of it.
            request: `command` (program and arguments), `environment` (variables), `stdin` (text), `folder` (a new path
                on this machine; the program must also find it, with `home`, `tmp` and `files`), `files` (name →
                text), `readable` and `needed` (paths on this machine that it may read), `port` (of the policy's
                endpoint on 127.0.0.1; NO_ENDPOINT for none), `network`, and `limits` (`wall_s`, `memory_mib`, ...).

        Returns:
            `exit_code` (None if a limit ended it), `stdout` (the end of its output), `stopped_by` (the limit, or None)
            and `layers` (["container"] if the program cannot reach this machine).

        Raises:
            OSError: if the program cannot be started.
        """


def paths_in(folder: Path) -> set[str]:
    """Returns the paths of all files and folders below a trusted folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def variables_of(request: Json) -> dict[str, str]:
    """Returns a program's variables, without this machine's PATH, because an environment has its own."""
    variables: dict[str, str] = request["environment"]
    return {name: value for name, value in variables.items() if (name, value) != ("PATH", os.environ.get("PATH"))}


def cache_folder() -> Path:
    """Returns the folder of built environments, which outlive a run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightrl" / "environments"


@functools.cache
def runtime_of(name: str) -> Runtime:
    """Returns the runtime with this name or dotted path; raises ValueError if there is none."""
    if name not in NAMES and "." not in name:
        raise ValueError(f"runtime must be one of {', '.join(NAMES)} or the dotted path to a Runtime, got {name!r}.")
    kind = function_of(NAMES.get(name, name), "runtime")
    if not (isinstance(kind, type) and issubclass(kind, Runtime)):  # checked before the call: a row may name any path
        raise ValueError(f"runtime={name!r} must be a subclass of lightrl.workflows.task_folders.Runtime.")
    return kind()
