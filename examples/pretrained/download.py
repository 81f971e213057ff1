"""Downloads an archive from a package index; pip checks the archive's hash before opening it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def download(requirement: str, folder: Path, *options: str) -> Path:
    """Downloads the archive of one requirement into a folder; returns the archive's path.

    Args:
        requirement: a line of a requirements file, `<name>==<version> --hash=sha256:<hash>`.
        options: more options of `pip download`.

    Raises:
        SystemExit: if pip cannot download the archive, or its hash differs.
    """
    name, archives = requirement.split()[0], folder / "archives"
    requirements = folder / "requirements.txt"
    requirements.write_text(requirement)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", *options]
    try:
        subprocess.run([*command, "-r", str(requirements), "-d", str(archives)], check=True, timeout=1800)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise SystemExit(
            f"pip could not download {name}: {error}. Check that pip reaches its index, and that the index has the "
            "archive with this hash."
        ) from None
    (archive,) = archives.iterdir()
    return archive
