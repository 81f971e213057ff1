"""Offload: what waits in host memory while the device does not need it; the values stay the same to the bit."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightrl.strategies.tensor_parallel import local

# `parameters` includes their gradients and the optimizer's state, and updates run on the CPU.
Offloadable = Literal["parameters", "optimizer", "activations"]
OFFLOADABLE = get_args(Offloadable)
HOST = torch.device("cpu")


def offload_activations(layer: nn.Module) -> None:
    """Keep what the layer's backward needs in host memory until then, except for the layer's parameters.

    Copies run on the device's own stream, so the compute waits for them.
    """
    forward = layer.forward

    def pack(tensor: Tensor) -> tuple[Tensor, torch.device]:
        place = tensor.untyped_storage()._cdata
        if any(place == local(parameter).untyped_storage()._cdata for parameter in layer.parameters()):
            return tensor, tensor.device  # FSDP2 frees and gathers its memory
        return tensor.to(HOST, non_blocking=True), tensor.device  # torch takes pinned memory for copies to the host

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1], non_blocking=True)):
            return forward(*args, **kwargs)

    layer.forward = offloaded


@torch.no_grad()
def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Move the optimizer's moments to the device, or to host memory; its counts of steps stay where they are."""
    sources = set()
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                part = local(value)
                sources.add(part.device)
                moved = part.to(device, non_blocking=True)  # torch takes pinned memory for copies to the host
                if part is value:
                    state[name] = moved
                else:
                    part.data = moved
    for source in sources - {HOST, device}:
        torch.get_device_module(source).synchronize(source)  # a checkpoint may read them at once
