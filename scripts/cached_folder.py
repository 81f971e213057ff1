"""CachedFolder: a folder below ~/.cache/lightrl that a build script fills once.

Its name ends with a hash of its recipe, so a changed recipe gets a new folder. The file READY is written last; a folder
without it is removed and rebuilt. If several processes build it, one builds and the others wait. Standard library only.
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
    """A folder that is built once.

    Args:
        name: the folder's name before the hash, such as `sglang-cpu`.
        recipe: everything that determines the folder's content.
        variable: the environment variable that replaces ~/.cache/lightrl.
        cost: space and time of a build, as text.
        ready: name of the READY file.
        result: the path, below the folder, that `build` returns and the script prints.
    """

    name: str
    recipe: bytes
    variable: str
    cost: str
    ready: str
    result: str = "bin/python"

    def path(self) -> Path:
        """Returns the folder's path, built or not."""
        cache = Path(os.environ.get(self.variable) or "~/.cache/lightrl").expanduser()
        return cache / f"{self.name}-{hashlib.sha256(self.recipe).hexdigest()[:12]}"

    def find(self) -> Path | None:
        """Returns the result, or None if the folder is missing or incomplete."""
        folder = self.path()
        return folder / self.result if (folder / self.ready).is_file() else None

    def build(self, fill: Callable[[Path], object], *, has_link: bool = False) -> Path:
        """Calls `fill` if necessary and returns the result; with `has_link`, also links `name` to the folder."""
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
        """Builds or finds the folder and prints the result; returns the script's exit code."""
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
    """Returns a build script's argument parser, which has --check."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--check", action="store_true", help="only find it; exit code 1 if it is not built")
    return parser


def new_environment(folder: Path) -> Path:
    """Creates a Python environment and returns its interpreter."""
    venv.create(folder, with_pip=True, symlinks=True)  # a copied python may not find its shared libraries
    return folder / "bin" / "python"


def pip_install(python: Path | str, *arguments: str, timeout_s: float = 3600.0) -> None:
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*pip, *arguments], timeout_s=timeout_s)


def run(
    command: Sequence[str], *, timeout_s: float, cwd: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    """Runs a command with its output on stderr; raises CalledProcessError, or kills it and raises TimeoutExpired."""
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
        except BaseException:  # Ctrl-C does not reach the command's session
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if status != 0:
        raise subprocess.CalledProcessError(status, list(command))


def _start(command: Sequence[str]) -> str:
    return f"{' '.join(map(str, command[:6]))} ..."
