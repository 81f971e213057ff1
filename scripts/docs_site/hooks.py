"""MkDocs hooks: generated pages, drawings in the page's colors, and links to files outside docs/."""

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
# Files outside docs/ that have a page.
_PAGES = {"../README.md": "index.md", "../examples/quickstart/quickstart.ipynb": "notebook.md"}
log = logging.getLogger("mkdocs.plugins.lightrl")  # its warnings fail `mkdocs build --strict`


def on_files(files: Files, config: Any) -> Files:
    for name, content in settings_page.pages().items():
        files.append(File.generated(config, f"settings/{name}.md", content=content))
    notebook = notebook_page.page(ROOT / "examples/quickstart/quickstart.ipynb")
    files.append(File.generated(config, "notebook.md", content=notebook))
    return files


def on_page_markdown(markdown: str, page: Page, config: Any, files: Files) -> str:
    """Replaces links to repository files, which the site does not contain, with the files' paths."""

    def path_of(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        if path in _PAGES:
            return f"[{text}]({_PAGES[path]})"
        if not (ROOT / "docs" / path).exists():
            log.warning("%s links to %s, which does not exist.", page.file.src_path, path)
        shown = f"`{path.removeprefix('../')}`"
        return shown if text.strip("`") in path else f"{text} ({shown})"

    if page.file.src_path == "reference/trajectories.md":
        return settings_page.with_fields(markdown)
    if page.file.src_path.startswith(("settings/", "reference/")):
        return markdown
    return re.sub(r"(?<!!)\[([^\]]*)\]\((\.\./[^)#]+)(?:#[^)]*)?\)", path_of, markdown)


def on_page_content(content: str, page: Page, config: Any, files: Files) -> str:
    """Inlines drawings, so that their colors follow the page's scheme and not the system's."""

    def inlined(image: re.Match[str]) -> str:
        return (ROOT / "docs" / "drawings" / image[1]).read_text(encoding="utf-8")

    return re.sub(r'<img [^>]*src="(?:\.\./)*drawings/([\w.]+)"[^>]*>', inlined, content)
