"""A fresh interpreter that imports what this one does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

# Several processes with a thread for each core would slow each other down.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def import_path(*first: str) -> list[str]:
    """The folders of this process's import path, after those that come first."""
    return [str(Path(entry).absolute()) for entry in (*first, *sys.path)]  # "" is the working folder


def command(module: str, argument: str, paths: Sequence[str]) -> list[str]:
    """Runs the `main` of a module, with `sys.argv[1]` this argument, and these paths to import from."""
    code = f"import sys; sys.path[:] = sys.argv[2:]; from {module} import main; main()"
    return [sys.executable, "-c", code, argument, *paths]
