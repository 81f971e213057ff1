"""Runtime: where an agent and its tests run. One interface for this machine, containers, and others' sandboxes."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightrl.checks.user_code import function_of
from lightrl.workflows.tasks.folder import Task

NAMES = {
    "local": "lightrl.workflows.tasks.local.LocalRuntime",
    "docker": "lightrl.workflows.tasks.containers.Docker",
    "podman": "lightrl.workflows.tasks.containers.Podman",
    "apptainer": "lightrl.workflows.tasks.containers.Apptainer",
}
NO_ENDPOINT = 9  # the port of a program that calls no policy: nothing listens there
Json = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """What a program finds: a task's environment, and folders copied into it."""

    task: Task
    image: str  # what `build` returned
    copies: Sequence[tuple[str, str]] = ()  # (folder on this machine, its path in the environment)
    agent_workspace: str | None = None  # for tests: the folder that the agent's run left, which replaces the workdir
    removed: Callable[[Collection[str]], list[str]] = lambda _: []  # paths in the environment's workdir → to remove
    returned: Sequence[str] = ()  # paths of the environment that the folder keeps


class Runtime(ABC):
    """Runs programs in tasks' environments; one object for each process, without arguments.

    Each run starts from the unchanged environment, and leaves nothing of it: all processes of a program are killed when
    it exits, at its deadline, on cancellation, and if this process is killed.
    """

    @abstractmethod
    def missing(self) -> str | None:
        """Returns why this runtime cannot be used here, with what to install, or None; called before a run starts."""

    def problem(self, task: Task) -> str | None:
        """Returns why this runtime cannot run a task, or None."""
        return None

    @abstractmethod
    def build(self, task: Task) -> str:
        """Builds or pulls a task's environment unless it exists; returns its name. Called from several threads.

        Raises:
            ValueError: if that fails; says why.
        """

    @abstractmethod
    async def run(self, machine: Machine, request: Json) -> Json:
        """Runs a program and waits until it ends; on cancellation, until it is killed.

        Args:
            machine: where it runs. Paths below `machine.returned` must then be in `<folder>/work`, without links that
                lead out of the folder.
            request: `command` (program and arguments), `environment` (variables), `stdin` (text), `folder` (a new path
                on this machine, which the program must also find, with `home`, `tmp` and `files`), `files` (name →
                text), `readable` and `needed` (paths on this machine that it may read), `port` (of the policy's
                endpoint on 127.0.0.1; NO_ENDPOINT for none), `network`, and `limits` (`wall_s`, `memory_mib`, ...).

        Returns:
            `exit_code` (None if a limit ended it), `stdout` (the end of its output), `stopped_by` (the limit, or None)
            and `layers` (["container"] if the program cannot reach this machine).

        Raises:
            OSError: if it cannot be started.
        """


def paths_in(folder: Path) -> set[str]:
    """Returns the paths of all files and folders below a trusted folder, relative to it."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def cache_folder() -> Path:
    """Returns the folder of built environments, which outlive a run."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lightrl" / "environments"


@functools.cache
def runtime_of(name: str) -> Runtime:
    """Returns the runtime of this name or dotted path; raises ValueError if there is none."""
    if name not in NAMES and "." not in name:
        raise ValueError(f"runtime must be one of {', '.join(NAMES)} or the dotted path of a Runtime, got {name!r}.")
    runtime = function_of(NAMES.get(name, name), "runtime")()
    if not isinstance(runtime, Runtime):
        raise ValueError(f"runtime={name!r} must be a subclass of lightrl.workflows.tasks.Runtime.")
    return runtime
