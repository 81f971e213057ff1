"""Functions named in a configuration by dotted path."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def function_of(source: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function itself, or what the dotted path names.

    Raises:
        ValueError: if there is no such function.
    """
    if not isinstance(source, str):
        return source
    module, _, attribute = source.rpartition(".")
    try:
        function = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name}={source!r} cannot be imported ({error}), expected the dotted path of a function, such as "
            "my_project.tools.search. Mend the path, or run where it can be imported."
        ) from error
    if not callable(function):
        raise ValueError(f"{name}={source!r} is {function!r:.80}, expected a function. Mend the path.")
    return function  # type: ignore[no-any-return]
