"""How much of the package one iteration of the quickstart enters, and that the README's path through it is the one that
runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from entered_files import entered

import lightrl

ROOT = Path(__file__).parents[1]
PACKAGE = Path(lightrl.__file__).parent
MAX_FILES = 89
MAX_LINES = 23_010  # of whole files

pytestmark = pytest.mark.extra


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files that rank 0 and its reward worker enter in an iteration, in order of first entry."""
    folder = tmp_path_factory.mktemp("iteration")
    (folder / "sitecustomize.py").write_text("import entered_files\n\nentered_files.watch()\n")
    paths = [str(folder), str(Path(__file__).parent), str(ROOT)]
    run = subprocess.run(
        [sys.executable, "tests/iteration_run.py", "examples/quickstart/grpo.yaml", str(folder)],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "ENTERED_FOLDER": str(folder),
            "ENTERED_PACKAGE": str(PACKAGE),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return entered(folder)


def test_an_iteration_enters_few_files(files: list[str]) -> None:
    num_lines = {name: len((PACKAGE / name).read_text().splitlines()) for name in files}
    assert (len(files) <= MAX_FILES, sum(num_lines.values()) <= MAX_LINES) == (True, True), (
        f"{len(files)} files with {sum(num_lines.values())} lines: {num_lines}"
    )


def test_the_readmes_path_is_the_one_that_runs(files: list[str]) -> None:
    text = (ROOT / "README.md").read_text().partition("in this order")[2].partition("[CONTRIBUTING")[0]
    path = re.findall(r"`([\w/]+\.py)`", text)
    assert len(path) > 10
    assert [name for name in files if name in path] == path
