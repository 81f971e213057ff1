"""Asynchronous copies to a device, which keep the original so that the host can read values without waiting.

To read a number from a GPU, the host waits until the GPU has finished all queued work, and then the GPU is idle. The
host therefore reads the lengths and masks that it needs from the host tensor that was copied.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor from host memory to the device without waiting; `on_host` returns the original."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return remember(source.to(device, non_blocking=True), source)


def on_device(values: Any, device: torch.device) -> Tensor:
    """Copies numbers from the host into a tensor on the device, without waiting for the copy."""
    return to_device(torch.tensor(values), device)


def on_host(tensor: Tensor) -> Tensor:
    """Returns the original of a `to_device` copy if neither has changed since; otherwise copies it back and waits."""
    if tensor.device.type == "cpu":
        return tensor
    source, source_version, version = getattr(tensor, "host_copy", (None, 0, 0))
    if source is None or source._version != source_version or tensor._version != version:
        return tensor.cpu()
    return source  # type: ignore[no-any-return]


def remember(tensor: Tensor, source: Tensor) -> Tensor:
    """Makes `on_host(tensor)` return `source`, which has the same values on the host; ignores inference tensors."""
    if not (tensor.is_inference() or source.is_inference()):  # without a version counter, changes go unnoticed
        device_copy: Any = tensor
        device_copy.host_copy = (source, source._version, tensor._version)
    return tensor
