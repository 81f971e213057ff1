"""The guard of a command that ends with its parent; ChildProcess (child_process.py) starts one.

It is this file as a script, without packages; PARENT_PID 0 is its own:

    `python -I parent_guard.py PARENT_PID GRACE_S REMOVE COMMAND...`

    parent ══ pipe (stdin) ══► guard ──► command, in a session of its own ──► its children

The guard ends the command when the pipe closes (the parent closed it, exited, or was killed with -9), when the parent
is gone (a forked child may still hold the pipe open), and on SIGTERM. SIGTERM comes first, with GRACE_S seconds to obey
it, or as many as the parent wrote into the pipe before it closed it; then SIGKILL, also for processes that left the
command's group: Linux gives them to the guard when their parents die. If the guard itself is killed, Linux kills the
command. The exit code is the command's, 128 + n for signal n. The file REMOVE, unless it is empty, is deleted at the
end. Descriptors that the parent passes to the guard (`pass_fds`) are the command's too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

_TICK_S = 0.25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def wait_for_parent(parent: int, pipe: int, *, until: Callable[[], object]) -> None:
    """Returns when the process `parent` is gone, when nothing can write to `pipe` any more, or when `until` is true."""
    poller = select.poll()
    poller.register(pipe, 0)  # a hang-up is always reported
    while os.getppid() == parent and not until() and not poller.poll(_TICK_S * 1000):
        pass


def kill_group(group: int) -> None:
    """SIGKILL for all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter for zombies on macOS
        os.killpg(group, signal.SIGKILL)


class _Terminated(Exception):
    """SIGTERM came."""


def adopt_orphans() -> None:
    """Makes Linux give this process its descendants whose parents die, also those of other sessions."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_orphans(spared: int) -> None:
    """Waits for the adopted children that have ended; the command itself is `spared`."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != spared:
            os.waitpid(ended.si_pid, 0)


def kill_descendants(grace_s: float = 0.0) -> None:
    """SIGKILL for all processes below this one until none is left; those that end within the grace do so by themselves.

    Needs `adopt_orphans`: whatever a look at /proc misses, for example since it forked meanwhile, becomes a child of
    this process, which waits until it has no child. Without /proc only a process group can be killed.
    """
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ChildProcessError):  # none is left
        while Path("/proc/self/stat").exists():
            for child in _descendants(os.getpid()) if time.monotonic() >= deadline else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.02)


def main() -> int:
    parent, grace_s, remove, *command = sys.argv[1:]
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, _raise_terminated)
    process: subprocess.Popen[bytes] | None = None
    seconds = float(grace_s)
    try:
        process = started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent, close_fds=False
        )
        wait_for_parent(int(parent) or os.getppid(), 0, until=lambda: _has_ended(started))
        seconds = _grace_in(0, seconds)
    except _Terminated:
        pass
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        return 127
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if process is not None:
            _end(process, seconds)
        if remove:
            Path(remove).unlink(missing_ok=True)
    code = process.returncode if process is not None else 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def _grace_in(pipe: int, default_s: float) -> float:
    """Seconds that the parent wrote into the pipe, if it did."""
    os.set_blocking(pipe, False)
    try:
        return float(os.read(pipe, 64) or default_s)
    except BlockingIOError:  # nothing is written, and a forked child of the parent holds the pipe open
        return default_s


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if process.poll() is None and grace_s > 0:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    process.kill()
    kill_group(process.pid)
    process.wait()
    kill_descendants()


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    reap_orphans(process.pid)
    return process.poll() is not None


def _descendants(ancestor: int) -> list[int]:
    """Process ids below this one; also zombies, whose other threads may still end and have children until then."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone
            # Bytes: a process gives itself any name. It ends at the last parenthesis.
            parent = (folder / "stat").read_bytes().rpartition(b")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(folder.name))
    descendants: list[int] = []
    ancestors = [ancestor]
    while ancestors:
        below = children.get(ancestors.pop(), [])
        descendants += below
        ancestors += below
    return descendants


def die_with_parent() -> None:
    """Linux kills this process when the thread that forked it is gone."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _raise_terminated(number: int, frame: object) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
