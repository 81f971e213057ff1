"""The tests of tests/gpu pass on a GPU in Python; see pretended_gpu.py for what that shows."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import forked
import pytest

GPU_TESTS = Path(__file__).with_name("gpu")
_QUIET = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]  # in a fork


@pytest.mark.extra
@pytest.mark.parametrize("name", sorted(file.name for file in GPU_TESTS.glob("test_*.py")))
def test_gpu_tests_pass(name: str) -> None:
    done = forked.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", *_QUIET, str(GPU_TESTS / name)],
        env={**os.environ, "LIGHTRL_GPU_DEVICE": "pretended"},
        cwd=GPU_TESTS.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
