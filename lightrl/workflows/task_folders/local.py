"""LocalRuntime: runs tasks in this machine's sandbox, if their environments consist of files.

The Dockerfile's image is not used: programs see this machine's files, plus the environment's folders at /. COPY, ADD of
files, ENV and WORKDIR work as in Docker; RUN is executed as an agent would be, without a network, so it can only change
the environment's folders. A step that installs packages passes if this machine has them.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import AgentCommand, AgentFailed, AgentLimits, AgentResult, run_under_guard
from lightrl.workflows.task_folders.folder import HEREDOC, TaskFolder
from lightrl.workflows.task_folders.runtime import (
    NO_ENDPOINT,
    Json,
    Machine,
    Runtime,
    cache_folder,
    paths_in,
    variables_of,
)

_UNUSED = ["LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "USER", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "VOLUME"]
_CONTEXT = ".build-context"
_PACKAGES = "/var/lib/dpkg"  # the list of installed packages
_OF_BUILD = ("tmp", "var")  # a build may write to these folders, but the environment does not keep them
# Precedes each script. `apt-get install` succeeds for packages that this machine's dpkg lists.
_FUNCTIONS = """set -e
copy() {
  local to="${@: -1}" from; set -- "${@:1:$#-1}"
  if [ $# -gt 1 ] || [ "${to%/}" != "$to" ]; then mkdir -p "$to"; else mkdir -p "$(dirname "$to")"; fi
  for from in "$@"; do
    if [ -d "$from" ]; then mkdir -p "$to"; cp -a "$from/." "$to/"; else cp -a "$from" "$to"; fi
  done
}
apt-get() {
  local word; for word in "$@"; do case $word in
    update|upgrade|clean|autoremove) return 0 ;; -*|install) ;; *) dpkg -s "${word%%=*}" >/dev/null || return 1 ;;
  esac; done
}
apt() { apt-get "$@"; }
export -f apt-get apt
export PIP_NO_INDEX=1 PIP_DISABLE_PIP_VERSION_CHECK=1 DEBIAN_FRONTEND=noninteractive
"""


class LocalRuntime(Runtime):
    """Runs programs in namespaces on this machine; see the module's docstring."""

    def missing(self) -> str | None:
        return None if sys.platform == "linux" else "this system has no namespaces. Use docker."

    def problem(self, task: TaskFolder) -> str | None:
        if not task.steps:
            return f"it needs the image {task.image}"
        for word, rest in task.steps:
            if not rest:
                return f"its Dockerfile's {word} has no arguments"
            if word not in (*_UNUSED, "FROM", "WORKDIR", "COPY", "ADD", "ENV", "ARG", "RUN"):
                return f"its Dockerfile has {word}"
            is_copy = word in ("COPY", "ADD")
            if (is_copy and ("://" in rest or "--from" in rest)) or ((is_copy or word == "WORKDIR") and "$" in rest):
                return f"its Dockerfile has {word} {rest:.60}"
            if (is_copy or word == "RUN") and HEREDOC.search(rest):
                return f"its Dockerfile has a heredoc, {word} {rest:.60}"
            if is_copy and len(_words(rest)) < 2:
                return f"its Dockerfile has {word} {rest:.60}, which has no target"
        if [word for word, _ in task.steps].count("FROM") > 1:
            return "its Dockerfile has several stages"
        if task.workdir.split("/")[1] in _OF_BUILD:
            return "its working directory is below /tmp or /var"
        for top in (*_tops(task), "logs", "tests", "solution"):
            if Path("/", top).exists() or Path("/", top).is_symlink():
                return f"its environment has /{top}, which also exists on this machine"
        return None

    def build(self, task: TaskFolder) -> str:
        target = cache_folder() / task.digest
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            work = _built(task)
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                for top in _tops(task):
                    shutil.copytree(f"{work}/{top}", f"{folder}/new/{top}", symlinks=True)
                variables = Path(work, "logs", "environment").read_bytes().split(b"\0")
                pairs = dict(os.fsdecode(each).split("=", 1) for each in variables if b"=" in each)
                names = {name for word, rest in task.steps if word == "ENV" for name in _names(rest)}
                of_agents = {name: pairs[name] for name in names if name in pairs}
                Path(folder, "new", "environment.json").write_text(json.dumps(of_agents))
                remove_folder(str(Path(work).parent))
                if not target.is_dir():
                    Path(folder, "new").rename(target)
        return str(target)

    async def run(self, machine: Machine, request: Json) -> Json:
        workdir, image = machine.task.workdir.strip("/"), Path(machine.image)
        sources = {top: image / top for top in _tops(machine.task)}
        with tempfile.TemporaryDirectory() as empty:
            if machine.left is not None:
                await asyncio.to_thread(machine.clean, paths_in(image / workdir))
                top = workdir.partition("/")[0]
                sources[top] = Path(machine.left, top)
                if top != workdir:  # the agent's changes above its working directory do not count
                    sources[top] = Path(empty, "fresh", top)
                    await asyncio.to_thread(_replace_below, sources[top], image, Path(machine.left), workdir)
            Path(empty).chmod(0o755)
            Path(empty, "logs", "verifier").mkdir(parents=True)
            root = [(f"{empty}/logs", "logs"), *((source, path.strip("/")) for source, path in machine.copies)]
            root += [(str(source), top) for top, source in sources.items()]
            of_image = json.loads((image / "environment.json").read_text())
            environment = {**request["environment"], **of_image, **variables_of(request)}
            changes = {"root": root, "cwd": machine.task.workdir, "environment": environment}
            return await run_under_guard({**request, **changes})


def _replace_below(target: Path, image: Path, left: Path, workdir: str) -> None:
    """Copies an environment's folder, but with the agent's version of the working directory below it."""
    shutil.copytree(image / target.name, target, symlinks=True)
    inside = target.parent / workdir
    remove_folder(str(inside))
    try:
        shutil.copytree(left / workdir, inside, symlinks=True)  # also makes the parents
    except RecursionError as error:
        remove_folder(str(target))
        raise OSError(f"{workdir} is nested too deeply to be copied") from error


def _tops(task: TaskFolder) -> list[str]:
    """Returns the names of the environment's own top-level folders."""
    paths = [task.workdir]
    at = "/"
    for word, rest in task.steps:
        if word == "WORKDIR":
            at = os.path.join(at, rest.strip("\"'"))  # noqa: PTH118
            paths.append(at)
        elif word in ("COPY", "ADD"):
            paths.append(os.path.normpath(os.path.join(at, _words(rest)[-1])))  # noqa: PTH118
    tops = [path.strip("/").partition("/")[0] for path in paths]
    return [top for top in dict.fromkeys(tops) if top and top not in _OF_BUILD]


def _words(rest: str) -> list[str]:
    words = [*map(str, json.loads(rest))] if rest.startswith("[") else shlex.split(rest)
    return [word for word in words if not word.startswith("--")]


def _names(rest: str) -> list[str]:
    if "=" not in rest.split()[0]:
        return [rest.split()[0]]
    return [word.partition("=")[0] for word in shlex.split(rest)]


def _script(task: TaskFolder) -> str:
    lines = [_FUNCTIONS]
    for word, rest in task.steps:
        if word == "WORKDIR":
            lines.append(f"mkdir -p {rest}; cd {rest}")
        elif word in ("COPY", "ADD"):
            *sources, target = _words(rest)
            # Globs stay unquoted.
            inside = " ".join(f"/{_CONTEXT}/{source.removeprefix('./').lstrip('/')}" for source in sources)
            lines.append(f"copy {inside} {shlex.quote(target)}")
            is_archive = word == "ADD" and any(".tar" in source or source.endswith(".tgz") for source in sources)
            lines += [f"tar -xf {inside} -C {shlex.quote(target)}"] if is_archive else []
        elif word == "ENV" or (word == "ARG" and "=" in rest):
            name, _, value = rest.partition(" ")
            lines.append(f"export {rest}" if "=" in name else f"export {name}={shlex.quote(value)}")
        elif word == "RUN":
            command = shlex.join(json.loads(rest)) if rest.startswith("[") else rest
            lines.append(
                f"bash -ec {shlex.quote(command)} || {{ echo {shlex.quote(f'RUN {command} failed')}; exit 1; }}"
            )
    lines.append(f"mkdir -p {shlex.quote(task.workdir)}")  # task.toml may name a folder that the Dockerfile does not
    return "\n".join([*lines, "cat /proc/self/environ >/logs/environment"])


def _built(task: TaskFolder) -> str:
    """Builds an environment; returns the build's `work` folder, or raises ValueError with the end of its output."""
    try:
        result = asyncio.run(_build(task))  # in a thread without an event loop
    except RolloutError as error:
        if isinstance(error, AgentFailed) and error.workspace is not None:
            remove_folder(str(Path(error.workspace).parent))
        raise ValueError(f"its environment could not be built: {error}") from error
    assert result.workspace is not None
    return result.workspace


async def _build(task: TaskFolder) -> AgentResult:
    with tempfile.TemporaryDirectory() as empty:
        Path(empty).chmod(0o755)
        Path(empty, "logs").mkdir()
        tops = _tops(task)
        for top in tops:
            Path(empty, top).mkdir()
        root = [(f"{empty}/{top}", top) for top in (*tops, "logs")]
        root.append((str(task.folder.resolve() / "environment"), _CONTEXT))

        async def start(request: Json, _: Prompt) -> Json:
            return await run_under_guard({**request, "root": root, "cwd": "/"})

        timeout_s = task.timeout_s("environment")
        words = ["bash", "-c", _script(task)]
        command = AgentCommand(words, None, {}, [_PACKAGES], "none", AgentLimits(), timeout_s, str, start=start)
        return await command.run(Prompt("build", messages=[]), f"http://127.0.0.1:{NO_ENDPOINT}/v1", "")
