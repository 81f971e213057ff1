"""Copies between host and device that the host does not wait for: it remembers what it sent.

A number that the host reads from a GPU makes it wait until the GPU has done all its work, which then has nothing to do.
So what the host must know of a tensor (lengths, masks) it reads from the copy that the tensor was made of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of a tensor in host memory, without a wait; `on_host` finds the original."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return remember(source.to(device, non_blocking=True), source)


def on_host(tensor: Tensor) -> Tensor:
    """The tensor in host memory: what `to_device` copied, if neither has changed, or a copy that the host waits for."""
    if tensor.device.type == "cpu":
        return tensor
    source, source_version, version = getattr(tensor, "host_copy", (None, 0, 0))
    if source is None or source._version != source_version or tensor._version != version:
        return tensor.cpu()
    return source  # type: ignore[no-any-return]


def remember(tensor: Tensor, source: Tensor) -> Tensor:
    """The tensor on a device, whose values `source` has in host memory; for `on_host`, unless in inference mode."""
    if not (tensor.is_inference() or source.is_inference()):  # these have no versions that would show a change
        made: Any = tensor
        made.host_copy = (source, source._version, tensor._version)
    return tensor
