"""A command under its guard: its variables and output, and how it ends."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waits import comes_true

from lightrl.concurrency import child_process
from lightrl.concurrency.child_process import ChildProcess, ending_of, import_path

OBSTINATE = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True)\n"


def start(tmp_path: Path, code: str, **settings: object) -> ChildProcess:
    with (tmp_path / "log").open("wb") as log:
        return ChildProcess(
            [sys.executable, "-c", code],
            environment={**os.environ, "WORD": "given"},
            log=log.fileno(),
            **{"grace_s": 60.0, **settings},
        )


def is_ready(tmp_path: Path) -> bool:
    return "ready" in (tmp_path / "log").read_text()


def test_it_gets_its_variables_and_leaves_its_output_and_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    child = start(tmp_path, "import os; print(os.environ['WORD']); raise SystemExit(3)", remove=tmp_path / "secret")
    assert asyncio.run(child.ended(60.0))
    assert (tmp_path / "log").read_text() == "given\n"
    assert ending_of(child.code or 0) == "exit code 3"
    assert not (tmp_path / "secret").exists()
    child.end(0.0)  # again, after its end


def test_what_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    child = start(tmp_path, OBSTINATE + "time.sleep(600)")
    assert comes_true(lambda: is_ready(tmp_path))
    assert not asyncio.run(child.ended(0.1))
    child.end(0.1)
    assert ending_of(child.code or 0) == "signal SIGKILL"


def test_a_guard_that_does_not_answer_is_killed_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "KILL_WAIT_S", 0.2)
    child = start(tmp_path, OBSTINATE + "time.sleep(600)")
    assert comes_true(lambda: is_ready(tmp_path))
    (command,) = psutil.Process(child.pid).children()
    os.kill(child.pid, signal.SIGSTOP)
    child.end(0.0)
    assert child.code == -signal.SIGKILL
    assert comes_true(lambda: not command.is_running() or command.status() == psutil.STATUS_ZOMBIE)


def test_a_module_gets_a_socket_and_shows_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "echoing.py").write_text(
        "from lightrl.concurrency.child_process import connect_to_parent\n"
        "def main():\n"
        "    parent = connect_to_parent()\n"
        "    while data := parent.recv(100):\n"
        "        parent.sendall(data)\n"
    )
    child, end = ChildProcess.of_module("echoing", import_path(str(tmp_path)), log=subprocess.PIPE)
    with end:
        end.sendall(b"word")
        assert end.recv(100) == b"word"
        child.show_stack()
        while b"echoing.py" not in (line := child.output.readline()):
            assert line
    assert asyncio.run(child.ended(60.0))
    assert child.end(0.0) == 0


def test_a_forked_process_that_holds_the_pipe_delays_no_end(tmp_path: Path) -> None:
    child = start(tmp_path, "import time; print('ready', flush=True); time.sleep(600)")
    assert comes_true(lambda: is_ready(tmp_path))
    if (forked := os.fork()) == 0:
        time.sleep(600)
    try:
        child.ask_to_end(60.0)
        assert comes_true(lambda: child.code == 128 + signal.SIGTERM)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
        child.end(0.0)


def test_an_exit_code_that_no_signal_has_is_an_exit_code() -> None:
    assert [ending_of(code) for code in (0, 255, 134, -9)] == [
        "exit code 0",
        "exit code 255",
        "signal SIGABRT",
        "signal SIGKILL",
    ]
