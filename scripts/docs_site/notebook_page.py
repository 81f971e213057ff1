"""Converts a notebook, with its outputs, to a page of the site."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def page(path: Path) -> str:
    """Returns the notebook's cells as Markdown, with embedded pictures."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(part for cell in cells for part in _parts(cell))


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [_fenced("python", source), *(_shown(output) for output in cell["outputs"])]


def _shown(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        return f"![output of the cell above](data:image/png;base64,{''.join(data['image/png']).strip()})"
    return _fenced("text", "".join(output.get("text") or data.get("text/plain", "")))


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"
