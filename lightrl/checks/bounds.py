"""Checks that a number is within its bounds; the message names the setting as the user typed it."""

from __future__ import annotations

import math


def check_bounds(low: float, high: float = math.inf, /, **settings: float | None) -> None:
    """Accepts numbers from `low` to `high`, both included, and None.

    Raises:
        ValueError: with the name of the first setting outside, NaN included.
    """
    for name, value in settings.items():
        if value is not None and not low <= value <= high:
            bounds = f">= {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise ValueError(f"{name} must be {bounds}, got {value}.")


def finite_number(value: object, largest: float = 1e15) -> float | None:
    """Converts what user code returned to a number; None if it is none, not finite, or larger."""
    try:
        number = float(value) if hasattr(type(value), "__float__") else math.nan  # type: ignore[arg-type]
    except (OverflowError, TypeError, ValueError):  # an array of several numbers
        return None
    return number if abs(number) <= largest else None


def check_positive(**settings: float | None) -> None:
    """Accepts finite numbers above 0, and None; raises ValueError with the name of the first setting that is not."""
    for name, value in settings.items():
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a finite number above 0, got {value}.")
