"""lightrl inspect: a run as a page in the browser, or as one file. Imports neither torch nor Lightning."""

from __future__ import annotations

import argparse
import sys
import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from lightrl.inspect.answers import Answers
from lightrl.inspect.export import export
from lightrl.inspect.run_folder import find_runs
from lightrl.inspect.server import PageServer

_DESCRIPTION = """\
Shows runs on a page of this machine: curves, trajectories token by token, timelines, problems, settings. It works while
a run goes on and sends nothing anywhere. RUN is a run's folder, or one with runs in it, such as
trainer.default_root_dir. From another machine: ssh -L PORT:127.0.0.1:PORT that-machine, and --port PORT here.
"""


def run(args: Sequence[str]) -> int:
    """`lightrl inspect RUN ...`; returns 0, or 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="lightrl inspect", description=_DESCRIPTION)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; a free one if 0")
    parser.add_argument("--export", type=Path, metavar="PAGE.html", help="write one file instead, to send to somebody")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    try:
        options = parser.parse_args(list(args))
    except SystemExit as end:
        return int(end.code or 0)
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
    sys.stdout.write(f"{server.url}\nCtrl-C ends it.\n")
    sys.stdout.flush()
    if not options.no_browser:
        webbrowser.open(server.url)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        server.close()
    return 0
