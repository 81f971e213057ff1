"""User code: finds functions that a configuration names (rewards, tools) and translates user code's exceptions."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

from lightrl.checks.printable import did_you_mean
from lightrl.errors import LightRLError, RolloutError

_MAX_TRACEBACK_CHARS = 8_000  # the last characters are the most useful ones; a limit keeps logs small
_OWN_FILES = ("lightrl/checks/user_code.py", *(f"lightrl/rewards/{name}.py" for name in ("reward_result", "parts")))


@contextmanager
def user_code(translate: Callable[[BaseException], Exception], *unchanged: type[Exception]) -> Iterator[None]:
    """Replaces each error raised inside with the one that `translate` returns.

    Args:
        translate: gets the exception, which may be SystemExit but not a cancellation or Ctrl-C.
        unchanged: types of exceptions that pass through unchanged.
    """
    try:
        yield
    except unchanged:
        raise
    except (Exception, SystemExit) as error:  # user code may raise anything
        raise translate(error) from error


def named_user_code(name: str, *, on: str = "") -> AbstractContextManager[None]:
    """Replaces each error raised inside, except lightrl's, with a RolloutError that names the code and its input."""
    return user_code(lambda error: RolloutError(f"{name} raised {error!r}{on and f' on {on}'}."), LightRLError)


def function_of(source: str | Callable[..., Any], name: str) -> Callable[..., Any]:
    """Imports the function at a dotted path `package.module.function` or `….Class.function`; returns a function as is.

    Raises:
        ValueError: if it does not exist; the message has the setting's `name`, the wrong part and similar names.
    """
    if not isinstance(source, str):
        return source
    setting, parts = f"{name}={source!r}", source.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise ValueError(f"{setting} must be a dotted path such as my_project.tools.search: module, dot, function.")
    target: object = None
    num_imported = 0
    for num_imported in range(len(parts) - 1, 0, -1):
        target = _import_module(".".join(parts[:num_imported]), setting)
        if target is not None:
            break
    if target is None:
        folders = [entry for entry in sys.path if os.path.isdir(entry)]  # noqa: PTH112
        raise ValueError(
            f"{setting}: there is no module {parts[0]!r}. Run from the folder that has {parts[0]}.py, or install the "
            f"package. Searched: {folders}"
        )
    for position, part in enumerate(parts[num_imported:], start=num_imported):
        if not hasattr(target, part):
            owner = ".".join(parts[:position])
            raise ValueError(f"{setting}: {owner!r} has no {part!r}.{_nearest(part, target)}")
        target = getattr(target, part)
    if not callable(target):
        kind = "a module" if isinstance(target, ModuleType) else f"of type {type(target).__name__}"
        raise ValueError(f"{setting} is {kind}; it must be a function.")
    return target


def _import_module(module: str, setting: str) -> ModuleType | None:
    """Imports a module; returns None if it does not exist, and raises ValueError if its code fails."""

    def failed(error: BaseException) -> ValueError:
        return ValueError(f"{setting}: module {module!r} could not be imported:\n{user_traceback(error)}")

    with user_code(failed):
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise
            return None


def _nearest(name: str, owner: object) -> str:
    names = [item for item in dir(owner) if not item.startswith("__")]
    if hasattr(owner, "__path__"):
        names += [item.name for item in pkgutil.iter_modules(owner.__path__)]
    functions = [item for item in names if callable(getattr(owner, item, None)) and not item.startswith("_")]
    content = f" It has {', '.join(functions[:10]) or 'no functions'}."
    return did_you_mean(name, names, cutoff=0.5, form="{!r}") or content


def user_traceback(error: BaseException) -> str:
    """Returns the traceback, starting with the first frame of user code."""
    frames = error.__traceback__
    while frames is not None and frames.tb_next is not None:
        file = frames.tb_frame.f_code.co_filename
        if not file.endswith(_OWN_FILES) and "importlib" not in file:
            break
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return "".join(lines)[-_MAX_TRACEBACK_CHARS:].rstrip()
