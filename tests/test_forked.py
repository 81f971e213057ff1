"""A forked process against a fresh one: what it reads, prints, returns and leaves; what a fork may not keep open."""

import ast
import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import psutil
import pytest
from waits import LONGEST_S, until

import lightrl

SCRIPT = """
import __main__, json, logging, os, signal, sys, torch
print(json.dumps({
    "arguments": sys.argv, "paths": sys.path, "folder": os.getcwd(), "environment": dict(os.environ),
    "main": [__name__, __main__.__file__, repr(__main__.__spec__), __main__ is sys.modules["__main__"]],
    "parent": os.getppid(), "leads_session": os.getsid(0) == os.getpid(), "input": sys.stdin.read(),
    "descriptors": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "logging": [str(logging.getLogger().handlers), logging.root.level], "torch": torch.get_num_threads(),
    "interrupt": str(signal.getsignal(signal.SIGINT)),
}))
"""

A_THREAD_THEN_ATEXIT = """
import atexit, threading, time
atexit.register(print, "at the end")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread before,", end=" "))).start()
"""


def test_a_forked_process_sees_what_a_fresh_one_sees(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), "--word", "a b"]
    settings: dict[str, Any] = {
        "input": "typed", "capture_output": True, "text": True, "cwd": tmp_path, "start_new_session": True,
        "env": {**os.environ, "RANK": "3", "PYTHONPATH": f"somewhere{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    }  # fmt: skip
    fresh, fork = (json.loads(run(command, **settings).stdout) for run in (subprocess.run, forked.run))
    set_by_imports = {"TORCHINDUCTOR_CACHE_DIR", "PYTORCH_NVML_BASED_CUDA_CHECK"}
    for found in (fresh, fork):
        found["environment"] = {k: v for k, v in found["environment"].items() if k not in set_by_imports}
    assert fork == fresh


@pytest.mark.parametrize(
    ("do", "code"),
    [
        *[("raise SystemExit(7)", 7), ("raise ValueError('on purpose')", 1), ("os.kill(os.getpid(), 9)", -9)],
        *[("os.kill(os.getpid(), 15)", -15), ("raise KeyboardInterrupt", -2)],
        *[("import atexit; atexit.register(print, 'at the end')", 0), ("raise SystemExit('in words')", 1)],
        (A_THREAD_THEN_ATEXIT, 0),
    ],
)
def test_it_ends_as_a_fresh_one_ends(tmp_path: Path, do: str, code: int) -> None:
    (tmp_path / "script.py").write_text(f"import os\n{do}")
    command = [sys.executable, str(tmp_path / "script.py")]
    fresh, fork = (run(command, capture_output=True, text=True) for run in (subprocess.run, forked.run))
    assert (fork.returncode, fork.stderr[-40:]) == (fresh.returncode, fresh.stderr[-40:])
    assert fork.returncode == code
    assert fork.stdout == fresh.stdout
    assert ("at the end" in fork.stdout) == ("atexit" in do)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"env": {**os.environ, "OMP_NUM_THREADS": "3"}}, "OMP_NUM_THREADS may matter at an import"),
        ({"preexec_fn": os.getpid}, "a setting of Popen"),
    ],
)
def test_what_a_fork_cannot_do_is_done_by_a_fresh_process(settings, reason, caplog):
    caplog.set_level(logging.DEBUG, "forked")
    with forked.Popen([sys.executable, "-m", "this"], stdout=subprocess.PIPE, **settings) as process:
        assert process.communicate()[0].startswith(b"The Zen")
    assert reason in caplog.text


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield child
            yield from run_at_import(child)


def test_no_import_of_lightrl_reads_a_variable_so_its_own_never_prevent_a_fork(monkeypatch):
    """As LIGHTRL_RUN_START, which each run sets: the ranks of later tests in its file would all be fresh processes."""
    monkeypatch.setenv("LIGHTRL_RUN_START", "2026-11-30T00:01:00")
    assert forked.reason_against([sys.executable, "-m", "this"], dict(os.environ), {"cwd": None}) is None
    texts = {path: path.read_text(encoding="utf-8") for path in Path(lightrl.__file__).parent.rglob("*.py")}
    reading = {path: text for path, text in texts.items() if "environ" in text or "getenv" in text}
    assert len(reading) > 10
    for path, text in reading.items():
        names = {node.attr for node in run_at_import(ast.parse(text)) if isinstance(node, ast.Attribute)}
        assert not names & {"environ", "getenv"}, path


def test_the_run_of_a_worker_that_dies_ends_though_a_fork_of_the_worker_goes_on(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import os, pathlib, signal\n"
        "def test_it():\n"
        "    child = os.fork()\n"
        "    if child == 0:\n        signal.pause()\n"
        f"    pathlib.Path({str(tmp_path / 'child')!r}).write_text(str(child))\n"
        "    os._exit(7)\n"
    )
    (tmp_path / "pytest.ini").touch()
    words = ["-m", "pytest", "-p", "worker_pipes", "-n", "1", "--dist", "worksteal", "--max-worker-restart", "0"]
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    with (tmp_path / "output").open("w+") as output:
        command, environment = [sys.executable, *words, "."], {**os.environ, "PYTHONPATH": paths}
        try:
            done = subprocess.run(
                command, cwd=tmp_path, env=environment, stdout=output, stderr=output, timeout=LONGEST_S
            )
        finally:
            os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
        output.seek(0)
        assert "crashed while running 'test_it.py::test_it'" in output.read()
    assert done.returncode == 1


@pytest.mark.extra
def test_the_fork_server_ends_with_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import forked, os, psutil, sys, time; forked.server.environment = dict(os.environ)\n"
        "forked.run([sys.executable, '-m', 'this'], stdout=-3)\n"
        "print(psutil.Process().children()[0].pid, flush=True); time.sleep(60)"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as asker:
        server = psutil.Process(int(asker.stdout.readline()))
        asker.send_signal(signal.SIGKILL)
    asyncio.run(until(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE))
