"""Numbers of a configuration held against their bounds, and refused by the name that the user typed."""

from __future__ import annotations

import math


def check_bounds(low: float, high: float = math.inf, /, **settings: float | None) -> None:
    """Lets numbers from low to high pass, both included; and None, which stands for no number.

    Raises:
        ValueError: with the name of the first setting that is beyond them, or no number.
    """
    for name, value in settings.items():
        if value is not None and not low <= value <= high:
            expected = f"at least {low:g}" if high == math.inf else f"{low:g} to {high:g}"
            mend = "Lower it." if value > high else "Raise it." if value < low else "Give a number."
            raise ValueError(f"{name}={value}, expected {expected}. {mend}")
