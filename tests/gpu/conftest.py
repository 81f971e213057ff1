"""Tests on a GPU; LIGHTRL_GPU_DEVICE=cpu runs on the CPU what can run there. Without either they are skipped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

for folder in ("engines", "trainer", "weights"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

NAME = os.environ.get("LIGHTRL_GPU_DEVICE") or ("cuda" if torch.cuda.is_available() else "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.filterwarnings("default"))  # those of another torch or numpy do not fail a test
        if not NAME:
            item.add_marker(pytest.mark.skip(reason="no GPU; LIGHTRL_GPU_DEVICE=cpu tries it on the CPU"))
        elif NAME == "cpu" and "only_cuda" in item.fixturenames:
            item.add_marker(pytest.mark.skip(reason="needs a real GPU"))


@pytest.fixture
def only_cuda() -> None:
    """Marks what cannot run on the CPU."""


@pytest.fixture
def device() -> Iterator[torch.device]:
    """With float32 products in float32: TF32 would hide errors of its own size."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield torch.device("cuda", 0) if NAME == "cuda" else torch.device(NAME)
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def accelerator() -> str:
    """Lightning's name of the device."""
    return "gpu" if NAME == "cuda" else NAME
