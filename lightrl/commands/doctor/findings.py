"""Finding: what a check saw, its verdict, and how to fix it."""

from __future__ import annotations

import shutil
import textwrap
from dataclasses import dataclass
from typing import Literal

from lightrl.checks.printable import escape_unprintable

Verdict = Literal["ok", "warning", "fails"]

_WIDTH_WITHOUT_TERMINAL = 120
_MIN_WIDTH = 60


@dataclass(frozen=True)
class Finding:
    """One paragraph of the report."""

    area: str  # such as `disk`
    text: str  # what was seen
    verdict: Verdict = "ok"
    fix: str = ""  # what to do about it, unless all is well

    def __str__(self) -> str:
        """Verdict, area and text, and the fix below."""
        width = max(shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns, _MIN_WIDTH)
        start = f"{self.verdict:<8} {self.area:<12} "
        indent = " " * len(start)
        lines = textwrap.wrap(escape_unprintable(self.text), width, initial_indent=start, subsequent_indent=indent)
        fix, under = escape_unprintable(self.fix), f"{indent}     "
        return "\n".join([*lines, *textwrap.wrap(fix, width, initial_indent=f"{indent}fix: ", subsequent_indent=under)])


def judged(area: str, text: str, verdict: Verdict, fix: str, *, is_wrong: bool) -> Finding:
    """With this verdict and fix if something is wrong, otherwise ok."""
    return Finding(area, text, verdict, fix) if is_wrong else Finding(area, text)
