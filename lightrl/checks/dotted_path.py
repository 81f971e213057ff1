"""Functions named in a configuration by dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def function_of(source: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function itself, or what the dotted path names; raises ValueError if there is no such function."""
    if not isinstance(source, str):
        return source
    module, _, attribute = source.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name}={source!r} cannot be imported: {error}. Use a dotted path such as my_project.tools.search, and "
            "run from the folder that has it."
        ) from error
    if not callable(function):
        raise ValueError(f"{name}={source!r} must be a function, got {function!r:.80}.")
    return function  # type: ignore[no-any-return]
