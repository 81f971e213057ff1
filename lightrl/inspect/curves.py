"""The metrics of a run as curves, from its CSV file, of at most `MAX_POINTS` each."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

MAX_POINTS = 600  # of a curve: more than its columns on a screen

_STEPS = ("step", "iteration")  # the column that is the horizontal axis; CSVLogger's, LearningCurve's
_OTHERS = ("epoch", "created_at")


class Curves:
    """Reads a file again when it has changed, and then only what was added."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._header = ""
        self._read_bytes = 0
        self._points: dict[str, tuple[list[float], list[float]]] = {}  # metric → iterations, values

    def to_json(self) -> dict[str, Any]:
        """Metric → {"x": iterations, "y": values}; a long curve has the mean of each part."""
        self._read()
        return {name: _shortened(*points) for name, points in sorted(self._points.items())}

    def _read(self) -> None:
        names = ("metrics.csv", "learning_curve.csv")
        path = next((self._folder / name for name in names if (self._folder / name).exists()), None)
        if path is None:
            return
        with path.open(encoding="utf-8", newline="") as file:
            header = file.readline()
            # CSVLogger writes the whole file anew when a metric is added.
            if path != self._path or header != self._header or path.stat().st_size < self._read_bytes:
                self._path, self._header, self._points = path, header, {}
                self._read_bytes = len(header.encode())
            file.seek(self._read_bytes)
            text = file.read()
        end = text.rfind("\n") + 1  # the last line may be in the making
        self._read_bytes += len(text[:end].encode())
        names_of_columns = next(csv.reader([header]), [])
        step = next((index for index, name in enumerate(names_of_columns) if name in _STEPS), None)
        if step is None:
            return
        columns = [
            (index, self._points.setdefault(name, ([], [])))
            for index, name in enumerate(names_of_columns)
            if index != step and name not in _OTHERS
        ]
        for row in csv.reader(text[:end].splitlines()):
            for index, (steps, values) in columns:
                if index < len(row) and row[index]:
                    value = _number(row[index])
                    if value is not None:
                        steps.append(float(row[step]))
                        values.append(value)


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _shortened(steps: list[float], values: list[float]) -> dict[str, list[float]]:
    stride = math.ceil(len(steps) / MAX_POINTS)
    if stride <= 1:
        return {"x": steps, "y": values}
    starts = range(0, len(steps), stride)
    return {
        "x": [_mean(steps[start : start + stride]) for start in starts],
        "y": [_mean(values[start : start + stride]) for start in starts],
    }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
