"""Verifier: computes a reward by running a task's tests on the agent's work, in a separate sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import shutil
import stat
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightrl.checks.bounds import finite_number
from lightrl.errors import RolloutError
from lightrl.rewards.sandbox import remove_folder
from lightrl.trajectory import Prompt
from lightrl.workflows.agent_workflow import (
    AgentCommand,
    AgentFailed,
    AgentLimits,
    StartProgram,
    hide_secrets,
    row_folder,
    run_under_guard,
)
from lightrl.workflows.task_folders.folder import task_of
from lightrl.workflows.task_folders.runtime import NO_ENDPOINT, Json, Machine, Runtime, paths_in, runtime_of

log = logging.getLogger(__name__)

_MAX_BYTES = 1 << 24  # maximum size of a reward file or a report
_MAX_METRICS = 100
_NO_URL = f"http://127.0.0.1:{NO_ENDPOINT}/v1"
_OF_TESTS = {"PYTHONDONTWRITEBYTECODE": "1"}
# Files that change how tests run but are not themselves tested: settings and plugins.
_OF_RUNNERS = {"conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg"}
_OF_RUNNERS |= {"pyproject.toml", "sitecustomize.py", "usercustomize.py"}
_KINDS_OF_RUNNERS = (".pth", ".dist-info", ".egg-info", ".egg-link")
# Modules that tests import, and Python's own; `python -m pytest` first searches the folder where it starts.
_LIBRARIES = {"_pytest", "coverage", "exceptiongroup", "hypothesis", "iniconfig", "numpy", "packaging", "pandas"}
_LIBRARIES |= {"pluggy", "py", "pygments", "pytest", "requests", "sitecustomize", "usercustomize", "yaml"}
_LIBRARIES |= sys.stdlib_module_names
_IS_TEST = re.compile(r"test_.*\.py|.*_test\.py")


@dataclass
class Verifier:
    """Runs a row's tests: those in its `task_folder`, or the `verify` command. TaskWorkflow documents the rules.

    The agent's processes have ended. Tests get a copy of the agent's files, but not its variables or home folder.

    Args:
        verify: the command for rows without a task folder.
        template: the `workspace_template` setting, the folder with the original files.
        hidden: files to copy over the agent's files.
        timeout_s: deadline for `verify`.
        readable, network, limits: the agent's settings, which also apply to the tests.
        max_tests: how many tests may run at once; waiting does not count toward their deadlines.
    """

    verify: Sequence[str] | None = None
    _: KW_ONLY
    template: str | None = None
    hidden: str | None = None
    timeout_s: float = 600.0
    readable: Sequence[str] = ()
    network: str | Sequence[str] = "none"
    limits: AgentLimits = field(default_factory=AgentLimits)
    max_tests: int = 64

    def __post_init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tests = self.command(script("/tests/test.sh"), self._start_tests)
        self._verify = self.command(self.verify or ["true"], self._start_verify)

    def command(self, words: Sequence[str], start: StartProgram) -> AgentCommand:
        """Returns a program that does not call the policy, with this verifier's settings."""
        settings = (None, _OF_TESTS, self.readable, self.network, self.limits, self.timeout_s, str)
        return AgentCommand(words, *settings, start=start)

    async def start_agent(self, request: Json, prompt: Prompt, copies: Sequence[tuple[str, str]] = ()) -> Json:
        """Starts an agent in its row's environment, with these folders copied into it."""
        if "task_folder" in prompt.fields:
            machine = await self._machine(prompt, copies=copies, returned=task_of(prompt.fields["task_folder"]).workdir)
            return await self._run(machine, request, prompt)
        if self.verify is None:
            raise RolloutError(
                f"Prompt {prompt.id!r} has no column `task_folder`, and there is no `verify`. Set data.train to a "
                "folder of tasks, or verify to a test command."
            )
        return await run_under_guard(request)

    async def reward(self, prompt: Prompt, workspace: str) -> tuple[float, dict[str, float]]:
        """Returns the reward and the metrics for an agent's work in a folder; may change the folder.

        Raises RolloutError if the tests cannot be started, or the agent replaced its folder with a link.
        """
        if Path(workspace).is_symlink() or not Path(workspace).is_dir():
            raise RolloutError(f"Prompt {prompt.id!r}: the agent replaced its folder with a link or a file.")
        if self._loop is not asyncio.get_running_loop():
            self._loop, self._slots = asyncio.get_running_loop(), asyncio.Semaphore(self.max_tests)
        async with self._slots:
            if "task_folder" in prompt.fields:
                return await self._reward_of_tests(prompt, workspace)
            return await self._reward_of_verify(prompt, workspace)

    async def _machine(self, prompt: Prompt, **settings: Any) -> Machine:
        task = task_of(prompt.fields["task_folder"])
        try:
            image = await asyncio.to_thread(_runtime(prompt).build, task)
        except ValueError as error:
            raise RolloutError(f"Task {task.folder}: {error}.") from error
        return Machine(task, image, **settings)

    async def _run(self, machine: Machine, request: Json, prompt: Prompt) -> Json:
        """Runs a request; variables and limits that the workflow does not set come from the task."""
        limits = dict(request["limits"])
        of_task = machine.task.limits_mib()
        if self.limits.memory_mib is None and "memory" in of_task:
            limits["memory_mib"] = of_task["memory"]
        if self.limits.disk_mib is None and "storage" in of_task:
            limits["file_mib"] = limits["disk_mib"] = of_task["storage"]
        environment = {**machine.task.environment("environment"), **request["environment"]}
        request = {**request, "limits": limits, "environment": environment}
        try:
            reply = await _runtime(prompt).run(machine, request)
        except OSError as error:  # it may quote a command line
            raise OSError(hide_secrets(str(error), machine.task.secrets)) from None
        return {**reply, "secrets": machine.task.secrets}  # AgentCommand hides them together with its own

    async def _start_tests(self, request: Json, prompt: Prompt) -> Json:
        task, left = task_of(prompt.fields["task_folder"]), prompt.fields["agent_workspace"]
        tests = task.folder.resolve() / "tests"

        def clean(before: Collection[str]) -> None:
            remove_misleading(Path(left, task.workdir.strip("/")), before, tests, task.instruction)

        copies = [(str(tests), "/tests")]
        machine = await self._machine(prompt, copies=copies, left=left, clean=clean, returned="/logs/verifier")
        environment = {**request["environment"], **task.environment("verifier")}
        request = {**_within_timeout(request, prompt), "environment": environment}
        return _within_limits(await self._run(machine, request, prompt))

    async def _start_verify(self, request: Json, prompt: Prompt) -> Json:
        request = {**_within_timeout(request, prompt), "template": prompt.fields["agent_workspace"]}
        return _within_limits(await run_under_guard(request))

    async def _finish(self, tests: AgentCommand, prompt: Prompt, workspace: str, timeout_s: float) -> tuple[Any, Any]:
        """Runs tests on the agent's work; returns their result, and the reason if they failed, otherwise None."""
        fields = {**prompt.fields, "agent_workspace": workspace, "agent_timeout_s": timeout_s}
        try:
            return await tests.run(replace(prompt, fields=fields), _NO_URL, ""), None
        except AgentFailed as error:
            return error.result, str(error)

    async def _reward_of_tests(self, prompt: Prompt, workspace: str) -> tuple[float, dict[str, float]]:
        task = task_of(prompt.fields["task_folder"])
        folder = Path(workspace).resolve() / task.workdir.strip("/")
        if not folder.is_dir() or folder.resolve() != folder:  # the agent removed it, or replaced it with a link
            return 0.0, {"tests_without_reward": 1.0}
        result, problem = await self._finish(self._tests, prompt, workspace, task.timeout_s("verifier"))
        if result.workspace is None:
            return 0.0, {"tests_without_reward": 1.0}
        try:
            reward, metrics = reward_in(Path(result.workspace, "logs", "verifier"))
            return reward, {**metrics, "tests_without_reward": 0.0}
        except (OSError, ValueError, RecursionError) as error:
            text = "The tests of %s wrote no valid reward, so the reward is 0: %s. %s"
            log.warning(text, task.folder, error, problem or f"They printed {result.output[-300:]!r}.")
            return 0.0, {"tests_without_reward": 1.0}
        finally:
            _delete(result.workspace)

    async def _reward_of_verify(self, prompt: Prompt, workspace: str) -> tuple[float, dict[str, float]]:
        template = row_folder("workspace_template", self.template, prompt.fields)
        try:
            hidden = row_folder("hidden", self.hidden, prompt.fields)
        except OSError as error:
            raise RolloutError(f"Prompt {prompt.id!r}: {error}.") from error
        await asyncio.to_thread(restore_runners, Path(workspace), Path(template) if template else None)
        if hidden is not None:
            await asyncio.to_thread(overlay, Path(hidden), Path(workspace))
        tests, is_pytest = self._verify, any(Path(word).name in ("pytest", "py.test") for word in self.verify or ())
        if is_pytest:
            tests = replace(tests, command=[*tests.command, "--junitxml={tmp}/report.xml"])
        result, problem = await self._finish(tests, prompt, workspace, self.timeout_s)
        self._verify.layers = tests.layers  # `tests` may be a copy; layers are logged once
        if not is_pytest:
            _delete(result.workspace)
            return float(problem is None), {}
        passed, total = 0, 0
        if result.workspace is not None:
            with contextlib.suppress(OSError, ValueError, ElementTree.ParseError):
                passed, total = passed_in(_read_small(Path(result.workspace).parent / "tmp" / "report.xml"))
            _delete(result.workspace)
        return float(problem is None and passed > 0), {"tests_passed_fraction": passed / max(total, 1)}


def _runtime(prompt: Prompt) -> Runtime:
    return runtime_of(prompt.fields.get("runtime", "local"))


def _within_timeout(request: Json, prompt: Prompt) -> Json:
    return {**request, "limits": {**request["limits"], "wall_s": prompt.fields["agent_timeout_s"]}}


def _within_limits(reply: Json) -> Json:
    """Returns a reply; raises AgentFailed if a limit ended the tests, which then give no reward."""
    if reply["stopped_by"] is not None:
        raise AgentFailed(f"The tests were stopped by their {reply['stopped_by']} limit.")
    return reply


def script(path: str) -> list[str]:
    """Returns a command that runs a task's script, even if the file is not executable."""
    return ["sh", "-c", f"chmod +x {path}; exec {path}"]


def reward_in(folder: Path) -> tuple[float, dict[str, float]]:
    """Returns the reward and the metrics that tests wrote to `reward.json` or `reward.txt` in a folder.

    Raises:
        OSError: if neither file exists.
        ValueError: if both exist, or one contains anything but finite numbers.
    """
    if (folder / "reward.json").exists():
        if (folder / "reward.txt").exists():  # the agent's code, which the tests ran, may have written one
            raise ValueError("there are both reward.txt and reward.json")
        values = json.loads(_read_small(folder / "reward.json"))
        values = values if isinstance(values, dict) else {"reward": values}
        numbers = {name: _number(value, "reward.json") for name, value in values.items()}
        if not 0 < len(numbers) <= _MAX_METRICS:
            raise ValueError(f"reward.json must have 1 to {_MAX_METRICS} numbers, got {len(numbers)}")
        reward = numbers.pop("reward", None)
        return sum(numbers.values()) / len(numbers) if reward is None else reward, numbers
    return _number(_read_small(folder / "reward.txt").decode().strip(), "reward.txt"), {}


def _number(value: object, file: str) -> float:
    with contextlib.suppress(ValueError):
        value = float(value) if isinstance(value, str) and file == "reward.txt" else value
    number = finite_number(float(value) if isinstance(value, bool) else value)
    if number is None:
        raise ValueError(f"{file} has a value that is not a finite number")  # quoting the value could reveal a secret
    return number


def _read_small(path: Path) -> bytes:
    """Reads a file that an untrusted program may have made; does not follow links."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"{path.name} has more than {_MAX_BYTES} bytes")
    return data


def passed_in(report: bytes) -> tuple[int, int]:
    """Returns how many tests in a JUnit report passed, and how many ran; skipped tests do not count."""
    if b"<!DOCTYPE" in report:
        raise ValueError("a report must not declare entities")
    cases = [case for case in ElementTree.fromstring(report).iter("testcase") if case.find("skipped") is None]
    return sum(case.find("failure") is None and case.find("error") is None for case in cases), len(cases)


def restore_runners(folder: Path, template: Path | None) -> None:
    """Undoes an agent's changes to the files that control a test runner."""
    before = set() if template is None else paths_in(template)
    remove_misleading(folder, before)
    for name in before:
        if template is not None and _controls_tests(name) and (template / name).is_file():
            shutil.copy2(template / name, _cleared(folder, Path(name)), follow_symlinks=False)


def remove_misleading(folder: Path, before: Collection[str], tests: Path | None = None, text: str = "") -> None:
    """Removes new files from an untrusted folder if they change how tests run but are not themselves tested.

    These are settings and plugins for a test runner, and modules that Python would import instead of a library, because
    they are next to tests or where tests start. Compiled modules are also removed: they can differ from the source.

    Args:
        folder: where tests start.
        before: the paths that the folder had before the agent ran.
        tests: a folder of tests, whose packages count as libraries.
        text: the instruction; a file that it names, or a folder that it names with a `/`, is part of the work.
    """
    packages = {path.parent for path in tests.rglob("__init__.py")} - {tests} if tests is not None else set()
    libraries = _LIBRARIES | {path.name for path in packages if path.parent not in packages}

    def hides(path: Path) -> bool:
        is_module = path.suffix in (".py", ".pyc", ".so") or path.is_symlink() or any(path.glob("__init__.*"))
        return is_module and path.name.partition(".")[0] in libraries

    def is_named(path: Path) -> bool:
        end = "/" if path.is_dir() else r"(?!\w)"
        return re.search(rf"(?<![\w.-]){re.escape(path.name)}{end}", text) is not None

    removed = []
    for at, folders, files in os.walk(folder):
        has_tests = at == str(folder) or any(map(_IS_TEST.fullmatch, files))
        for path in [Path(at, name) for name in (*folders, *files)]:
            if path.name == "__pycache__":
                removed.append(path)
            elif _controls_tests(path.name) or (has_tests and hides(path)):
                is_new = str(path.relative_to(folder)) not in before
                removed += [path] if is_new and not is_named(path) else []
    for path in removed:
        _remove(path)


def _controls_tests(path: str) -> bool:
    return Path(path).name in _OF_RUNNERS or path.endswith(_KINDS_OF_RUNNERS)


def overlay(source: Path, target: Path) -> None:
    """Copies a folder's files over an untrusted folder; links there are replaced, not followed."""
    for path, _, names in os.walk(source):
        for name in names:
            file = Path(path, name)
            shutil.copy2(file, _cleared(target, file.relative_to(source)))


def _cleared(folder: Path, relative: Path) -> Path:
    """Makes the parents of a path in an untrusted folder, removes anything at the path, and returns the path."""
    for part in reversed(relative.parents[:-1]):
        if (folder / part).is_symlink() or not (folder / part).is_dir():
            _remove(folder / part)
            (folder / part).mkdir()
    _remove(folder / relative)
    return folder / relative


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        remove_folder(str(path))
    else:
        path.unlink(missing_ok=True)


def _delete(workspace: str | None) -> None:
    if workspace is not None:
        remove_folder(str(Path(workspace).parent))
