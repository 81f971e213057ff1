"""The guard as a process of its own, with commands that try to leave something behind."""

import os
import subprocess
import sys

import psutil
import pytest
from waits import comes_true

from lightrl.concurrency import parent_guard
from lightrl.concurrency.owner import may_run, own_mark
from lightrl.trace.spans import child_bytes

# A child whose first thread has ended, which looks like a zombie while its second thread and its own child run.
COMMAND = """
import ctypes, os, sys, threading, time
if os.fork() == 0:
    os.setsid()
    ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]))
    if (child := os.fork()) == 0:
        time.sleep(60)
    threading.Thread(target=time.sleep, args=(60,)).start()
    start = open(f"/proc/{os.getpid()}/stat", "rb").read().rpartition(b")")[2].split()[19].decode()
    print(os.getpid(), start, child, flush=True)
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to a guard")
@pytest.mark.parametrize(
    ("name", "shown"),
    [(b"\xff\xfe", "\ufffd\ufffd"), (b"a) Z 1 (", "a) Z 1 ("), (b"a\nb c", r"a\nb c")],
    ids=["not UTF-8", "parenthesis", "line break"],
)
def test_a_guard_leaves_nothing_below_a_zombie_whose_threads_run_whatever_its_name(name, shown):
    guard = [sys.executable, "-I", parent_guard.__file__, str(os.getpid()), "0", ""]
    command = [sys.executable, "-S", "-c", COMMAND, name.hex()]
    with subprocess.Popen([*guard, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        zombie, start, child = process.stdout.readline().split()
        assert comes_true(lambda: psutil.Process(int(zombie)).status() == psutil.STATUS_ZOMBIE)
        assert may_run(f"{zombie}-{start}-{own_mark().split('-')[2]}")
        assert shown in child_bytes()
        process.stdin.close()
    assert process.returncode == 128 + 9
    assert not [pid for pid in (zombie, child) if psutil.pid_exists(int(pid))]
