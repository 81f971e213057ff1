"""lightrl status: shows what a run and its launch are doing, from the files in their folders.

Imports neither torch nor Lightning, so it starts quickly.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from lightrl.checks.files import STATE_FILE, STATUS_FILE, with_hosts
from lightrl.checks.printable import count_text, duration_text
from lightrl.trajectory import JsonMapping

_HELP = """\
usage: lightrl status FOLDER

FOLDER is a run's root (trainer.default_root_dir), a run in it (lightning_logs/version_3) or a launch in it (launch-3).
Shows the newest run's phase and iteration, each server's weight version and queue, the last error, and the newest
launch's processes with their logs.
"""
_SILENT_S = 60.0  # a running process writes more often, except in a long phase


def status_text(folder: Path) -> str:
    """Describes the newest run and launch in a folder; raises ValueError if there is neither."""
    root = folder.parent if folder.name.startswith("launch-") else folder
    run = _newest(root, (STATUS_FILE, f"lightning_logs/*/{STATUS_FILE}"))
    launch = _newest(folder, (STATE_FILE, f"launch-*/{STATE_FILE}"))
    if run is None and launch is None:
        raise ValueError(f"{folder} has no run and no launch. Pass the run's trainer.default_root_dir.")
    lines = [*(_run_lines(run) if run else ()), *(_launch_lines(launch) if launch else ())]
    return "\n".join(f"{name:<10} {text}".rstrip() for name, text in lines) + "\n"


def _newest(folder: Path, patterns: Sequence[str]) -> Path | None:
    paths = [path for pattern in patterns for path in folder.glob(pattern)]
    return max(paths, key=lambda path: path.stat().st_mtime, default=None)


def _run_lines(path: Path) -> Iterator[tuple[str, str]]:
    status = json.loads(path.read_text())
    now = time.time()
    yield "run", str(path.parent)
    progress = f", {status['progress']}" if status["progress"] else ""
    duration = duration_text(now - status["since"])
    is_over = status["phase"] in ("done", "failed", "interrupted")
    state = f"{duration} ago" if is_over else f"for {duration} ({_freshness(status, now)})"
    yield "phase", f"{status['phase']}{progress}, {state}"
    total = f" of {status['max_steps']}" if status["max_steps"] > 0 else ""
    iteration, finished = status["iteration"], status["num_finished"]
    unfinished = "" if iteration == finished else f", {finished} finished"
    yield "iteration", f"{iteration}{total}{unfinished}; weight version {status['weight_version']}"
    for number, server in enumerate(status["servers"]):
        reason = f" ({server['reason']})" if server["reason"] else ""
        text = f"version {server['weight_version']}, {count_text(server['num_requests'], 'request')}"
        text += f" of {server['outstanding_tokens']} tokens{reason}"
        yield "" if number else "servers", f"{server['url']}  {server['state']}  {text}"
    if "error" in status:
        yield "error", status["error"].strip().replace("\n", "\n" + " " * 11)


def _freshness(status: JsonMapping, now: float) -> str:
    """Says how old the status is and, if the run's process is on this host, whether that process still runs."""
    age = f"written {duration_text(now - status['at'])} ago"
    is_here = status["host"] == socket.gethostname()
    if is_here and not Path(f"/proc/{status['pid']}").exists() and Path("/proc/self").exists():
        return f"{age}; its process {status['pid']} is gone"
    is_silent = now - status["at"] > _SILENT_S
    return f"{age}; process {status['pid']} on {status['host']}" + (", silent since then" if is_silent else "")


def _launch_lines(path: Path) -> Iterator[tuple[str, str]]:
    launch = json.loads(path.read_text())
    launch["state"] = _text_of(path.with_name("state")) or launch["state"]
    hosts = _text_of(path.with_name("hosts")).split()
    words = [f"job {launch['job']}"] if launch.get("job") else []
    words += [count_text(launch["restarts"], "restart")] if launch.get("restarts") else []
    yield "launch", f"{path.parent}: {', '.join([launch['launcher'], launch['state'], *words])}"
    processes = launch["processes"].items()
    width = max((len(name) for name, _ in processes), default=0)
    for name, process in processes:
        text = f"{name:<{width}}  {process['host']}  {process.get('state', '')}  {process['log']}"
        yield "", with_hosts(text, hosts)
    if "error" in launch:
        yield "error", launch["error"]


def _text_of(path: Path) -> str:
    """Returns the text of a file that a job's script writes; "" if the file does not exist."""
    return path.read_text().strip() if path.exists() else ""


def run(args: Sequence[str]) -> int:
    """Runs `lightrl status FOLDER`; returns 0, or 2 if the folder or command line is wrong."""
    if len(args) != 1 or args[0] in ("-h", "--help"):
        sys.stdout.write(_HELP)
        return 0 if args and args[0] in ("-h", "--help") else 2
    try:
        sys.stdout.write(status_text(Path(args[0])))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"lightrl: {error}\n")
        return 2
    return 0
