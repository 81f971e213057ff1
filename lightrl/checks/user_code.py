"""User code: functions that a configuration names, and what they raise: rewards, chat templates, tools."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightrl.errors import LightRLError, RolloutError


@contextmanager
def user_code(translate: Callable[[BaseException], Exception], *unchanged: type[Exception]) -> Iterator[None]:
    """Replaces each error raised inside by the one that `translate` makes of it.

    Args:
        translate: gets the exception; SystemExit too, but no cancellation and no Ctrl-C.
        unchanged: exceptions that leave as they are.
    """
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:  # user code raises anything
        raise translate(error) from error


def named_user_code(name: str, *, on: str = "") -> AbstractContextManager[None]:
    """Replaces each error raised inside, but for ours, by a RolloutError that names the code and `on` what it ran."""
    return user_code(lambda error: RolloutError(f"{name} raised {error!r}{on and f' on {on}'}."), LightRLError)


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
