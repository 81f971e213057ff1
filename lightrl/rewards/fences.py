"""Finds fenced blocks as models write them: with backticks or tildes, in lists and quotes, sometimes not closed."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable

_FENCE = re.compile(r"(?P<before>[^`~\n]*)(?P<marks>`{3,}|~{3,})[ \t]*\{?\.?(?P<language>[\w+#-]*)(?P<rest>[^`\n]*)$")
_INDENT = re.compile(r"[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)*")
_QUOTE = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_MAX_FENCES_INSIDE = 4  # fences in the docstrings of one program


def fenced_blocks(text: str, is_content: Callable[[str], bool]) -> list[tuple[str, str]]:
    """Returns each block's language ("" if it names none) and its text, without indentation and quote marks.

    Args:
        is_content: returns whether a text is a complete block. It decides which of several fences ends a block, and
            whether text after an unclosed fence is a block.
    """
    lines = text.splitlines(keepends=True)
    fences: dict[int, re.Match[str]] = {}
    for number, line in enumerate(lines):
        match = _FENCE.match(line.rstrip())
        if match and (_INDENT.fullmatch(match["before"]) or match["language"]):
            fences[number] = match
    blocks: list[tuple[str, str]] = []
    next_start = 0
    for start, fence in fences.items():
        if start < next_start:
            continue

        def inside(end: int, start: int = start, fence: re.Match[str] = fence) -> str:
            content = "".join(lines[start + 1 : end])
            content = _QUOTE.sub("", content) if fence["before"].lstrip().startswith(">") else content
            return content if is_content(content) else textwrap.dedent(content)

        ends = [n for n, other in fences.items() if n > start and other["marks"].startswith(fence["marks"])]
        ends = ends[: 1 + _MAX_FENCES_INSIDE] or [len(lines)]
        end = next((each for each in ends if is_content(inside(each))), ends[0])
        if end == len(lines) and not is_content(inside(end)):
            continue
        opens_next = end in fences and (fences[end]["language"] != "" or not _INDENT.fullmatch(fences[end]["before"]))
        next_start = end if opens_next else end + 1
        blocks.append((fence["language"].lower(), inside(end)))
    return blocks
