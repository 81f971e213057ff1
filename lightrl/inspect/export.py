"""The page with its answers in one file, to send to somebody: it asks nothing of any server."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightrl.inspect.answers import Answers
from lightrl.inspect.server import PAGE

NUM_TRAJECTORIES = 200  # of each run, evenly over its iterations
NUM_ITERATIONS = 5  # of each run's trace, the last ones
MAX_BYTES = 64 * 2**20  # of the trajectories of a run


def export(answers: Answers, path: Path) -> None:
    """Writes the page with the curves, complaints, and some trajectories and time lines of all runs."""
    script, style = ((PAGE / name).read_text(encoding="utf-8") for name in ("inspect.js", "inspect.css"))
    # `<` would end the element early: a completion may have `</script>`.
    data = json.dumps(dict(_answers(answers))).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = (PAGE / "inspect.html").read_text(encoding="utf-8")
    for old, new in {
        '<meta charset="utf-8">': f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}">',
        '<link rel="stylesheet" href="inspect.css">': f"<style>{style}</style>",
        '<script src="inspect.js" defer></script>': "",
        "</body>": f'<script type="application/json" id="answers">{data}</script><script>{script}</script></body>',
    }.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")


def _answers(answers: Answers) -> Iterator[tuple[str, Any]]:
    """The page's questions, as it asks them, each with its answer."""
    runs = answers.answer("runs", {})
    for number, one in enumerate(answers.runs):
        one.index.update()
        runs[number]["traced"] = runs[number]["traced"][-NUM_ITERATIONS:]
        values = {"run": str(number)}
        for question in ("curves", "complaints"):
            yield f"{question}?run={number}", answers.answer(question, values)
        for iteration in runs[number]["traced"]:
            yield (
                f"timeline?run={number}&iteration={iteration}",
                answers.answer("timeline", {**values, "iteration": str(iteration)}),
            )
        rows, size = [], 0
        for row in _spread(answers, number):
            if row["group"] is None:
                rows.append(row)
                continue
            shown = answers.answer("trajectory", {**values, "id": str(row["id"])})
            shown["pictures"] = [_picture(answers, values, row["id"], index) for index in range(shown["num_pictures"])]
            size += len(json.dumps(shown))
            if size > MAX_BYTES:
                break
            rows.append(row)
            yield f"trajectory?run={number}&id={row['id']}", shown
        yield f"table?run={number}", {"total": len(rows), "rows": rows, "missing_files": 0}
    yield "runs", runs


def _spread(answers: Answers, number: int) -> list[dict[str, Any]]:
    """Rows evenly over the run, whole groups as far as they go."""
    index = answers.runs[number].index
    total = index.page(limit=1)["total"]
    if total <= NUM_TRAJECTORIES:
        return list(index.page(limit=NUM_TRAJECTORIES)["rows"])
    rows: dict[int, dict[str, Any]] = {}
    for part in range(20):
        start = part * (total - 1) // 19
        near = index.page(offset=min(start, total - 1), limit=1)["rows"]
        for row in index.group_of(near[0]["iteration"], near[0]["group"]) if near[0]["group"] is not None else near:
            rows[row["id"]] = row
        if len(rows) >= NUM_TRAJECTORIES:
            break
    return list(rows.values())[:NUM_TRAJECTORIES]


def _picture(answers: Answers, values: dict[str, str], row_id: int, number: int) -> str | None:
    try:
        kind, content = answers.picture({**values, "id": str(row_id), "number": str(number)})
    except LookupError:
        return None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
