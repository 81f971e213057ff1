"""lightrl inspect: shows runs as a page in the browser, or writes them as one file that needs no server.

Imports neither torch nor Lightning.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
import time
import webbrowser
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightrl.commands.inspect.answers import Answers
from lightrl.commands.inspect.run_folder import Json, find_runs
from lightrl.commands.inspect.server import PAGE, PageServer

_DESCRIPTION = """\
Shows runs on a local page: curves, trajectories token by token, timelines, problems, settings. It also works during a
run, and sends no data anywhere. RUN is a run's folder, or a folder with runs, such as trainer.default_root_dir. To see
the page on another machine, run ssh -L PORT:127.0.0.1:PORT this-machine there, and pass --port PORT here.
"""


def run(args: Sequence[str]) -> int:
    """Runs `lightrl inspect RUN ...`; returns 0, or 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="lightrl inspect", description=_DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 picks a free one")
    parser.add_argument("--export", type=Path, metavar="PAGE.html", help="write a single file to share instead")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    options = parser.parse_args(list(args))
    try:
        answers = Answers(find_runs(options.runs))
        if options.export is not None:
            num, total = export(answers, options.export)
            size = f"{options.export.stat().st_size / 2**20:.1f} MiB"
            sys.stdout.write(f"{options.export}: {size}, {num:,} of {total:,} trajectories, opens in any browser\n")
            return 0
        answers.start()
        server = PageServer(answers, port=options.port)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"lightrl: {error}\n")
        return 2
    server.start()
    sys.stdout.write(f"{server.url}\nCtrl-C stops the server.\n")
    sys.stdout.flush()
    if not options.no_browser:
        webbrowser.open(server.url)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.close()
    return 0


NUM_TRAJECTORIES = 200  # trajectories exported per run, the same number from each iteration
NUM_ITERATIONS = 5  # timelines exported per run, from the last iterations that have a trace
MAX_BYTES = 64 * 2**20  # total size of a run's exported trajectories


def export(answers: Answers, path: Path) -> tuple[int, int]:
    """Writes the page with all answers; returns the number of trajectories in it and in the runs."""
    names = ("metrics.js", "inspect.js", "inspect.css")
    metrics, script, style = ((PAGE / name).read_text(encoding="utf-8") for name in names)
    script = metrics + script
    saved = dict(_answers(answers))
    data = json.dumps(saved).replace("<", "\\u003c")  # a `</script>` in a completion would end the element early
    policy = (
        f"default-src 'none'; script-src 'sha256-{_digest(script)}'; style-src 'sha256-{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = (PAGE / "inspect.html").read_text(encoding="utf-8")
    for old, new in {
        '<meta charset="utf-8">': f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{policy}">',
        '<link rel="stylesheet" href="inspect.css">': f"<style>{style}</style>",
        '<script src="metrics.js" defer></script>\n<script src="inspect.js" defer></script>': "",
        "</body>": f'<script type="application/json" id="answers">{data}</script><script>{script}</script></body>',
    }.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", errors="backslashreplace")
    tables = [table for question, table in saved.items() if question.startswith("table?")]
    return sum(len(table["rows"]) for table in tables), sum(table["sampled_from"] for table in tables)


def _answers(answers: Answers) -> Iterator[tuple[str, Json]]:
    """Yields each request that the page makes, and its answer."""
    runs = answers.answer("runs", {})
    for number, run in enumerate(answers.runs):
        run.index.update()
        runs[number]["traced"] = runs[number]["traced"][-NUM_ITERATIONS:]
        values = {"run": str(number)}
        for question in ("curves", "problems"):
            yield f"{question}?run={number}", answers.answer(question, values)
        for iteration in runs[number]["traced"]:
            yield (
                f"timeline?run={number}&iteration={iteration}",
                answers.answer("timeline", {**values, "iteration": str(iteration)}),
            )
        rows, trajectories, size = [], {}, 0
        for row in run.index.sample(NUM_TRAJECTORIES):
            if row["group"] is not None:
                shown = answers.answer("trajectory", {**values, "id": str(row["id"])})
                shown["images"] = [_image(answers, values, row["id"], index) for index in range(shown["num_images"])]
                size += len(json.dumps(shown))
                if size > MAX_BYTES:
                    break
                trajectories[row["id"]] = shown
            rows.append(row)
        for row_id, shown in trajectories.items():
            shown["group_rows"] = [other for other in shown["group_rows"] if other["id"] in trajectories]
            yield f"trajectory?run={number}&id={row_id}", shown
        sampled_from = run.index.page(limit=1)["total"]
        yield f"table?run={number}", {"rows": rows, "missing_files": 0, "sampled_from": sampled_from}
    yield from (("runs", runs), ("settings", answers.answer("settings", {})))


def _image(answers: Answers, values: dict[str, str], row_id: int, number: int) -> str | None:
    try:
        kind, content = answers.image({**values, "id": str(row_id), "number": str(number)})
    except (LookupError, ValueError):
        return None
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
