"""CachedFolder: a folder below ~/.cache/lightrl that a script of the folders beside this file fills once.

Its name ends with the hash of its recipe, so a change of that builds anew. It counts only once its READY file is there,
written last; one without is removed and built again. Of several builders one builds and the others wait. Standard
library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PYTHON_VERSION = sys.version.split()[0].encode()


@dataclass(frozen=True)
class CachedFolder:
    """One folder.

    Args:
        name: what comes before the hash, such as `sglang-cpu`.
        recipe: what its content follows from.
        variable: the environment variable that names another folder than ~/.cache/lightrl.
        cost: space and time of a build, for people.
        ready: name of the READY file.
        result: path below it that is printed.
    """

    name: str
    recipe: bytes
    variable: str
    cost: str
    ready: str
    result: str = "bin/python"

    def path(self) -> Path:
        """Where it is, or would be."""
        cache = Path(os.environ.get(self.variable) or "~/.cache/lightrl").expanduser()
        return cache / f"{self.name}-{hashlib.sha256(self.recipe).hexdigest()[:12]}"

    def find(self) -> Path | None:
        """The result; None if it is not built, or only half."""
        folder = self.path()
        return folder / self.result if (folder / self.ready).is_file() else None

    def build(self, fill: Callable[[Path], object], *, has_link: bool = False) -> Path:
        """The result, which `fill` makes if it is not built; with `has_link`, `name` beside the folder points to it."""
        folder = self.path()
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (folder.parent / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if self.find() is None:
                started = time.monotonic()
                shutil.rmtree(folder, ignore_errors=True)
                self.say(f"building {folder} ({self.cost})")
                fill(folder)
                seconds = round(time.monotonic() - started)
                (folder / self.ready).write_text(json.dumps({"build_s": seconds}) + "\n")
                self.say(f"built in {seconds} s")
            if has_link:
                new = folder.parent / f".{self.name}-{os.getpid()}"
                new.symlink_to(folder.name)
                new.replace(folder.parent / self.name)
        return folder / self.result

    def say(self, text: str) -> None:
        sys.stderr.write(f"{self.name}: {text}\n")

    def main(self, build: Callable[[], Path], *, only_find: bool) -> int:
        """Prints the result; returns the exit code of the script."""
        try:
            result = self.find() if only_find else build()
        except subprocess.CalledProcessError as error:
            self.say(f"could not be built: {_start(error.cmd)} ended with exit code {error.returncode}")
            return 1
        except subprocess.TimeoutExpired as error:
            problem = f"{_start(error.cmd)} did not end within {error.timeout:g} s. Check the network, and try again"
            self.say(f"could not be built: {problem}")
            return 1
        except OSError as error:
            self.say(f"could not be built: {error}")
            return 1
        if result is None:
            arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
            command = shlex.join([sys.executable, str(Path(sys.argv[0]).resolve()), *arguments])
            self.say(f"{self.path()} is not built. Build it: {command}")
            return 1
        sys.stdout.write(f"{result}\n")
        return 0


def argument_parser(description: str) -> argparse.ArgumentParser:
    """The parser of a build script, with --check."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only find it; exit code 1 if it is not built")
    return parser


def new_environment(folder: Path) -> Path:
    """Makes a Python environment; returns its python."""
    venv.create(folder, with_pip=True, symlinks=True)  # a copy of python would hide whose libraries it needs
    return folder / "bin" / "python"


def pip_install(python: Path | str, *arguments: str, timeout_s: float = 3600.0) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, *arguments], timeout_s=timeout_s)


def run(
    command: Sequence[str], *, timeout_s: float, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    """Runs a command whose output is for people; raises CalledProcessError, or kills all and raises TimeoutExpired."""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    ) as process:
        try:
            status = process.wait(timeout_s)
        except BaseException:  # Ctrl-C does not reach another session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if status != 0:
        raise subprocess.CalledProcessError(status, list(command))


def _start(command: Sequence[str]) -> str:
    return f"{' '.join(map(str, command[:6]))} ..."
