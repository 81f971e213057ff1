"""Builds the Python environment in which SGLang serves on this machine's CPU, once, and prints its python.

    python scripts/sglang_cpu/build.py            build it, or find it built
    python scripts/sglang_cpu/build.py --check    only find it; exit code 1 if it is not there

It lies in `~/.cache/lightrl/sglang-cpu-<hash>` (2.6 GB; another folder instead of `~/.cache/lightrl` by
LIGHTRL_SGLANG_CACHE). The hash is that of the requirements, the plugin beside this file and the Python version, so a
change of them builds anew. `sglang-cpu` beside it points to the newest, where lightrl looks. An environment counts only
once its READY file is there, written last; one without is removed and built again. Of several builders one builds and
the others wait. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
SGLANG = "sglang==0.5.23"
READY = "lightrl-sglang-cpu.json"  # lightrl/engines/servers looks for it too


def cache_folder() -> Path:
    return Path(os.environ.get("LIGHTRL_SGLANG_CACHE") or "~/.cache/lightrl").expanduser()


def environment_folder() -> Path:
    """Where the environment of these requirements is, or would be."""
    sources = [HERE / "requirements.txt", HERE / "pyproject.toml", *sorted((HERE / "lightrl_sglang_cpu").glob("*.py"))]
    text = b"\0".join([SGLANG.encode(), sys.version.split()[0].encode(), *(file.read_bytes() for file in sources)])
    return cache_folder() / f"sglang-cpu-{hashlib.sha256(text).hexdigest()[:12]}"


def built_python() -> Path | None:
    """The python of the environment; None if it is not built, or only half."""
    folder = environment_folder()
    return folder / "bin" / "python" if (folder / READY).is_file() else None


def build() -> Path:
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "sglang-cpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built_python() is None:
            _build_in(folder)
        _point_to(folder)
    return folder / "bin" / "python"


def _build_in(folder: Path) -> None:
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"building {folder} (2.6 GB, a minute or two)")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for arguments in (
        ["--upgrade", "pip", "setuptools", "wheel"],
        ["--requirement", str(HERE / "requirements.txt")],
        ["--no-deps", SGLANG],
        ["--no-deps", "--no-build-isolation", str(HERE)],
    ):
        subprocess.run([*pip, *arguments], check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    check = "import lightrl_sglang_cpu.launch, sglang.launch_server, lightrl_sglang_cpu.platform"
    environment = {**os.environ, "SGLANG_PLATFORM": "lightrl_cpu"}
    subprocess.run([python, "-W", "ignore", "-c", check], check=True, stdout=sys.stderr, env=environment)
    seconds = round(time.monotonic() - started)
    (folder / READY).write_text(json.dumps({"sglang": SGLANG, "build_s": seconds}) + "\n")
    _say(f"built in {seconds} s")


def _point_to(folder: Path) -> None:
    link, new = folder.parent / "sglang-cpu", folder.parent / f".sglang-cpu-{os.getpid()}"
    new.symlink_to(folder.name)
    new.replace(link)


def _say(text: str) -> None:
    sys.stderr.write(f"sglang_cpu: {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the Python environment for SGLang on this machine's CPU.")
    parser.add_argument("--check", action="store_true", help="only find it; exit code 1 if it is not built")
    if parser.parse_args().check:
        python = built_python()
        if python is None:
            _say(f"{environment_folder()} is not built. Build it: {sys.executable} {Path(__file__).resolve()}")
            return 1
    else:
        try:
            python = build()
        except subprocess.CalledProcessError as error:
            _say(f"could not be built: {' '.join(map(str, error.cmd[:6]))} ... ended with exit code {error.returncode}")
            return 1
    sys.stdout.write(f"{python}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
