"""Generates the page of all metrics that a run logs, from the table that `lightrl inspect` shows beside its curves.

python scripts/docs_site/metrics_page.py    # writes docs/reference/metrics.md
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/metrics.md"
TABLE = ROOT / "lightrl/commands/inspect/page/metrics.js"
_START = """# What is logged

Every metric of `lightrl fit`, by group; each is a column of `metrics.csv` and a curve in `lightrl inspect`, which
shows this text when you point at its name. The `step` column is the [iteration](../concepts.md), counted from 1; 0 is
the validation before training. Fractions are from 0 to 1, and of trajectories unless the unit says otherwise. An
update's means are over all its loss tokens and do not depend on microbatches and ranks. Your own algorithm's metrics
are `policy/<name>`, your reward's `rollout/<name>`.

Not learning? [Start here](../debug-a-run.md).
"""
_HEAD = ["| metric | unit | meaning | healthy | otherwise |", "|---|---|---|---|---|"]


def metrics() -> dict[str, list[str]]:
    """Returns name → [unit, meaning, healthy value, what to do otherwise]; `<x>` in a name stands for any word."""
    return json.loads(TABLE.read_text(encoding="utf-8").partition("METRICS = ")[2].strip().removesuffix(";"))


def undescribed(names: set[str]) -> set[str]:
    """Returns the names that only a general row describes, such as `rollout/<name>` for a reward's metrics.

    The row of `<group>/<name>` also describes the validation's `val/<name>`.
    """
    rows = [re.sub("<.*?>", r"[^/]+", name) for name in metrics() if not name.endswith("/<name>")]
    rows += [f"val/{row.partition('/')[2]}" for row in rows]
    return {name for name in names if not re.fullmatch("|".join(rows), name)}


def page() -> str:
    groups: dict[str, list[str]] = {}
    for name, cells in metrics().items():
        row = " | ".join(cell.replace("|", "\\|") for cell in cells)
        groups.setdefault(name.partition("/")[0] if "/" in name else "other", []).append(f"| `{name}` | {row} |")
    tables = ("\n".join([f"## {group}", "", *_HEAD, *rows]) for group, rows in groups.items())
    return "\n\n".join([_START.rstrip(), *tables]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
