"""A second device where there is none: inside, `module.to(device)` gives every tensor new memory and clears the old.

So what still reads the memory that a model had before its move to another device and back says something else.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightrl.strategies import local


@contextlib.contextmanager
def second_device() -> Iterator[list[nn.Module]]:
    """Gives the list of the modules moved, in order; moves to `meta` and conversions are torch's own."""
    moved: list[nn.Module] = []
    original = nn.Module.to

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        if not args or args[0] == torch.device("meta") or not isinstance(args[0], torch.device | str):
            return original(module, *args, **kwargs)
        moved.append(module)
        return module._apply(_move)

    nn.Module.to = to  # type: ignore[method-assign, assignment]
    try:
        yield moved
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


def _move(tensor: Tensor) -> Tensor:
    copy = tensor.clone()
    local(tensor).zero_()
    return copy
