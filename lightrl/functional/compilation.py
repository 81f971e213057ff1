"""Whether torch.compile works on a device, found by a trial; the CPU runs everything as it is written."""

from __future__ import annotations

import functools
import logging
import subprocess

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@functools.cache
def can_compile(device_type: str) -> bool:
    """Whether functions and layers are compiled on this device: on NVIDIA GPUs, unless Triton or a compiler is missing.

    TORCH_COMPILE_DISABLE=1, torch's own variable, turns compilation off everywhere.
    """
    if device_type != "cuda":
        return False
    try:
        torch.compile(_trial, dynamic=True)(torch.ones(2, device=device_type))
    except (RuntimeError, ImportError, OSError, subprocess.SubprocessError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        log.warning("torch.compile fails on this GPU: decoder layers and the head run slower, uncompiled (%s)", reason)
        return False
    return True


def _trial(values: Tensor) -> Tensor:
    return values.exp() + 1
