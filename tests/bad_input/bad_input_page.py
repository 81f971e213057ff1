"""Writes the list of bad inputs into a page: `python tests/bad_input/bad_input_page.py docs/faults.md`.

Each row is one of the tests of `pytest -m bad_input`, whose message must have the words of the right column.
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
MARKERS = ("<!-- python tests/bad_input/bad_input_page.py docs/faults.md -->", "<!-- end of the list -->")


def rows_by_module() -> dict[str, list]:
    """The rows of each module's tables, by the module's first line."""
    found = {}
    for file in sorted(FOLDER.glob("test_*.py")):
        module = importlib.import_module(file.stem)
        tables = [value for value in vars(module).values() if isinstance(value, list)]
        found[module.__doc__.splitlines()[0]] = [item for table in tables for item in table if hasattr(item, "says")]
    return found


def markdown() -> str:
    lines = []
    for title, rows in rows_by_module().items():
        if rows:
            lines += ["", title, "", "| input | the message has |", "|---|---|"]
            lines += [f"| {item.what} | {'; '.join(map(cell, item.says))} |" for item in rows]
    return "\n".join(lines[1:])


def cell(words: str) -> str:
    return "`" + words.replace("|", "\\|").replace("`", "'").encode("unicode_escape").decode() + "`"


def page(text: str) -> str:
    """The page with the present list between the two markers."""
    before, _, rest = text.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    if not after:
        raise SystemExit(f"The page must have the lines {MARKERS[0]} and {MARKERS[1]}.")
    return f"{before}{MARKERS[0]}\n{markdown()}\n{MARKERS[1]}{after}"


if __name__ == "__main__":
    tests = FOLDER.parent
    sys.path[:0] = [str(tests.parent), str(tests), *(str(folder) for folder in tests.iterdir() if folder.is_dir())]
    for name in sys.argv[1:]:
        Path(name).write_text(page(Path(name).read_text()))
