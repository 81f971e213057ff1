"""What MkDocs cannot do alone: generated pages, links to files outside of docs/, Mermaid without a network."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]

import notebook_page  # noqa: E402
import settings_page  # noqa: E402

ROOT = Path(__file__).parents[2]
MERMAID = ROOT / "node_modules/mermaid/dist/mermaid.min.js"  # npm install --no-save mermaid
log = logging.getLogger("mkdocs.plugins.lightrl")  # in which a warning fails `mkdocs build --strict`


def on_config(config: Any) -> Any:
    if MERMAID.is_file():
        config["extra_javascript"].append("mermaid.min.js")
    return config


def on_files(files: Files, config: Any) -> Files:
    files.append(File.generated(config, "settings.md", content=settings_page.page()))
    notebook = notebook_page.page(ROOT / "examples/quickstart/quickstart.ipynb")
    files.append(File.generated(config, "notebook.md", content=notebook))
    if MERMAID.is_file():
        files.append(File.generated(config, "mermaid.min.js", abs_src_path=str(MERMAID)))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """A link to a file of the repository becomes its path, which a reader of the site looks up there."""

    def path_of(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        if path == "../README.md":
            return f"[{text}](index.md)"
        if not (ROOT / "docs" / path).exists():
            log.warning("%s links to %s, which does not exist.", page.file.src_path, path)
        shown = f"`{path.removeprefix('../')}`"
        return shown if text.strip("`") in path else f"{text} ({shown})"

    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", path_of, markdown)
