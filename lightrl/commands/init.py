"""lightrl init: writes an example into a folder, with its reward, data and YAML, ready to edit.

The examples are those in the repository; a wheel contains a copy. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from lightrl.checks.printable import did_you_mean

_PACKAGE = Path(__file__).parents[1]
_SUFFIXES = (".py", ".yaml", ".txt", ".jsonl")
# Matches a reference from one example to a file: `examples.quickstart.task.tokenizer`, `examples/quickstart/grpo.yaml`.
_REFERENCE = re.compile(r"\bexamples([./])(\w+)[./](\w+)")
_NOTHING = "# Needs: nothing else."
_COMMAND = re.compile(r"^#   ((?:lightrl|python) .*(?:(?<=\\)\n#.*)*)", re.MULTILINE)  # in the first lines of a YAML


def examples_folder() -> Path:
    """Returns the folder of all examples: the clone's, or the installed package's."""
    clone = _PACKAGE.parent / "examples"
    return clone if (clone / "quickstart").is_dir() else _PACKAGE / "_examples"


def example_names() -> list[str]:
    """Returns the names of all examples, the quickstart first."""
    names = {file.parent.name for file in examples_folder().glob("*/*.yaml")}
    return sorted(names, key=lambda name: (name != "quickstart", name))


def example_files(example: str) -> dict[str, str]:
    """Maps new paths to the texts of an example's files, and of other examples' files that it refers to.

    Python finds modules in the current folder, so references to the example's own modules lose the prefix
    `examples.<example>.`. Other examples get a subfolder each, so references to them lose only `examples.`.
    """
    root, names = examples_folder(), example_names()
    sources = [file for file in sorted((root / example).iterdir()) if file.suffix in _SUFFIXES]
    files: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        separator, name, file = match.groups()
        others = [(root / name / file).with_suffix(suffix) for suffix in _SUFFIXES]
        sources.extend(path for path in others if path.is_file() and path not in sources)
        if name not in names:
            return match[0]
        return file if name == example else f"{name}{separator}{file}"

    for source in sources:  # `renamed` appends to the list
        path = source.relative_to(root).as_posix().removeprefix(f"{example}/")
        files[path] = _REFERENCE.sub(renamed, source.read_text())
    return files


def run(args: Sequence[str]) -> int:
    """Runs `lightrl init`; returns 0, or 2 if there is no such example, or the folder is not empty."""
    names = example_names()
    parser = argparse.ArgumentParser(
        prog="lightrl init",
        description="Writes an example into a new folder, ready to edit: its settings, reward and data.",
        epilog=f"examples: {', '.join(names)}",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="a folder that does not exist, or is empty")
    parser.add_argument("--example", default="quickstart", help="the example's name (default quickstart)")
    options = parser.parse_args(list(args))
    folder: Path = options.folder
    if options.example not in names:
        hint = did_you_mean(options.example, names)
        sys.stderr.write(f"lightrl: There is no example {options.example!r}.{hint} Examples: {', '.join(names)}.\n")
        return 2
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        sys.stderr.write(f"lightrl: {folder} exists and is not an empty folder. Pass a new folder.\n")
        return 2
    files = example_files(options.example)
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    texts = [text for name, text in files.items() if "/" not in name and name.endswith(".yaml")]
    texts.sort(key=lambda text: _NOTHING not in text)  # files that need nothing else come first
    lines = [f"Wrote {folder}: {', '.join(files)}. Next:", "", f"  cd {folder}"]
    for text in texts:
        needs = re.search(r"^# (Needs: .*)", text, re.MULTILINE)
        lines += ["", f"  # {needs[1]}"] if needs and _NOTHING not in text else []
        commands = (f"  {command}".replace("\n# ", "\n") for command in _COMMAND.findall(text))
        lines += [command for command in commands if command not in lines]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0
