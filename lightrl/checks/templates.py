"""Checks format strings from a configuration, such as `{prompt} Think first.`, before they are filled in."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator


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
    """Yields the names in braces, including those in another field's format, as in `{prompt:{width}}`."""
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is not None:
            yield name
            yield from _names(form or "")
        if conversion not in (None, "r", "s", "a"):
            raise ValueError(f"there is no conversion {conversion!r}")
