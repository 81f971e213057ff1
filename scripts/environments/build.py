"""Builds, once, a Python environment for a package whose requirements conflict with ours; prints its interpreter.

    python scripts/environments/build.py openenv      107 packages, 283 MB
    python scripts/environments/build.py verifiers    94 packages, 212 MB
    python scripts/environments/build.py --check openenv    exit with code 1 if it is not built

The folder is `~/.cache/lightrl/<name>-<hash of the requirements and the Python version>`; LIGHTRL_ENVIRONMENTS_CACHE
replaces `~/.cache/lightrl`. See scripts/cached_folder.py. Standard library only.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from cached_folder import PYTHON_VERSION, CachedFolder, argument_parser, new_environment, pip_install

HERE = Path(__file__).resolve().parent


def main() -> int:
    arguments = argument_parser("Builds a Python environment for an environment package.")
    arguments.add_argument("name", choices=sorted(path.stem for path in HERE.glob("*.txt")))
    options = arguments.parse_args()
    requirements = HERE / f"{options.name}.txt"
    recipe = PYTHON_VERSION + requirements.read_bytes()
    folder = CachedFolder(
        options.name, recipe, "LIGHTRL_ENVIRONMENTS_CACHE", "0.3 GB, a few minutes", ready="lightrl-ready"
    )

    def fill(path: Path) -> None:
        pip_install(new_environment(path), "--requirement", str(requirements))

    return folder.main(lambda: folder.build(fill), only_find=options.check)


if __name__ == "__main__":
    sys.exit(main())
