"""Builds, once, the Python environment in which SGLang serves on this machine's CPU; prints its interpreter.

    python scripts/sglang_cpu/build.py            build it unless it is built
    python scripts/sglang_cpu/build.py --check    exit with code 1 if it is not built

The folder is `~/.cache/lightrl/sglang-cpu-<hash>` (2.6 GB); LIGHTRL_SGLANG_CACHE replaces `~/.cache/lightrl`. The hash
covers the requirements, the plugin next to this file and the Python version. lightrl uses the link `sglang-cpu` next to
the folder, which points to the latest build. See scripts/cached_folder.py. Standard library only.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cached_folder import PYTHON_VERSION, CachedFolder, argument_parser, new_environment, pip_install, run

HERE = Path(__file__).resolve().parent
SGLANG = "sglang==0.5.23"
SOURCES = [HERE / "requirements.txt", HERE / "pyproject.toml", *sorted((HERE / "lightrl_sglang_cpu").glob("*.py"))]
FOLDER = CachedFolder(
    "sglang-cpu",
    b"\0".join([SGLANG.encode(), PYTHON_VERSION, *(file.read_bytes() for file in SOURCES)]),
    "LIGHTRL_SGLANG_CACHE",
    "2.6 GB, a minute or two",
    ready="lightrl-sglang-cpu.json",  # lightrl/engines/servers looks for it too
)


def build() -> Path:
    return FOLDER.build(_fill, has_link=True)


def _fill(folder: Path) -> None:
    python = new_environment(folder)
    for arguments in (
        ["--upgrade", "pip", "setuptools", "wheel"],
        ["--requirement", str(HERE / "requirements.txt")],
        ["--no-deps", SGLANG],
        ["--no-deps", "--no-build-isolation", str(HERE)],
    ):
        pip_install(python, *arguments)
    check = "import lightrl_sglang_cpu.launch, sglang.launch_server, lightrl_sglang_cpu.platform"
    environment = {**os.environ, "SGLANG_PLATFORM": "lightrl_cpu"}
    run([str(python), "-W", "ignore", "-c", check], timeout_s=600.0, environment=environment)


if __name__ == "__main__":
    options = argument_parser("Builds the Python environment for SGLang on this machine's CPU.").parse_args()
    sys.exit(FOLDER.main(build, only_find=options.check))
