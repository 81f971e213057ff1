"""User code: finds functions that a configuration names (rewards, tools) and translates the exceptions of user code."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightrl.errors import LightRLError, RolloutError


@contextmanager
def user_code(translate: Callable[[BaseException], Exception], *unchanged: type[Exception]) -> Iterator[None]:
    """Replaces each error raised inside with the one that `translate` returns.

    Args:
        translate: gets the exception, SystemExit included, but neither cancellation nor Ctrl-C.
        unchanged: exceptions that are not translated.
    """
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise translate(error) from error


def named_user_code(name: str, *, on: str = "") -> AbstractContextManager[None]:
    """Replaces each error raised inside, except ours, with a RolloutError that names the code and its input, `on`."""
    return user_code(lambda error: RolloutError(f"{name} raised {error!r}{on and f' on {on}'}."), LightRLError)


def function_of(source: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """The function itself, or the one at a dotted path; raises ValueError if there is no such function."""
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
