"""Text of programs and models, made harmless for a terminal, whose control codes rewrite what it shows."""

from __future__ import annotations


def escape_unprintable(text: str, *, keep: str = "") -> str:
    """Control characters, line breaks and the like as Python writes them, but for those to keep."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else repr(letter)[1:-1] for letter in text)
