"""Settings that are one of a few words."""

from __future__ import annotations

from collections.abc import Sequence


def check_choice(choices: Sequence[object], /, **settings: object) -> None:
    """Checks that each setting is one of the choices.

    Raises:
        ValueError: with the name of the first setting that is not.
    """
    for name, value in settings.items():
        if value not in choices:
            *first, last = map(str, choices)
            raise ValueError(f"{name} must be {', '.join(first)} or {last}, got {value!r}.")
