"""AgentCommand: runs a program as an agent, in a folder that is kept until the reward is computed.

The sandbox's guard (lightrl/rewards/sandbox/guard) creates the folder. It contains `home`, `tmp`, `task.txt` and
`work`, a copy of the template, in which the program runs. The guard kills the program and all its children when the
program exits, on cancellation, and when this process dies. It keeps the folder if the program exited.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import errno
import functools
import json
import logging
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
from asyncio.subprocess import PIPE
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightrl.checks.bounds import check_bounds, check_choice, finite_number
from lightrl.checks.printable import count_text
from lightrl.concurrency.owner import own_prefix
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import (
    GUARD_COMMAND,
    SYSTEM_PATHS,
    Limits,
    guard_prefix,
    remove_folder,
    split_host,
    unprotected_by,
    what_to_allow,
)
from lightrl.trajectory import Prompt, plain_text

log = logging.getLogger(__name__)

_PREFIX = "lightrl-agents-"
_GRACE_S = 10.0  # time for a guard to kill its processes and remove its folder
_ENVIRONMENT = {"OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}", "HOME": "{home}", "TMPDIR": "{tmp}"}
_ENVIRONMENT |= {"ANTHROPIC_BASE_URL": "{root_url}", "ANTHROPIC_API_KEY": "{api_key}", "NO_PROXY": "127.0.0.1"}
_READABLE = (*SYSTEM_PATHS, "/sys")  # the guard adds parts of /etc
# CPU time needs no separate limit, because the deadline bounds it.
_LIMITS = asdict(Limits(max_open_files=4096, output_kib=64)) | {"cpu_s": 1 << 30}
_UNBOUNDED = 1 << 30
_TOO_MUCH = ("/", "/dev", "/etc", "/proc", "/run", "/tmp", "/var/tmp")
# Runs the guard's request elsewhere, for example in a container; returns a reply in the guard's format.
StartProgram = Callable[[dict[str, Any], Prompt], Awaitable[dict[str, Any]]]
OF_PROGRAM = ("memory_mib", "disk_mib", "processes")  # limits that have no effect on a function
_INTERPRETERS = ("python3", "python", "node")  # on PATH, these may be links into other folders
_SECRET = re.compile(r"\{env:(\w+)\}")

_ARGUMENT_LIMITS = (
    " An argument or variable must be smaller than 128 KiB and contain no NUL character. Without {task} in the "
    "command, the program gets the task on standard input; {task_file} is a file that contains it."
)


@functools.cache
def root_of(process: int) -> str:
    """Makes the parent of this process's agent folders, removed at exit; removes parents left by dead processes."""
    root = tempfile.mkdtemp(prefix=own_prefix(_PREFIX))
    Path(root).chmod(0o711)  # a program that runs as another user must reach its folder
    atexit.register(remove_folder, root)
    return root


@dataclass(frozen=True)
class AgentLimits:
    """Limits for one agent; None means no limit.

    A program that exceeds memory_mib or disk_mib is killed, and its trajectory is dropped. A request that exceeds
    requests, turns, rows or total_tokens is refused (`limit_exceeded`), like a request that exceeds `max_tokens`.

    Args:
        memory_mib: total memory of a program's processes.
        disk_mib: size of each file, and total size of all files (checked about once a second).
        processes: processes and threads of a program; it cannot start more.
        requests: the policy's answers, plus requests to frozen models.
        turns: answers in one conversation.
        rows: conversations that are trained on; each branch counts.
        total_tokens: tokens in all of the agent's rows, which form one microbatch; an answer is cut at this limit.
    """

    memory_mib: int | None = None
    disk_mib: int | None = None
    processes: int = 1024
    requests: int | None = None
    turns: int | None = None
    rows: int | None = None
    total_tokens: int | None = None

    def __post_init__(self) -> None:
        check_bounds(1, **{f"limits.{name}": value for name, value in asdict(self).items()})

    def of_program(self, timeout_s: float) -> dict[str, Any]:
        """Returns the guard's limits."""
        limits = {"memory_mib": self.memory_mib or _UNBOUNDED, "file_mib": self.disk_mib or _UNBOUNDED}
        return _LIMITS | limits | {"disk_mib": self.disk_mib, "max_processes": self.processes, "wall_s": timeout_s}


@dataclass(frozen=True)
class AgentResult:
    """An agent's reward, together with its folder and output.

    Args:
        rewards: additional rewards by response id. For `n` choices, the id of each after the first is `<id>/<index>`.
    """

    reward: float | None = None
    workspace: str | None = None  # a folder for the reward function, deleted afterwards
    output: str = ""
    is_truncated: bool = False  # whether a limit ended the agent
    rewards: Mapping[str, float] = field(default_factory=dict)


class AgentFailed(RolloutError):
    """Raised if a program fails; contains its output and workspace, which the caller deletes."""

    def __init__(self, message: str, result: AgentResult = AgentResult()) -> None:
        super().__init__(message)
        self.result = result
        self.workspace = result.workspace


@dataclass
class AgentCommand:
    """A program that is called like any other agent; AgentWorkflow documents the arguments."""

    command: Sequence[str]
    template: str | None
    environment: Mapping[str, str]
    readable: Sequence[str]
    network: str | Sequence[str]
    limits: AgentLimits
    timeout_s: float
    decode: Callable[..., Any]  # turns a prompt without messages into text
    # Parent of the agents' folders, made by the process that computes rewards: workflow workers may exit earlier.
    root: str = field(default_factory=lambda: root_of(os.getpid()))
    layers: list[str] | None = None  # the protections in force; None before the first run
    start: StartProgram | None = None  # None runs the program under the guard

    async def run(self, prompt: Prompt, base_url: str, api_key: str) -> AgentResult:
        """Runs the program until it exits; raises RolloutError if it cannot be started or fails."""
        workspace = f"{self.root}/{secrets.token_hex(8)}/work"
        is_kept = False
        try:
            request = self.request_of(workspace, prompt, base_url, api_key)
            reply = await (run_under_guard(request) if self.start is None else self.start(request, prompt))
            is_kept = reply["exit_code"] is not None
        except OSError as error:
            help_ = _ARGUMENT_LIMITS if re.search("too long|null byte|surrogates", str(error)) else ""
            problem = self.without_secrets(str(error)).rstrip(".")
            raise RolloutError(f"{self.command[0]} could not be started: {problem}.{help_}") from error
        finally:
            delete_workspace(None if is_kept else workspace)
        if reply["layers"] != self.layers:  # log it once
            self.layers = reply["layers"]
            log.info("Agents run with these layers of protection: %s.", ", ".join(self.layers) or "none")
            is_contained = "container" in self.layers
            if not is_contained and (unprotected := unprotected_by({*self.layers, "seccomp"})):
                text = "Agents run although nothing protects %s from them. %s See docs/security.md."
                log.warning(text, " and ".join(unprotected), what_to_allow())
            if not is_contained and "namespaces" not in self.layers and self.network == "none":
                log.warning("Agents may reach the network: they have no network namespace. %s", what_to_allow())
            if not is_contained and "view" not in self.layers:
                text = "Agents see this machine's /etc, and have neither a user name nor a /tmp. %s"
                log.warning(text, what_to_allow())
        output = self.without_secrets(reply["stdout"], reply.get("secrets"))
        if removed := [name for name in reply.get("removed", ()) if name.startswith("work/")]:
            text = "Removed %s from the agent's folder because only regular files and links within it are kept: %s."
            log.warning(text, count_text(len(removed), "entry"), ", ".join(removed[:3]))
        result = AgentResult(workspace=workspace if Path(workspace).is_dir() else None, output=output)
        if reply["exit_code"] != 0:
            text = f"{self.command[0]} {self._how_it_failed(reply, request)}. It printed {output[-300:]!r}."
            raise AgentFailed(text, result) if is_kept else RolloutError(text)  # if not, the keeper was killed
        return result

    def _how_it_failed(self, reply: dict[str, Any], request: dict[str, Any]) -> str:
        code, limit, output = reply["exit_code"], reply["stopped_by"], reply["stdout"]
        names = {"memory": "memory_mib", "disk": "disk_mib", "processes": "processes"}
        if limit is not None:
            setting = f" (limits.{names[limit]}={getattr(self.limits, names[limit])})" if limit in names else ""
            return f"was stopped by its {limit} limit{setting}"
        how = f"exited: {code}"

        def is_from(number: signal.Signals) -> bool:
            return code in (-number, 128 + number)  # a shell or a container adds 128

        if self.limits.disk_mib and (is_from(signal.SIGXFSZ) or os.strerror(errno.EFBIG) in output):
            how += f", perhaps because a file reached limits.disk_mib={self.limits.disk_mib}"
        how += ", perhaps because it reached a limit on memory" if is_from(signal.SIGKILL) else ""
        if os.strerror(errno.EAGAIN) in output:
            how += f", perhaps because it reached limits.processes={self.limits.processes}"
        readable = tuple(f"{os.path.realpath(path)}/" for path in (*request["readable"], *request["needed"]))
        for word in request["command"][1:]:
            if word.startswith("/") and Path(word).exists() and not f"{os.path.realpath(word)}/".startswith(readable):
                return f"{how}. It cannot read {word}: add it or its folder to readable"
        return how

    def without_secrets(self, text: str, others: Mapping[str, str] | None = None) -> str:
        """Replaces this process's variables with `{env:NAME}`, and `others` with their names; output is logged."""
        names = {name for value in self.environment.values() for name in _SECRET.findall(value)}
        own = {os.environ[name]: f"{{env:{name}}}" for name in names if os.environ.get(name)}
        return hide_secrets(text, {**(others or {}), **own})  # only one pass, since a pass shortens output that was cut

    def request_of(self, workspace: str, prompt: Prompt, base_url: str, api_key: str) -> dict[str, Any]:
        """Returns the request that the guard reads as one line of JSON."""
        task = plain_text(prompt.messages) if prompt.messages else prompt.text(self.decode)
        folder = workspace.removesuffix("/work")
        values = {**prompt.fields, "task": task, "task_file": f"{folder}/task.txt", "workspace": workspace}
        values |= {"home": f"{folder}/home", "tmp": f"{folder}/tmp", "api_key": api_key}
        values |= {"base_url": base_url, "root_url": base_url.removesuffix("/v1")}

        def fill(text: str) -> str:
            return _filled(text, values)

        template = row_folder("workspace_template", self.template, values)
        environment = {**_ENVIRONMENT, "PATH": os.environ.get("PATH", os.defpath), **self.environment}
        names_task = any(re.search(r"\{task(_file)?\}", word) for word in (*self.command, *environment.values()))

        def fill_variable(text: str) -> str:  # in one pass, so that a row's text cannot refer to a variable
            return re.sub(
                rf"{_SECRET.pattern}|\{{\w+\}}", lambda each: os.environ[each[1]] if each[1] else fill(each[0]), text
            )

        environment = {name: fill_variable(value) for name, value in environment.items()}
        program = shutil.which(fill(self.command[0]), path=environment["PATH"])
        if program is None:
            raise FileNotFoundError("there is no such program")
        program = os.path.abspath(program)  # noqa: PTH100  # not resolved: the link selects a virtual environment
        search_path = environment["PATH"].split(os.pathsep)
        programs = [program, *(os.path.join(path, name) for path in search_path for name in _INTERPRETERS)]  # noqa: PTH118
        files = {file for each in programs for file in _files_that_run(each, environment["PATH"])}
        of_program = _with_libraries({str(Path(file).parent) for file in files})
        of_path = _with_libraries({*search_path} - {""}, has_home=False)
        request: dict[str, Any] = {"command": [program, *map(fill, self.command[1:])], "environment": environment}
        request |= {"template": template, "files": {"task.txt": task}, "stdin": "" if names_task else task}
        request |= {"port": urlsplit(base_url).port, "layers": ["namespaces", "private_user", "landlock"]}
        request["layers"] += ["cgroup"] if self.limits.memory_mib else []
        request |= {"folder": folder, "readable": [*_READABLE, *of_path], "unprotected": True, "network": self.network}
        request["own_readable"] = [*filter(os.path.exists, map(os.path.expanduser, self.readable))]
        request["needed"] = [program, *of_program, *request["own_readable"]]
        timeout_s = timeout_of(prompt, self.timeout_s)
        return request | {"limits": self.limits.of_program(timeout_s + 10)}  # the caller's deadline expires first


def hide_secrets(output: str, names: Mapping[str, str]) -> str:
    """Replaces the secrets in a program's output with their names."""
    matches_nothing = "(?!)"
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or matches_nothing)
    if len(output.encode(errors="replace")) >= _LIMITS["output_kib"] << 10:
        # The output was cut and may start inside a secret, so drop the length of the longest secret.
        longest = max(map(len, map(os.fsencode, names)), default=0)
        ends = [match.end() for match in pattern.finditer(output) if match.start() < longest]
        output = output[max([longest, *ends]) :]
    return pattern.sub(lambda match: names[match[0]], output)


def _filled(text: str, values: Mapping[str, object]) -> str:  # leaves other braces unchanged
    return re.sub(r"\{(\w+)\}", lambda match: str(values.get(match[1], match[0])), text)


def row_folder(setting: str, path: str | None, values: Mapping[str, object]) -> str | None:
    """Fills a path's `{name}`s with a row's columns; raises OSError unless it is a folder below the fixed part."""
    folder = path and _filled(path, values)
    expansion = f"{setting}={path!r} expands to {folder!r}"
    if folder is not None and not Path(folder).is_dir():
        raise NotADirectoryError(f"{expansion}, which is not a folder")
    fixed, brace, _ = (path or "").partition("{")  # `fixed`: the text before the first placeholder
    if brace and Path(f"{fixed}_").parent.resolve() not in Path(str(folder)).resolve().parents:
        raise PermissionError(f"{expansion}, which is outside {str(Path(f'{fixed}_').parent)!r}")
    return folder


def timeout_of(prompt: Prompt, timeout_s: float) -> float:
    """Returns the row's deadline, by default `timeout_s`; raises RolloutError if the row's deadline is invalid."""
    value = prompt.fields.get("agent_timeout_s", timeout_s)
    if (number := finite_number(value)) is None or number <= 0:
        text = f"The agent_timeout_s column of prompt {prompt.id!r} must be a finite number above 0, got {value!r:.80}."
        raise RolloutError(text)
    return number


def _files_that_run(program: str, search_path: str) -> list[str]:
    """Returns the files behind a program: itself, its symlinks' targets, and its interpreter with its targets."""
    files: list[str] = []
    waiting = [program, os.path.realpath(program)]
    while waiting:
        file = waiting.pop()
        if file in files or not Path(file).is_file():
            continue
        files.append(file)
        if Path(file).is_symlink():
            waiting.append(os.path.normpath(Path(file).parent.resolve() / Path(file).readlink()))
        else:
            waiting += _interpreters(file, search_path)
        settings = Path(file).parent.parent / "pyvenv.cfg"  # names the Python of a virtual environment without links
        if settings.is_file() and (home := re.search(r"^home *= *(.+)$", settings.read_text(errors="replace"), re.M)):
            waiting.append(f"{home[1].strip()}/python3")
    return files


def _interpreters(file: str, search_path: str) -> list[str]:
    """Returns the programs named in a script's first lines."""
    try:
        with Path(file).open("rb") as script:
            start = os.fsdecode(script.read(4096))
    except OSError:
        return []
    if not start.startswith("#!"):
        return []
    first, *words = start[2:].partition("\n")[0].split() or [""]
    found = [first]
    if Path(first).name == "env":
        name = next((word for word in words if not word.startswith("-") and "=" not in word), "")
        found.append(shutil.which(name, path=search_path) or "")
    # If the interpreter's path is long or contains a space, scripts that pip installs name it on their second line.
    if long := re.search(r"^'''exec' (?:\"([^\"]+)\"|(\S+))", start, re.MULTILINE):
        found.append(long[1] or long[2])
    return found


def _with_libraries(folders: set[str], *, has_home: bool = True) -> set[str]:
    """Adds the targets of links, and the parent of each `bin`, which contains the program's libraries.

    Adds only the `lib` of a parent like `~/.local`, which may contain keys. Without `has_home`, adds none in the home.
    """
    homes = {Path.home(), Path.home().resolve()}
    paths = {each for folder in map(Path, folders) for each in (folder, folder.resolve())}
    for folder in [at for at in paths if at.name in ("bin", ".bin") and (has_home or homes.isdisjoint(at.parents))]:
        above = folder.parent
        has_keys = above.parent in homes and above.name.startswith(".") and not (above / "pyvenv.cfg").exists()
        paths.add(above / "lib" if has_keys else above)
    return set(map(str, paths - {Path(), Path("/"), *homes}))


def check_command(
    command: Sequence[str] | None,
    template: str | None,
    environment: Mapping[str, str],
    readable: Sequence[str],
    network: str | Sequence[str],
) -> None:
    """Raises ValueError if a setting cannot work; program names, and templates with {fields}, are checked later."""
    words = [] if command is None or isinstance(command, str) else command[:1]
    if command is not None and not any("{" in word or shutil.which(word) for word in words):
        raise ValueError(f"command must be a list that starts with a program's path or name on PATH, got {command!r}.")
    if template is not None and "{" not in template and not Path(template).is_dir():
        raise ValueError(f"workspace_template={template!r} must be a folder. Create it, or leave the setting out.")
    for word in command or ():
        if _SECRET.search(word):
            raise ValueError(f"command has {word!r}, but other users can see it. Pass it in environment instead.")
    for name, value in environment.items():
        for secret in _SECRET.findall(value):
            if secret not in os.environ:
                raise ValueError(f"environment has {name}: {value!r}, but {secret} is not set. Export it first.")
    for path in readable:
        real = os.path.realpath(os.path.expanduser(path))  # noqa: PTH111
        if not os.path.exists(real) or real in _TOO_MUCH:  # noqa: PTH110
            raise ValueError(f"readable must name existing files or folders, not system folders, got {path!r}.")
        if f"{Path.home().resolve()}/".startswith(f"{real}/"):
            raise ValueError(f"readable has {path!r}, which exposes your home folder. Name only what agents need.")
    if isinstance(network, str):
        check_choice(("none", "allow", "a list of hosts"), network=network)
    for host in () if isinstance(network, str) else network:
        try:
            split_host(host)
        except ValueError as error:
            raise ValueError(f"network must be none, allow or a list of hosts: {error}.") from error


def delete_workspace(workspace: str | None) -> None:
    """Deletes an agent's folder in a thread, as it may be large; ignores other folders, which a recording may name."""
    if workspace is None:
        return
    folder = Path(workspace).parent
    root = folder.parent.resolve()
    is_ours = root.name.startswith(_PREFIX) and root.parent == Path(tempfile.gettempdir()).resolve()
    if is_ours and Path(workspace).name == "work" and not folder.is_symlink():
        threading.Thread(target=remove_folder, args=(str(folder),), name="lightrl-delete").start()


async def run_under_guard(request: dict[str, Any]) -> dict[str, Any]:
    """Returns the guard's reply or raises OSError; on cancellation, waits until the guard has killed the program."""
    guard = await asyncio.create_subprocess_exec(
        *GUARD_COMMAND, guard_prefix(), stdin=PIPE, stdout=PIPE, limit=1 << 22, start_new_session=True
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
