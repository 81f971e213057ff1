"""Settings that are one of a few words, and settings without effect."""

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


def check_effect(reason: str, /, **settings: tuple[object, object]) -> None:
    """Refuses settings where they have no effect.

    Args:
        reason: ends the sentence "… has no effect".
        settings: by name the value and the default, which may stay.
    """
    for name, (value, default) in settings.items():
        if value != default:
            raise ValueError(f"{name}={value!r} has no effect {reason}. Remove it.")
