"""Checks of settings: bounds, choices, settings without effect, equal shapes. Messages name the setting."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def check_bounds(low: float, high: float = math.inf, /, **settings: float | None) -> None:
    """Accepts numbers from `low` to `high`, both included, and None.

    Raises:
        ValueError: with the name of the first setting that is out of bounds or NaN.
    """
    for name, value in settings.items():
        if value is not None and not low <= value <= high:
            bounds = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise ValueError(f"{name} must be {bounds}, got {value}.")


def finite_number(value: object, largest: float = 1e15) -> float | None:
    """Converts a value from user code to a float; returns None if it is not a number, not finite, or too large."""
    try:
        number = real_number(value)
    except (OverflowError, TypeError, ValueError, RuntimeError):
        return None
    return number if abs(number) <= largest else None


def real_number(value: Any) -> float:
    """Converts a real number, also one of numpy or torch; raises TypeError, ValueError or RuntimeError for others."""
    own = value.item() if hasattr(type(value), "item") else value  # numpy's text and complex numbers have a __float__
    if not hasattr(type(own), "__float__"):
        raise TypeError("it is not a real number")
    return float(value)


def check_positive(**settings: float | None) -> None:
    """Accepts finite numbers above 0, and None; raises ValueError with the name of the first other setting."""
    for name, value in settings.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}.")


def check_choice(choices: Sequence[object], /, **settings: object) -> None:
    """Raises ValueError with the name of the first setting that is not one of the choices."""
    for name, value in settings.items():
        if value not in choices:
            *first, last = map(str, choices)
            raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}.")


def check_effect(reason: str, /, **settings: tuple[object, object]) -> None:
    """Rejects settings that have no effect in this configuration.

    Args:
        reason: completes the sentence "… has no effect".
        settings: name → (value, default); a value equal to its default is accepted.
    """
    for name, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"{name}={value!r} has no effect {reason}. Remove it.")


def check_same_shape(**tensors: Tensor) -> None:
    """Raises ValueError if a tensor does not have the shape of the first one; otherwise, it might be broadcast.

    Args:
        tensors: each named like the caller's argument.
    """
    (first, expected), *others = tensors.items()
    for name, tensor in others:
        if tensor.shape != expected.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} but {first} has shape {tuple(expected.shape)}; they must be "
                "equal. Align both to the tokens they describe; value[:, None].expand(B, T) turns a value per "
                "trajectory into one per token."
            )


def check_adamw(
    *, lr: float | None = None, weight_decay: float | None = None, betas: Sequence[float] = (0.0, 0.0)
) -> None:
    """Raises ValueError if a setting of AdamW is out of range."""
    for name, value in (("lr", lr), ("weight_decay", weight_decay)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name} must be >= 0, got {value}.")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, such as (0.9, 0.95), got {betas}.")


def names_of(template: str, setting: str) -> list[str]:
    """Returns the names in a format string's braces.

    Raises:
        ValueError: if the braces do not match or contain something else, as in JSON and LaTeX.
    """
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
    """Yields the names in braces, including those inside the format of a different field, as in `{prompt:{width}}`."""
    for _, name, field_format, conversion in string.Formatter().parse(template):
        if name is not None:
            yield name
            yield from _names(field_format or "")
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"there is no conversion {conversion!r}")
