"""Finding: what a check saw, its verdict, and how to fix it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightrl.checks.printable import escape_unprintable

Verdict = Literal["ok", "warning", "fails"]

_WIDTH_WITHOUT_TERMINAL = 120
_MIN_WIDTH = 60


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    area: str  # such as `disk`
    verdict: Verdict
    text: str  # what was seen
    fix: str = ""  # what to do about it, unless all is well


def ok(area: str, text: str) -> Finding:
    return Finding(area, "ok", text)


def judged(area: str, text: str, verdict: Verdict, fix: str, *, is_wrong: bool) -> Finding:
    """With this verdict and fix if something is wrong, otherwise ok."""
    return Finding(area, verdict, text, fix) if is_wrong else ok(area, text)


def findings_text(findings: Iterable[Finding]) -> str:
    """One paragraph each: verdict, area, text, and the fix below."""
    width = max(shutil.get_terminal_size((_WIDTH_WITHOUT_TERMINAL, 0)).columns, _MIN_WIDTH)
    lines: list[str] = []
    for finding in findings:
        start = f"{finding.verdict:<8} {finding.area:<12} "
        body = escape_unprintable(finding.text)
        lines += textwrap.wrap(body, width, initial_indent=start, subsequent_indent=" " * len(start))
        if finding.fix:
            indent = " " * len(start)
            lines += textwrap.wrap(
                escape_unprintable(finding.fix),
                width,
                initial_indent=f"{indent}fix: ",
                subsequent_indent=f"{indent}     ",
            )
    return "\n".join(lines)


def totals_text(findings: Iterable[Finding]) -> str:
    verdicts = [finding.verdict for finding in findings]
    num = {name: verdicts.count(name) for name in ("ok", "warning", "fails")}
    return f"{num['ok']} ok, {num['warning']} warning{'s' * (num['warning'] != 1)}, {num['fails']} failed"
