"""Finds the folders that are runs: those with metrics, trajectories, a trace or a status."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from lightrl.checks.secret_settings import without_secrets

_SIGNS = ("metrics.csv", "trajectories", "trace", "status.json", "learning_curve.csv", "problems")
Json = dict[str, Any]  # a JSON object from a file or in an answer
MAX_BYTES = 2**26  # maximum number read from a file at a time
_DEPTH = 3  # levels of folders to search for runs, such as <root>/lightning_logs/version_0


def open_file(path: Path, *, follows_link: bool = False) -> BinaryIO:
    """Opens a run's file, which may be untrusted; raises OSError for a link, a pipe, a device or a folder."""
    flags = os.O_RDONLY | os.O_NONBLOCK  # opening a pipe must not block
    file = os.fdopen(os.open(path, flags if follows_link else flags | os.O_NOFOLLOW), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(f"{path} is not a file")
    return file


def read_text(path: Path) -> str:
    """Returns the last MAX_BYTES of a run's file as text."""
    with open_file(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
        return file.read(MAX_BYTES).decode(errors="replace")


@dataclass(frozen=True)
class Run:
    """A run's folder."""

    folder: Path
    name: str  # short and unique

    def status(self) -> Json:
        """Returns the run's state from its `status.json`; empty if there is none."""
        try:
            status = json.loads(read_text(self.folder / "status.json"))
        except (OSError, ValueError, RecursionError):
            return {}
        return status if isinstance(status, dict) else {}

    def settings(self) -> dict[str, str]:
        """Returns the settings in `config.yaml` by their command-line names; empty if there is no such file."""
        try:
            text = read_text(self.folder / "config.yaml")
            depth = 0
            for event in yaml.parse(text):
                depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
                if depth > 50 or isinstance(event, yaml.AliasEvent):  # ten lines of aliases can expand to a billion
                    return {}
            config = yaml.safe_load(text)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return {}
        settings: dict[str, str] = {}
        for name, text in _flat(without_secrets(config, "(not shown)"), ""):
            settings[name] = f"{settings[name]}, {text}" if name in settings else text  # two callbacks of one class
        return settings


def _flat(value: object, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            if inner or key != "init_args":
                yield from _flat(inner, name if key in ("class_path", "init_args") else f"{name}.{key}".lstrip("."))
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "class_path" in one for one in value):
        for one in value:
            yield from _flat(one, f"{name}.{one['class_path'].rpartition('.')[2]}")
    else:
        yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def find_runs(paths: Iterable[Path]) -> list[Run]:
    """Returns the runs at these paths: a run folder itself, or else all runs in a folder, newest last."""
    folders: list[Path] = []
    for path in paths:
        runs = _runs_in(path.absolute(), _DEPTH)
        if not runs:
            fix = "Pass a folder such as runs/quickstart/lightning_logs/version_0, or its trainer.default_root_dir."
            raise ValueError(f"{path} is not a run folder and contains none. {fix}")
        folders += [folder for folder in runs if folder not in folders]
    return [Run(folder, name) for folder, name in zip(folders, _short_names(folders), strict=True)]


def _runs_in(folder: Path, depth: int) -> list[Path]:
    if any((folder / sign).exists() for sign in _SIGNS):
        return [folder]
    if depth == 0 or not folder.is_dir():
        return []
    inner = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
    return [run for path in inner for run in _runs_in(path, depth - 1)]


def _short_names(folders: list[Path]) -> list[str]:
    """Returns the shortest distinct ends of the paths, without `lightning_logs`."""
    parts = [[part for part in folder.parts if part != "lightning_logs"] for folder in folders]
    for num in range(2, 30):
        names = ["/".join(one[-num:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]
