"""Offload: keeps data in host memory while the device does not need it. Results stay bit-identical."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, get_args
from weakref import WeakSet, WeakValueDictionary

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


def move_state(optimizer: Optimizer, device: torch.device) -> None:
    """Moves the optimizer's moments, but not its step counts, to a device or to host memory, and waits."""
    devices = {parameter.device for parameter in optimizer.state}
    for each in devices:  # StateCopies may be copying
        torch.get_device_module(each).synchronize(each)
    _renew(optimizer.state.values(), device, lambda part: part.to(device, non_blocking=True))  # pinned in host memory
    for each in devices:  # a checkpoint may read the copies immediately
        torch.get_device_module(each).synchronize(each)


@torch.no_grad()
def _renew(states: Iterable[dict[str, Any]], device: torch.device, copy: Callable[[Tensor], Tensor]) -> None:
    """Replaces this rank's part of each moment by its copy, unless it is on the device already."""
    for value in (value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()):
        part = local(value)
        if part.device.type != device.type:
            part.data = copy(part)


class StateCopies:
    """Copies moments between pinned host memory and a device, on a stream of its own, while the device computes.

    They come as a backward pass frees activations, and leave as a forward pass saves them. The host does not wait for
    the copies: before you read the state, call `optimizer.state_dict()` or `move_state`, which wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._api: Any = torch.get_device_module(device)
        self._stream = self._api.Stream(device)
        self.left: list[Any] = []  # an event after each copy to the host
        self._hosts: dict[int, Tensor] = {}  # during a step: id of a moment on the device → its pinned memory
        self._optimizers = WeakSet[Optimizer]()

    @contextlib.contextmanager
    def during_step(self, optimizer: Optimizer, model: Any) -> Iterator[Callable[[], None]]:
        """In the last backward pass of an FSDP2Model, each reduced gradient brings some; the yielded function, all."""
        compute = self._api.current_stream(self.device)
        states = list(optimizer.state.values())

        def to_device(part: Tensor) -> Tensor:
            self._hosts[id(part)] = part.data  # kept: freed pinned memory would not be reused before the copy ends
            with self._api.stream(compute):  # the backward pass frees memory of this stream
                copied = torch.empty_like(part, device=self.device)
            self._stream.wait_stream(compute)  # kernels may still use that memory
            with self._api.stream(self._stream):
                return copied.copy_(part, non_blocking=True)

        def bring(share: list[dict[str, Any]], *_: Any) -> None:
            if model.is_last:
                _renew(share, self.device, to_device)

        def finish() -> None:
            _renew(states, self.device, to_device)
            compute.wait_stream(self._stream)

        trained = [] if model is None else [item for item in model.model.parameters() if item.requires_grad]
        with contextlib.ExitStack() as stack:
            stack.callback(self._store, optimizer)
            for index, parameter in enumerate(trained):
                hook = functools.partial(bring, states[index :: len(trained)])
                stack.enter_context(parameter.register_post_accumulate_grad_hook(hook))
            yield finish

    def _store(self, optimizer: Optimizer) -> None:
        def to_host(part: Tensor) -> Tensor:
            part.record_stream(self._stream)  # its memory must not be reused before the copy ends
            host = self._hosts.pop(id(part), None)
            copied = part.to(HOST, non_blocking=True) if host is None else host.copy_(part, non_blocking=True)
            self.left.append(self._stream.record_event())
            return copied

        self.left = []
        self._stream.wait_stream(self._api.current_stream(self.device))
        with self._api.stream(self._stream):
            _renew(optimizer.state.values(), HOST, to_host)
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            optimizer.register_state_dict_pre_hook(lambda _: self._stream.synchronize())

    def drain(self, fraction: float, *_: Any) -> None:
        """Waits until this fraction of the moments has left the device."""
        if self.left:
            self.left[math.ceil(fraction * len(self.left)) - 1].synchronize()
