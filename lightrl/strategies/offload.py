"""Offload: keeps data in host memory while the device does not need it. Results stay bit-identical."""

from __future__ import annotations

from typing import Any, Literal, get_args
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from lightrl.strategies.ranks.processes import local

# `parameters` includes gradients and the optimizer's state, and makes updates run on the CPU.
Offloadable = Literal["parameters", "optimizer", "activations"]
OFFLOADABLE = get_args(Offloadable)
HOST = torch.device("cpu")


def offload_activations(layer: nn.Module) -> None:
    """Keeps tensors saved for the layer's backward pass, except its parameters, in host memory until that pass.

    Copies run on the device's compute stream, so computation waits for them.
    """
    forward = layer.forward
    # A tensor that several operations save, like the input of q, k and v, is copied once and freed after its last use.
    copies: WeakValueDictionary[Any, _HostCopy] = WeakValueDictionary()

    def pack(tensor: Tensor) -> Tensor | _HostCopy:
        storage = tensor.untyped_storage()
        if any(storage._cdata == local(parameter).untyped_storage()._cdata for parameter in layer.parameters()):
            return tensor  # FSDP2 frees and gathers parameters
        # A weak reference lets the memory be freed, but prevents a new storage at the same address.
        view = tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
        key = StorageWeakRef(storage), tensor._version, view  # type: ignore[no-untyped-call]
        copy = copies.get(key)
        if copy is None:
            copy = copies[key] = _HostCopy(tensor)
        return copy

    def unpack(packed: Tensor | _HostCopy) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed.tensor.to(packed.device, non_blocking=True)

    def offloaded(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    layer.forward = offloaded


class _HostCopy:
    """A copy of a tensor in host memory, with the tensor's device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.to(HOST, non_blocking=True)  # torch uses pinned memory for copies to the host
        self.device = tensor.device


@torch.no_grad()
def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves the optimizer's moments, but not its step counts, to a device or to host memory."""
    sources = set()
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                part = local(value)
                sources.add(part.device)
                moved = part.to(device, non_blocking=True)  # torch uses pinned memory for copies to the host
                if part is value:
                    state[name] = moved
                else:
                    part.data = moved
    for source in sources - {HOST, device}:
        torch.get_device_module(source).synchronize(source)  # because a checkpoint may read the copies immediately
