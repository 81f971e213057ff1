"""Checks on settings: bounds, choices, settings without effect, equal shapes. Messages name the setting."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def check_bounds(low: float, high: float = math.inf, /, **settings: float | None) -> None:
    """Raises a ValueError that names the first setting that is neither None nor a number from `low` to `high`."""
    for name, value in settings.items():
        if value is not None and (finite_number(value, math.inf) is None or not low <= value <= high):
            bounds = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise ValueError(f"{name} must be {bounds}, got {value!r}.")


def check_kind(kind: type, /, **settings: object) -> None:
    """Raises a TypeError that names the first setting that is neither None nor an instance of `kind`."""
    for name, value in settings.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r:.200}.")


def finite_number(value: object, largest: float = 1e15) -> float | None:
    """Converts a value from user code to a float; returns None if it is not a number, not finite, or too large."""
    try:
        number = real_number(value)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return None
    return number if abs(number) <= largest else None


def real_number(value: Any) -> float:
    """Converts a real number, even numpy's or torch's; other values raise TypeError, ValueError or RuntimeError."""
    item = value.item() if hasattr(type(value), "item") else value  # numpy's strings and complex numbers have __float__
    if not hasattr(type(item), "__float__"):
        raise TypeError("it is not a real number")
    return float(value)


def check_positive(**settings: float | None) -> None:
    """Accepts None and finite numbers above 0; raises a ValueError that names the first setting with another value."""
    for name, value in settings.items():
        if value is not None and (finite_number(value, math.inf) is None or not 0 < value < math.inf):
            raise ValueError(f"{name} must be a finite number above 0, got {value!r}.")


def check_choice(choices: Sequence[object], /, **settings: object) -> None:
    """Raises a ValueError that names the first setting whose value is not one of the choices."""
    for name, value in settings.items():
        if value not in choices:
            *first, last = map(str, choices)
            raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}.")


def check_effect(reason: str, /, **settings: tuple[object, object]) -> None:
    """Raises ValueError, "NAME=VALUE has no effect REASON", for the first setting whose value and default differ."""
    for name, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"{name}={value!r} has no effect {reason}. Remove it.")


def check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError if a tensor's shape differs from the first one's, because torch might silently broadcast it."""
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first} has shape {tuple(expected.shape)}; they must be "
                "equal. Align both to the tokens they describe; value[:, None].expand(B, T) turns a value per "
                "trajectory into one per token."
            )


def check_adamw(*, lr: float | None, weight_decay: float | None, betas: Sequence[float] = (0.0, 0.0)) -> None:
    """Raises ValueError if an AdamW setting is out of range."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is not None and (finite_number(value, math.inf) is None or not 0 <= value < math.inf):
            raise ValueError(f"{name} must be >= 0, got {value!r}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers >= 0 and < 1, such as (0.9, 0.95), got {betas}.")


def names_of(template: str, setting: str) -> list[str]:
    """Returns the names in a format string's braces; raises ValueError for an invalid one, such as JSON or LaTeX."""
    try:
        names = list(_names(template))
        bad = next((name for name in names if not re.match(r"[^\W\d][^\"'\\{}\n]*$", name)), None)
        if bad is None:
            return names
        problem = f"has a field without a name, {{{bad}}}"
    except ValueError as error:
        problem = f"must be a format string: {error}"
    raise ValueError(f"{setting}={template!r} {problem}. Double any braces that are literal text: {{{{ and }}}}.")


def _names(template: str) -> Iterator[str]:
    """Yields the names in braces, including names within a field's format, as in `{prompt:{width}}`."""
    for _, name, field_format, conversion in string.Formatter().parse(template):
        if name is not None:
            yield name
            yield from _names(field_format or "")
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"unknown conversion {conversion!r}")
