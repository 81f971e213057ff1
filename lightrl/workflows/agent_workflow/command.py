"""AgentCommand: runs a program as an agent, in a folder that is kept until the reward has read it.

The sandbox's guard (lightrl/rewards/sandbox/guard) makes the folder: `work`, a copy of the template, where the program
runs; `home`, `tmp` and `task.txt`. When the program exits, on cancellation, and when this process dies, the guard kills
the program and all its children. It keeps the folder only if the program exits with code 0.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightrl.checks.printable import count_text
from lightrl.concurrency.owner import own_prefix
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import GUARD_COMMAND, SYSTEM_PATHS, Limits, remove_folder, unprotected_by, what_to_allow
from lightrl.trajectory import Prompt, plain_text

log = logging.getLogger(__name__)

_PREFIX = "lightrl-agents-"
_GRACE_S = 10.0  # time for a guard to kill its processes and remove its folder
_ENVIRONMENT = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}", "HOME": "{home}", "TMPDIR": "{tmp}"}
_ENVIRONMENT |= {"ANTHROPIC_BASE_URL": "{root_url}", "ANTHROPIC_API_KEY": "{api_key}", "NO_PROXY": "127.0.0.1"}
# Only parts of /etc, because a program that runs as root could otherwise read root's private files.
_ETC = ("passwd", "group", "hosts", "nsswitch.conf", "ssl", "mime.types")  # Python's mimetypes needs mime.types
_READABLE = (*SYSTEM_PATHS, "/sys", *(f"/etc/{name}" for name in _ETC))
# The deadline bounds the CPU time; memory is unbounded because programs reserve far more than they use.
_LIMITS = asdict(Limits(max_processes=1024, max_open_files=4096, output_kib=64))
_LIMITS |= dict.fromkeys(("cpu_s", "memory_mib", "file_mib"), 1 << 30)


_ARGUMENT_LIMITS = (
    " An argument or variable must be smaller than 128 KiB and contain no NUL character. Without {task} in the "
    "command, the program gets the task on standard input; {task_file} is a file that contains it."
)


@functools.cache
def root_of(process: int) -> str:
    """Makes the parent of this process's agent folders, to be removed at exit; removes those of dead processes."""
    root = tempfile.mkdtemp(prefix=own_prefix(_PREFIX))
    Path(root).chmod(0o711)  # a program that runs as another user must reach its folder
    atexit.register(remove_folder, root)
    return root


@dataclass(frozen=True)
class AgentResult:
    """An agent's reward, together with its folder and output."""

    reward: float | None = None
    workspace: str | None = None  # a folder for the reward function, deleted afterwards
    output: str = ""


@dataclass
class AgentCommand:
    """A program that is called like any other agent; AgentWorkflow documents the arguments."""

    command: Sequence[str]
    template: str | None
    environment: Mapping[str, str]
    timeout_s: float
    decode: Callable[..., Any]  # turns a prompt without messages into text
    # Parent of the folders. The process that computes rewards makes it, since workflow workers may exit earlier.
    root: str = field(default_factory=lambda: root_of(os.getpid()))
    layers: list[str] | None = None  # the protections in force; None before the first run

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        """Runs the program until it exits; raises RolloutError if it cannot be started or fails."""
        workspace = f"{self.root}/{secrets.token_hex(8)}/work"
        is_kept = False
        try:
            reply = await _run_under_guard(self._request_of(workspace, prompt, base_url, api_key))
            is_kept = reply["exit_code"] == 0
        except OSError as error:
            help_ = _ARGUMENT_LIMITS if re.search("too long|null byte|surrogates", str(error)) else ""
            raise RolloutError(f"{self.command[0]} could not be started: {error}.{help_}") from error
        finally:
            delete_workspace(None if is_kept else workspace)
        if reply["layers"] != self.layers:  # log it once
            self.layers = reply["layers"]
            log.info("Agents run with these layers of protection: %s.", ", ".join(self.layers) or "none")
            if unprotected := unprotected_by({*self.layers, "seccomp"}):
                text = "Agents run although nothing protects %s from them. %s See docs/security.md."
                log.warning(text, " and ".join(unprotected), what_to_allow())
            if "namespaces" not in self.layers:
                log.warning("Agents may reach the network: they have no network namespace. %s", what_to_allow())
        if not is_kept:
            code, limit = reply["exit_code"], reply["stopped_by"]
            how = f"was stopped by its limit of {limit}" if limit else f"exited: {code}"
            raise RolloutError(f"{self.command[0]} {how}. It printed {reply['stdout'][-300:]!r}.")
        if reply["removed"]:
            text = "Removed %s from the agent's folder that led out of it or were not regular files: %s."
            log.warning(text, count_text(len(reply["removed"]), "entry"), ", ".join(reply["removed"][:3]))
        return AgentResult(workspace=workspace, output=reply["stdout"])

    def _request_of(self, workspace: str, prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        """Returns the request that the guard reads as one line of JSON."""
        task = plain_text(prompt.messages) if prompt.messages else prompt.text(self.decode)
        folder = workspace.removesuffix("/work")
        values = {**prompt.fields, "task": task, "task_file": f"{folder}/task.txt", "workspace": workspace}
        values |= {"home": f"{folder}/home", "tmp": f"{folder}/tmp", "api_key": api_key}
        values |= {"base_url": base_url, "root_url": base_url.removesuffix("/v1")}

        def fill(text: str) -> str:  # leaves other braces unchanged
            return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)

        template = self.template and fill(self.template)
        expansion = f"workspace_template={self.template!r} expands to {template!r}"
        if template is not None and not Path(template).is_dir():
            raise NotADirectoryError(f"{expansion}, which is not a folder")
        fixed, brace, _ = (self.template or "").partition("{")  # `fixed`: the text before the first placeholder
        if brace and Path(f"{fixed}_").parent.resolve() not in Path(str(template)).resolve().parents:
            raise PermissionError(f"{expansion}, which is outside the template's folder")
        environment = {**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), **self.environment}
        names_task = any(re.search(r"\{task(_file)?\}", word) for word in (*self.command, *environment.values()))
        environment = {name: fill(value) for name, value in environment.items()}
        program = shutil.which(fill(self.command[0]), path=environment["PATH"])
        if program is None:
            raise FileNotFoundError("there is no such program")
        program = os.path.abspath(program)  # noqa: PTH100  # not resolved: the link selects a virtual environment
        folders = _program_folders(program, environment["PATH"])
        request: dict[str, Any] = {"command": [program, *map(fill, self.command[1:])], "environment": environment}
        request |= {"template": template, "files": {"task.txt": task}, "stdin": "" if names_task else task}
        request |= {"port": urlsplit(base_url).port, "layers": ["namespaces", "private_user", "landlock"]}
        request |= {"folder": folder, "readable": [*_READABLE, program, *map(str, folders)], "unprotected": True}
        return request | {"limits": _LIMITS | {"wall_s": self.timeout_s + 10}}  # the caller's deadline expires first


def _program_folders(program: str, search_path: str) -> set[Path]:
    """Returns a program's folders, the folders in PATH, and the parent of each `bin`, which contains its libraries."""
    of_program = {Path(program).parent, Path(program).resolve().parent}
    folders = of_program | set(map(Path, search_path.split(os.pathsep)))
    outside_home = {folder for folder in folders if folder in of_program or Path.home() not in folder.parents}
    above_bin = {folder.parent for folder in outside_home if folder.name in ("bin", ".bin")}  # ~/.local contains keys
    return (folders | above_bin) - {Path(), Path("/"), Path.home()}


def check_command(command: Sequence[str] | None, template: str | None) -> None:
    """Raises ValueError if the program or the template does not exist; names with braces are checked later."""
    words = [] if command is None or isinstance(command, str) else command[:1]
    if command is not None and not any("{" in word or shutil.which(word) for word in words):
        raise ValueError(f"command must be a list that starts with a program's path or name on PATH, got {command!r}.")
    if template is not None and "{" not in template and not Path(template).is_dir():
        raise ValueError(f"workspace_template={template!r} must be a folder. Create it, or leave the setting out.")


def delete_workspace(workspace: str | None) -> None:
    """Deletes an agent's folder under `root_of`, in a thread because it may be large.

    Ignores any other folder, because a recorded trajectory may name one.
    """
    if workspace is None:
        return
    folder = Path(workspace).parent
    root = folder.parent.resolve()
    is_ours = root.name.startswith(_PREFIX) and root.parent == Path(tempfile.gettempdir()).resolve()
    if is_ours and Path(workspace).name == "work" and not folder.is_symlink():
        threading.Thread(target=remove_folder, args=(str(folder),), name="lightrl-delete").start()


async def _run_under_guard(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the guard's reply or raises OSError; on cancellation, waits until the guard has killed the program."""
    guard = await asyncio.create_subprocess_exec(
        *GUARD_COMMAND, "", stdin=PIPE, stdout=PIPE, limit=1 << 22, start_new_session=True
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    try:
        guard.stdin.write(json.dumps(request).encode() + b"\n")
        reply = await guard.stdout.readline()
        guard.stdin.close()
        await guard.wait()
    finally:
        guard.stdin.close()
        end_s = time.monotonic() + _GRACE_S
        while guard.returncode is None:  # cancelled, possibly more than once
            if time.monotonic() > end_s:
                guard.kill()  # the program's first process dies with it
            with contextlib.suppress(asyncio.CancelledError, asyncio.TimeoutError):
                await asyncio.wait_for(guard.wait(), _GRACE_S)
    record: dict[str, Any] = json.loads(reply) if reply else {"problem": "the guard died; see its output above"}
    if record["problem"] is not None:
        raise OSError(record["problem"][:300])
    return record
