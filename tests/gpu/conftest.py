"""Tests on a GPU; LIGHTRL_GPU_DEVICE=pretended runs most without one, cpu those for the CPU. Else they are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pretended_gpu
import pytest
import torch

for folder in ("engines", "trainer", "weights"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

NAME = os.environ.get("LIGHTRL_GPU_DEVICE") or ("cuda" if torch.cuda.is_available() else "")
if NAME == "pretended":
    pretended_gpu.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of another torch or numpy do not fail a test
        if not NAME:
            item.add_marker(pytest.mark.skip(reason="no GPU; LIGHTRL_GPU_DEVICE=pretended tries it without one"))
        elif skipped_by[NAME] & set(item.fixturenames):
            item.add_marker(pytest.mark.skip(reason=f"cannot run on {NAME}"))


skipped_by = {"cuda": {"only_pretended"}, "pretended": {"not_pretended"}, "cpu": {"only_cuda", "only_pretended"}}


@pytest.fixture
def only_cuda() -> None:
    """Marks what cannot run on the CPU."""


@pytest.fixture
def only_pretended() -> None:
    """Marks what would only take time on a real GPU."""


@pytest.fixture
def not_pretended() -> None:
    """Marks what needs a device's memory, saves a checkpoint or starts a process."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    """With float32 products in float32: TF32 would hide errors of its own size."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.device("cpu") if NAME == "cpu" else torch.device("cuda", 0)
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def no_waits() -> AbstractContextManager[None]:
    """A context in which an operation that makes the host wait for the device raises."""

    @contextmanager
    def raising() -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")  # warns once that it is a prototype
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return raising()


@pytest.fixture
def accelerator() -> str:
    """Lightning's name of the device."""
    return "cpu" if NAME == "cpu" else "gpu"
