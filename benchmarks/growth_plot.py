"""The picture of `benchmarks.growth`: time, memory and bytes over each axis that was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = {  # axis → what grows
    "trajectories": "trajectories",
    "ranks": "ranks",
    "prompts": "prompts",
    "iterations": "iteration",
}
KINDS = {  # endings of column names
    "time": ("_s", "seconds"),
    "memory": ("rss_mib",),
    "bytes": ("bytes", "bytes_per_token"),
}


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The measurements among the lines of a file, whatever else it holds."""
    lines = (line for line in path.read_text().splitlines() if line.startswith("{"))
    return [row for row in map(json.loads, lines) if row.get("axis") in SIZES]


def curves(rows: list[dict[str, Any]], size: str, endings: tuple[str, ...]) -> dict[str, list[tuple[float, float]]]:
    """By label the points of each column with such an ending; text columns make curves of their own."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        texts = [value for name, value in row.items() if isinstance(value, str) and name in ("form", "transport")]
        texts += [name for name, value in row.items() if value is True]
        for name, value in row.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name != size and name.endswith(endings) and "since_start" not in name:
                found.setdefault(" ".join([name, *texts]), []).append((row[size], value))
    return {label: sorted(points) for label, points in found.items()}


def draw(source: Path, picture: Path) -> None:
    """Raises ValueError if the file has no measurement of growth."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_rows(source)
    if not rows:
        raise ValueError(f"{source} has no JSON line with an axis of {', '.join(SIZES)}.")
    drawn = {
        (axis, kind): lines
        for axis in SIZES
        for kind, endings in KINDS.items()
        if (lines := curves([row for row in rows if row["axis"] == axis], SIZES[axis], endings))
    }
    num_lines = -(-len(drawn) // 3)
    figure = Figure(figsize=(13.2, 2.9 * num_lines), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_lines, 3, squeeze=False).flat
    for panel in panels[len(drawn) :]:
        panel.set_visible(False)
    for panel, ((axis, kind), lines) in zip(panels, drawn.items(), strict=False):
        for label, points in lines.items():
            panel.plot(*zip(*points, strict=True), marker="o", ms=3, lw=1.2, label=label)
        sizes = sorted({size for points in lines.values() for size, _ in points})
        panel.set_title(f"{kind} over {axis}", fontsize=9, loc="left")
        panel.set_xscale("log")
        panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
        panel.set_xticks([], minor=True)
        panel.set_ylim(0, panel.get_ylim()[1] * 1.05)
        panel.legend(frameon=False, fontsize=7)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, format="png")
