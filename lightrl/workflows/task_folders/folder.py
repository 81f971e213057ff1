"""TaskFolder: a folder in Harbor's format.

    my-tasks/fix-the-parser/
        instruction.md           the prompt
        task.toml                timeouts, environment variables, limits
        environment/Dockerfile   the machine; or `docker_image` in task.toml
        tests/test.sh            writes /logs/verifier/reward.txt (a number) or reward.json (named numbers)
        solution/solve.sh        used only by scripts/task_folders/solve.py

Source: https://www.harborframework.com/docs/tasks, version 1.2. The `harbor` package is not used: it needs Python 3.12
and 27 packages, among them servers and clients of other services; this module reads three files.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightrl.checks.bounds import finite_number
from lightrl.trajectory import JsonObject

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
HEREDOC = re.compile(r"(?:^|\s)\d*<<-?([\"']?)(\w+)\1(?=\s|$)")


@dataclass(frozen=True)
class TaskFolder:
    """A task folder in Harbor's format; its files are read when a property is used.

    Raises:
        ValueError: from each property, if the file that it reads is missing or has a wrong value.
    """

    folder: Path

    @functools.cached_property
    def config(self) -> JsonObject:
        """The contents of task.toml."""
        try:
            return tomllib.loads((self.folder / "task.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder / 'task.toml'} cannot be read: {error}") from error

    @property
    def instruction(self) -> str:
        try:
            return (self.folder / "instruction.md").read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            raise ValueError(f"{self.folder / 'instruction.md'} cannot be read: {error}") from error

    @functools.cached_property
    def steps(self) -> list[tuple[str, str]]:
        """The Dockerfile's instructions, each with its arguments; [] without a Dockerfile."""
        file = self.folder / "environment" / "Dockerfile"
        if not file.is_file():
            return []
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
        joined = iter(re.sub(r"\\[ \t]*\n", " ", "\n".join(lines)).splitlines())
        steps = []
        for line in filter(str.strip, joined):
            word, rest = (*line.split(None, 1), "")[:2]
            steps.append((word.upper(), rest.strip()))
            for _, end in HEREDOC.findall(rest) if word.upper() in ("RUN", "COPY", "ADD") else ():
                any(text.strip() == end for text in joined)  # skips the lines of the heredoc
        return steps

    @functools.cached_property
    def workdir(self) -> str:
        """The folder where the agent and the tests start; the tests see only the agent's changes below it."""
        by_stage: dict[str, str] = {}
        in_file, stage = "/", ""
        for word, rest in self.steps:
            if word == "FROM":
                names = [name.lower() for name in rest.split() if not name.startswith("--")] or [""]
                in_file, stage = by_stage.get(names[0], "/"), names[-1]
            elif word == "WORKDIR":
                in_file = os.path.join(in_file, rest.strip("\"'"))  # noqa: PTH118
            by_stage[stage] = in_file
        return os.path.normpath(os.path.join("/", self._value("environment", "workdir", str) or in_file))  # noqa: PTH118

    @property
    def image(self) -> str | None:
        """The name of a prebuilt image, which replaces the Dockerfile."""
        name: str | None = self._value("environment", "docker_image", str)
        return name

    @functools.cached_property
    def digest(self) -> str:
        """A hash of the environment's contents."""
        total = hashlib.sha256(repr((self.image, self.workdir)).encode())
        for path in sorted((self.folder / "environment").rglob("*")):
            total.update(f"{path.relative_to(self.folder)} {path.lstat().st_mode}\n".encode(errors="surrogateescape"))
            if path.is_symlink():
                total.update(os.fsencode(path.readlink()))
            elif path.is_file():
                with path.open("rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()[:24]

    @property
    def problem(self) -> str | None:
        """The reason why no runtime can run this task, or None."""
        environment = self._section("environment")
        has = {
            "tests/test.sh is missing": not (self.folder / "tests" / "test.sh").is_file(),
            "it has neither environment/Dockerfile nor docker_image": not (self.steps or self.image),
            "it has several [[steps]]": self.config.get("steps"),
            "it needs several containers": any((self.folder / "environment").glob("*compose.y*ml")),
            "it needs Windows": str(environment.get("os", "linux")).lower() != "linux",
            "it needs GPUs": environment.get("gpus"),
            "it needs MCP servers": environment.get("mcp_servers"),
            "its working directory is /": self.workdir == "/",
            f"its working directory is {self.workdir}. Set environment.workdir in task.toml": "$" in self.workdir,
            f"docker_image={self.image!r} looks like an option": (self.image or "").startswith("-"),
        }
        return next((text for text, value in has.items() if value), None)

    def timeout_s(self, section: Literal["agent", "verifier", "environment"]) -> float:
        """Returns the deadline for an agent, the tests, or a build; the default is 600 s."""
        name = "build_timeout_sec" if section == "environment" else "timeout_sec"
        value = self._value(section, name, (int, float))
        if (number := finite_number(600.0 if value is None else value)) is None or number <= 0:
            raise ValueError(f"{self.folder / 'task.toml'}: {section}.{name} must be above 0, got {value!r}.")
        return number

    def environment(self, section: Literal["environment", "verifier"]) -> dict[str, str]:
        """Returns a section's environment variables; `${NAME}` and `${NAME:-default}` are read from this process."""

        def fill(match: re.Match[str]) -> str:
            value = os.environ.get(match[1], match[2])
            if value is None:
                raise ValueError(f"{self.folder / 'task.toml'} has ${{{match[1]}}}, which is not set. Export it.")
            return value

        return {name: _VARIABLE.sub(fill, str(value)) for name, value in self._section(section, "env").items()}

    @property
    def secrets(self) -> dict[str, str]:
        """Maps values (6 characters or more) of this process's variables that the task uses to their `${NAME}`."""
        texts = [str(text) for part in ("environment", "verifier") for text in self._section(part, "env").values()]
        names = {match[1] for text in texts for match in _VARIABLE.finditer(text)}
        return {os.environ[name]: f"${{{name}}}" for name in names if len(os.environ.get(name, "")) >= 6}

    def limits_mib(self) -> dict[str, int]:
        """Returns the limits on memory and disk that the task sets."""
        values = {name: self._value("environment", f"{name}_mb", int) for name in ("memory", "storage")}
        return {name: value for name, value in values.items() if value}

    def _section(self, *names: str) -> JsonObject:
        section = self.config
        for name in names:
            section = section.get(name, {})
            if not isinstance(section, dict):
                raise ValueError(
                    f"{self.folder / 'task.toml'}: [{'.'.join(names)}] must be a table, got {section!r:.80}."
                )
        return section

    def _value(self, section: str, name: str, kind: type | tuple[type, ...]) -> Any:
        value = self._section(section).get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{self.folder / 'task.toml'}: {section}.{name} has the wrong type: {value!r:.80}.")
        return value


@functools.lru_cache(maxsize=100_000)
def task_of(folder: str) -> TaskFolder:
    return TaskFolder(Path(folder).expanduser())
