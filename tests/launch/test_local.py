"""The local launcher with small programs as ranks and servers: order of the end, failures, retries, kill -9."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import forked
import psutil
import pytest
from waits import comes_true

from lightrl.commands.launch import local
from lightrl.commands.launch.launcher import make_folder, write_files
from lightrl.commands.launch.local import LocalLauncher
from lightrl.commands.launch.plan import Plan, Process
from lightrl.commands.launch.settings import Launch, Layout, Recover

LONGEST_S = 600.0
# A program that notes in a file that all share when it starts and when it is asked to end.
NOTES = """
import os, signal, sys, time
notes, name = sys.argv[1], sys.argv[2]
def note(word):
    with open(notes, "a") as file:
        file.write(f"{name} {word}\\n")
def end(*_):
    time.sleep(0.1)
    note("ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
note("started")
"""
WAITS = NOTES + "time.sleep(600)"


def plan_of(folder: Path, programs: dict[str, str], **launch) -> Plan:
    """A plan of these programs, by name of their process."""
    notes = str(folder / "notes")
    processes = tuple(
        Process(name, name.split("-")[0], 0, (index,), (sys.executable, "-c", source, notes, name))
        for index, (name, source) in enumerate(programs.items())
    )
    place = str(make_folder(folder))
    plan = Plan(Launch(**launch), Layout(1), place, ("here",), 29500, len(programs), True, processes, {})
    write_files(plan, "", {})
    return plan


def notes(folder: Path) -> list[str]:
    file = folder / "notes"
    return file.read_text().splitlines() if file.exists() else []


def wait_for(lines: set[str], folder: Path) -> None:
    assert comes_true(lambda: lines <= set(notes(folder)), LONGEST_S), notes(folder)


def started(plan: Plan, write: Callable[[str], object] = lambda line: None) -> LocalLauncher:
    launcher = LocalLauncher(plan, write=write)
    launcher.start()
    return launcher


def state(plan: Plan) -> dict:
    return json.loads((Path(plan.folder) / "launch.json").read_text())


def test_the_launch_ends_when_the_ranks_are_done_and_servers_end_after_them(tmp_path):
    programs = {"trainer-0": NOTES + "print('iteration 1'); time.sleep(0.5); end()", "servers-0": WAITS}
    plan, shown = plan_of(tmp_path, programs), []
    launcher = started(plan, shown.append)
    wait_for({"servers-0 started"}, tmp_path)
    assert launcher.wait() == 0
    assert notes(tmp_path)[-2:] == ["trainer-0 ended", "servers-0 ended"]
    assert shown == ["trainer-0 | iteration 1\n"]
    assert state(plan)["state"] == "ended"
    assert {one["state"] for one in state(plan)["processes"].values()} == {"exit code 0"}


def test_a_rank_that_fails_ends_the_others_and_its_log_is_shown(tmp_path):
    programs = {"trainer-0": WAITS, "trainer-1": NOTES + "sys.exit('out of memory')", "servers-0": WAITS}
    plan, shown = plan_of(tmp_path, programs), []
    assert started(plan, shown.append).wait() == 1
    assert "trainer-1 failed with exit code 1" in shown[-1]
    assert "out of memory" in shown[-1]
    assert state(plan)["error"] == "trainer-1 failed with exit code 1"


def test_servers_that_end_before_the_trainer_fail_the_launch(tmp_path):
    plan = plan_of(tmp_path, {"trainer-0": WAITS, "servers-0": NOTES})
    assert started(plan).wait() == 1
    assert state(plan)["error"].startswith("servers-0 failed")


def test_a_retry_starts_everything_again_from_the_newest_checkpoint(tmp_path):
    fails_once = NOTES + "note(' '.join(sys.argv[3:])); sys.exit(0 if '--ckpt_path' in sys.argv else 3)"
    plan = plan_of(tmp_path, {"trainer-0": fails_once, "servers-0": WAITS}, recover=Recover(retries=1))
    launcher = started(plan)
    wait_for({"servers-0 started"}, tmp_path)
    assert launcher.wait() == 0
    assert "trainer-0 --ckpt_path last" in notes(tmp_path)
    assert state(plan)["restarts"] == 1


def test_end_asks_ranks_first_and_kills_what_does_not_end(tmp_path):
    stubborn = NOTES + "signal.signal(signal.SIGTERM, signal.SIG_IGN); note('ready'); time.sleep(600)"
    plan = plan_of(tmp_path, {"trainer-0": WAITS, "trainer-1": stubborn, "servers-0": WAITS}, warning_s=1)
    launcher = started(plan)
    wait_for({"trainer-0 started", "trainer-1 ready", "servers-0 started"}, tmp_path)
    launcher.end()
    assert notes(tmp_path)[-2:] == ["trainer-0 ended", "servers-0 ended"]
    assert state(plan)["processes"]["trainer-1"]["state"] == "signal SIGKILL"
    launcher.end()


def test_setup_lines_run_before_each_process_inside_its_container(tmp_path):
    settings = {"setup": ["export WORD=loaded"], "container": "env INSIDE=yes"}
    program = NOTES + "note(os.environ['WORD'] + os.environ['INSIDE'])"
    assert started(plan_of(tmp_path, {"trainer-0": program}, **settings)).wait() == 0
    assert "trainer-0 loadedyes" in notes(tmp_path)


LAUNCHER = """
import sys
from pathlib import Path
from test_local import WAITS, plan_of, started
started(plan_of(Path(sys.argv[1]), {"trainer-0": WAITS, "servers-0": WAITS}))
sys.stdin.read()
"""


def test_no_process_outlives_a_launcher_that_is_killed(tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    command = [sys.executable, str(tmp_path / "launcher.py"), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with forked.Popen(command, stdin=subprocess.PIPE, env=environment) as launcher:
        wait_for({"trainer-0 started", "servers-0 started"}, tmp_path)
        children = psutil.Process(launcher.pid).children(recursive=True)
        assert len(children) == 4  # two guards and what they guard
        launcher.kill()
    _, alive = psutil.wait_procs(children, LONGEST_S)
    assert not alive


@pytest.mark.parametrize("name", ["token", "config.yaml"])  # the configuration may hold tokens of loggers
def test_what_may_hold_a_token_is_for_this_user_alone(tmp_path, name):
    plan = plan_of(tmp_path, {})
    assert (Path(plan.folder) / name).stat().st_mode & 0o777 == 0o600


def test_a_guard_that_does_not_answer_is_killed_and_named(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "KILL_WAIT_S", 0.2)
    said = []
    launcher = started(plan_of(tmp_path, {"trainer-0": WAITS}, warning_s=1), said.append)
    wait_for({"trainer-0 started"}, tmp_path)
    guard = psutil.Process(launcher.hosts[0].children["trainer-0"].pid)
    processes = [guard, *guard.children(recursive=True)]
    guard.suspend()
    launcher.end()
    assert any("The guard of trainer-0" in line for line in said)
    _, alive = psutil.wait_procs(processes, LONGEST_S)
    assert not alive


@pytest.mark.parametrize("number", [0, 1])
def test_each_launch_has_a_folder_of_its_own(tmp_path, number):
    for _ in range(number):
        make_folder(tmp_path)
    assert make_folder(tmp_path).name == f"launch-{number}"
