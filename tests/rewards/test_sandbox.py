"""LocalSandbox against hostile programs: each is stopped in time and leaves nothing behind.

A program that could harm this machine if a layer failed looks first whether the layer is there.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lightrl.errors import RewardError
from lightrl.rewards.sandbox import LAYERS, Limits, LocalSandbox, Run

WITHOUT_NAMESPACES = ("private_user", "landlock", "seccomp")


def refusal(sandbox: LocalSandbox) -> str | None:
    try:
        sandbox.run("", "", Limits())
    except RewardError as error:
        return str(error)
    return None


@pytest.fixture(scope="module", params=[LAYERS, WITHOUT_NAMESPACES], ids=["all layers", "without namespaces"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox(layers=request.param)
    if refusal(sandbox):
        pytest.skip(str(refusal(sandbox)))
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def namespaced() -> Iterator[LocalSandbox]:
    sandbox = LocalSandbox()
    if refusal(sandbox) or "namespaces" not in sandbox.run("", "", Limits()).layers:
        pytest.skip("this system refuses namespaces")
    yield sandbox
    sandbox.close()


def run(sandbox: LocalSandbox, program: str, stdin: str = "", **limits: float) -> Run:
    """Runs it and checks that no process and no folder is left."""
    result = sandbox.run(program, stdin, Limits(**{"cpu_s": 2, "wall_s": 2, **limits}))
    assert sandbox._guard is not None
    assert psutil.Process(sandbox._guard.pid).children(recursive=True) == []
    assert list(Path(tempfile.gettempdir()).glob("lightrl-sandbox-*/program.py")) == []
    return result


def processes_with(mark: str) -> list[psutil.Process]:
    return [
        item for item in psutil.process_iter(["cmdline"]) if any(mark in word for word in item.info["cmdline"] or ())
    ]


def test_a_program_reads_and_prints(sandbox):
    result = run(sandbox, "import sys; print(sys.stdin.read().upper())", "grüße\n")
    assert (result.stdout, result.exit_code, result.stopped_by) == ("GRÜSSE\n\n", 0, None)


def test_an_error_is_on_stderr(sandbox):
    result = run(sandbox, "1 / 0")
    assert (result.exit_code, result.stopped_by) == (1, None)
    assert "ZeroDivisionError" in result.stderr


@pytest.mark.parametrize(
    ("program", "cause"),
    [
        ("import time; time.sleep(60)", "time"),
        ("import signal, time\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: time.sleep(1)", "time"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", "time"),
        ("while True: print('x' * 1000)", "output"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", "output"),
        ("x = []\nwhile True: x.append(bytearray(1 << 24))", "memory"),
        ("x = 'a' * (1 << 40)", "memory"),
    ],
    ids=["sleeps", "ignores signals", "stops itself", "prints", "prints errors", "collects memory", "asks for memory"],
)
def test_a_program_that_takes_too_much_is_stopped(sandbox, program, cause):
    wall_s = 0.4 if cause == "time" else 10
    assert run(sandbox, program, wall_s=wall_s, memory_mib=128).stopped_by == cause


def test_processor_time_is_bounded_apart_from_the_wall_clock(namespaced):
    result = run(namespaced, "while True: pass", cpu_s=1, wall_s=20)
    assert result.stopped_by == "time"
    assert 0.8 < result.cpu_s < 2.5


def test_shared_memory_counts_where_there_are_namespaces(namespaced):
    program = "import mmap, time\nm = mmap.mmap(-1, 200 << 20)\nm.write(b'1' * (200 << 20))\ntime.sleep(5)"
    assert run(namespaced, program, memory_mib=128, wall_s=10).stopped_by == "memory"


def test_the_environment_and_other_processes_are_not_to_be_seen(sandbox):
    os.environ["LIGHTRL_TEST_SECRET"] = "do-not-tell"
    program = f"""
import os
print(sorted(os.environ))
for path in ("/proc/{os.getpid()}/environ", "/proc/self/environ", "/proc", "/root", "/home", "/etc/passwd"):
    try:
        print(open(path, "rb").read() if path.endswith(("environ", "passwd")) else os.listdir(path))
    except OSError:
        print("no")
"""
    result = run(sandbox, program)
    assert "do-not-tell" not in result.stdout
    names, *answers = result.stdout.splitlines()
    assert set(names.strip("[]").replace("'", "").split(", ")) <= {
        *("HOME", "TMPDIR", "PATH", "LANG", "LC_CTYPE", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    }
    assert answers == ["no"] * 6


def test_files_outside_its_folder_cannot_be_changed(sandbox, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("here")
    for folder in (victim, *victim.parents):
        if str(folder).startswith(str(tmp_path.parents[1])):
            folder.chmod(0o777)
    program = f"""
import os, shutil
for action in (
    lambda: os.remove({str(victim)!r}),
    lambda: open({str(victim)!r}, "w"),
    lambda: os.rename({str(victim)!r}, {str(victim) + "2"!r}),
    lambda: open({str(tmp_path / "new")!r}, "w"),
    lambda: os.truncate({str(victim)!r}, 0),
    lambda: shutil.rmtree({str(tmp_path)!r}),
):
    try:
        action()
        print("done")
    except OSError:
        print("no")
open("own", "w").write("mine")
print(open("own").read())
"""
    assert run(sandbox, program).stdout.split() == [*["no"] * 6, "mine"]
    assert victim.read_text() == "here"


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX"])
def test_the_network_is_closed(sandbox, family):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = {"AF_INET": f"('127.0.0.1', {server.getsockname()[1]})", "AF_INET6": "('::1', 1)"}.get(
            family, "'\\0x'"
        )
        result = run(sandbox, f"import socket\nsocket.socket(socket.{family}).connect({address})\nprint('connected')")
    assert "PermissionError" in result.stderr
    assert result.stdout == ""


def test_huge_files_and_many_files_are_refused(sandbox):
    assert "OSError" in run(sandbox, "f = open('a', 'wb')\nwhile True: f.write(b'0' * (1 << 20))", file_mib=4).stderr
    program = "files = [open('/dev/null') for _ in range(10000)]"
    assert "Too many open files" in run(sandbox, program).stderr


def test_all_files_together_are_bounded_where_there_are_namespaces(namespaced):
    program = "for i in range(100): open(f'f{i}', 'wb').write(b'0' * (1 << 20))"
    assert "No space left" in run(namespaced, program, file_mib=4).stderr
    assert "No space left" in run(namespaced, "for i in range(100): open(f'f{i}', 'wb')", max_files=50).stderr


def test_a_daemon_does_not_outlive_the_program(sandbox):
    program = """
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "mark-of-a-daemon"])
    os._exit(0)
os.wait()
print("gone")
"""
    assert run(sandbox, program).stdout == "gone\n"
    assert processes_with("mark-of-a-daemon") == []


FORK_BOMB = """
import os, resource
is_bounded = resource.getrlimit(resource.RLIMIT_NPROC)[1] <= {bound} and os.getuid() != 0
assert is_bounded, "without a bound of its own this program does nothing"
for _ in range({rounds}):
    try:
        os.fork()
    except OSError:
        pass
while True:
    pass
"""


@pytest.mark.parametrize("rounds", [3, 12], ids=["8 processes at most", "4096 at most"])
def test_a_fork_bomb_stays_below_its_bound_and_dies(sandbox, rounds):
    result = run(sandbox, FORK_BOMB.format(rounds=rounds, bound=10), max_processes=10, cpu_s=1, wall_s=0.5)
    assert result.stopped_by in ("time", "processes") or result.exit_code != 0
    assert processes_with("program.py") == []


def test_threads_count_as_processes(sandbox):
    program = """
import threading, time
for _ in range(40):
    threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
"""
    result = run(sandbox, program, max_processes=8)
    assert "can't start new thread" in result.stderr or result.stopped_by == "processes"


def test_signals_reach_nobody_outside(namespaced):
    program = """
import os, signal
assert os.getuid() != 0 or os.getppid() == 1
for target in (os.getppid(), TARGET):
    try:
        os.kill(target, 0)
        print("reached")
    except OSError:
        print("no")
""".replace("TARGET", str(os.getpid()))
    assert run(namespaced, program).stdout.split() == ["no", "no"]


def test_the_next_run_finds_nothing_of_the_last(sandbox):
    run(sandbox, "open('left', 'w').write('x')\nimport os; os.mkdir('locked'); os.chmod('locked', 0)")
    assert run(sandbox, "import os; print(os.listdir('.'))").stdout == "['program.py']\n"


def test_kill_9_of_who_asked_ends_the_program(tmp_path):
    script = """
from lightrl.rewards.sandbox import Limits, LocalSandbox
program = '''
import sys, os
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", "mark-of-an-orphan"])
'''
LocalSandbox().run(program, "", Limits(wall_s=60))
"""
    asker = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 20
    while not processes_with("mark-of-an-orphan") and time.monotonic() < deadline and asker.poll() is None:
        time.sleep(0.05)
    if asker.poll() is not None:
        pytest.skip("no sandbox here")
    assert processes_with("mark-of-an-orphan")
    os.kill(asker.pid, signal.SIGKILL)
    asker.wait()
    while processes_with("mark-of-an-orphan") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with("mark-of-an-orphan") == []


@pytest.mark.parametrize("layers", [(), ("landlock",), ("namespaces",)], ids=["none", "landlock", "namespaces"])
def test_a_program_is_refused_where_nothing_would_hold_it(layers):
    sandbox = LocalSandbox(layers=layers)
    try:
        assert "nothing protects" in str(refusal(sandbox))
    finally:
        sandbox.close()


def test_unknown_layers_and_limits_that_are_not_positive_are_refused():
    with pytest.raises(ValueError, match=r"layers=\['walls'\] do not exist"):
        LocalSandbox(layers=["walls"])
    with pytest.raises(ValueError, match="wall_s must be a finite number above 0, got 0"):
        Limits(wall_s=0)


def test_a_guard_that_died_is_replaced(namespaced):
    assert namespaced._guard is not None
    namespaced._guard.kill()
    namespaced._guard.wait()
    assert run(namespaced, "print(1)").stdout == "1\n"
    assert json.loads(run(namespaced, "print([1])").stdout) == [1]
