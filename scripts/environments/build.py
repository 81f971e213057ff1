"""Builds a Python environment for an environment package whose versions cannot be ours, once, and prints its python.

    python scripts/environments/build.py openenv      107 packages, 283 MB
    python scripts/environments/build.py --check openenv    only find it; exit code 1 if it is not there

It lies in `~/.cache/lightrl/<name>-<hash of its requirements and the Python version>` (another folder instead of
`~/.cache/lightrl` by LIGHTRL_ENVIRONMENTS_CACHE). It counts only once its READY file is there, written last; one
without is removed and built again. Of several builders one builds and the others wait. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
READY = "lightrl-ready"


def folder_of(name: str) -> Path:
    """Where the environment is, or would be."""
    text = sys.version.split()[0].encode() + (HERE / f"{name}.txt").read_bytes()
    cache = Path(os.environ.get("LIGHTRL_ENVIRONMENTS_CACHE") or "~/.cache/lightrl").expanduser()
    return cache / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}"


def built_python(name: str) -> Path | None:
    """The python of the environment; None if it is not built, or only half."""
    folder = folder_of(name)
    return folder / "bin" / "python" if (folder / READY).is_file() else None


def build(name: str) -> Path:
    folder = folder_of(name)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built_python(name) is None:
            sys.stderr.write(f"building {folder}, a few minutes\n")
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            requirements = str(HERE / f"{name}.txt")
            subprocess.run(
                [*pip, "--requirement", requirements], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL
            )
            (folder / READY).touch()
    return folder / "bin" / "python"


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds a Python environment for an environment package.")
    parser.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.txt")))
    parser.add_argument("--check", action="store_true", help="only find it; exit code 1 if it is not built")
    options = parser.parse_args()
    try:
        python = built_python(options.name) if options.check else build(options.name)
    except subprocess.CalledProcessError as error:
        sys.stderr.write(f"{options.name} could not be built: pip ended with exit code {error.returncode}.\n")
        return 1
    if python is None:
        sys.stderr.write(f"{folder_of(options.name)} is not built. Build it without --check.\n")
        return 1
    sys.stdout.write(f"{python}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
