"""Text for a terminal: removes control codes that programs and models write; puts counts and durations into words."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path


def escape_unprintable(text: str, *, keep: str = "") -> str:
    """Escapes unprintable characters, such as line breaks, as Python does, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else repr(char)[1:-1] for char in text)


def count_text(number: int, name: str) -> str:
    """Returns, for example, `1 group`, `2 groups` or `0 trajectories`."""
    plural = f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
    return f"{number} {name if number == 1 else plural}"


def did_you_mean(word: str, names: Iterable[str], *, num: int = 3, cutoff: float = 0.6, form: str = "{}") -> str:
    """Returns ` Did you mean GRPO or PPO?` with the names most similar to `word`, each formatted with `form`; or ""."""
    similar = difflib.get_close_matches(word, list(names), num, cutoff)
    return f" Did you mean {' or '.join(map(form.format, similar))}?" if similar else ""


def one_period(text: str) -> str:
    """Replaces two periods with one: a sentence may end with an error message that already ends with a period."""
    return re.sub(r"(?<!\.)\.\.(?=\s|$)", ".", text)


def duration_text(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def end_of_log(path: Path, max_bytes: int) -> str:
    """Returns the end of a text file, with unprintable characters escaped; empty if the file does not exist."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return escape_unprintable(file.read().decode(errors="replace").strip(), keep="\n\t")
