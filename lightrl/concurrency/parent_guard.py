"""The guard process, which ends a command when the parent exits. ChildProcess (child_process.py) starts it.

The guard runs this file as a script that imports only the standard library. If PARENT_PID is 0, it watches the process
that started it, and there is no pipe:

    `python -I parent_guard.py PARENT_PID GRACE_S REMOVE COMMAND...`

    parent ══ pipe (stdin) ══► guard ──► command, in its own session ──► its children

The guard ends the command if the parent writes to the pipe, if the pipe closes (the parent exited or was killed with
-9), if the parent dies while a forked child holds the pipe open, or on SIGTERM. It sends the command SIGTERM, waits
GRACE_S seconds or as many as the parent wrote, and sends SIGKILL to the command's group. On Linux, a process that
left the group becomes the guard's child when its parent dies; it gets a second to clean up, then SIGKILL. If the guard
itself is killed, Linux kills the command. The guard passes SIGUSR1 on to the command. The exit code is the command's,
or 128 + n for signal n. The file REMOVE, if given, is deleted at the end. The command inherits `pass_fds`.
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
from pathlib import Path

_TICK_S = 0.25
_ORPHANS_GRACE_S = 1.0
_MAX_DESCRIPTOR = 1 << 16
_ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def kill_group(group: int) -> None:
    """Sends SIGKILL to all processes in a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS denies permission for zombies
        os.killpg(group, signal.SIGKILL)


class _Terminated(Exception):
    """SIGTERM was received."""


def main() -> int:
    parent, grace_s, remove, *command = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # makes the guard the parent of descendants whose parents die, in any session
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, _raise_terminated)
    process: subprocess.Popen[bytes] | None = None
    seconds = float(grace_s)
    try:
        process = started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent, close_fds=False
        )
        os.closerange(3, _MAX_DESCRIPTOR)  # so that the parent sees its pipes close when the command ends
        signal.signal(signal.SIGUSR1, lambda number, _: started.send_signal(number))
        _wait(started, int(parent))
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):  # the parent wrote nothing, and its forked child holds the pipe open
            seconds = float(os.read(0, 64) or seconds)
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


def _wait(process: subprocess.Popen[bytes], parent: int) -> None:
    poller = select.poll()
    poller.register(0, select.POLLIN if parent else 0)  # poll always reports a hang-up
    with contextlib.suppress(AttributeError, OSError):  # without pidfds, the loop below polls
        poller.register(os.pidfd_open(process.pid), select.POLLIN)
    parent = parent or os.getppid()
    while os.getppid() == parent and not poller.poll(_TICK_S * 1000) and process.poll() is None:
        with contextlib.suppress(ChildProcessError):  # reaps adopted children that have exited
            while (ended := os.waitid(os.P_ALL, 0, _ENDED)) and ended.si_pid != process.pid:
                os.waitpid(ended.si_pid, 0)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Sends the command SIGTERM; after `grace_s`, sends SIGKILL to the command, its group and all descendants."""
    if process.poll() is None and grace_s > 0:
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    process.kill()
    kill_group(process.pid)
    process.wait()
    _kill_descendants()


def _kill_descendants() -> None:
    """Waits a second for this process's descendants to exit, then sends SIGKILL until none is left.

    A process that a scan of /proc misses, e.g. one just forked, becomes a child of this process when its parent dies,
    so a later scan finds it. Does nothing without /proc.
    """
    deadline = time.monotonic() + _ORPHANS_GRACE_S
    with contextlib.suppress(ChildProcessError):  # none is left
        while Path("/proc/self/stat").exists():
            for child in _descendants(os.getpid()) if time.monotonic() >= deadline else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(0.02)


def _descendants(ancestor: int) -> list[int]:
    """Lists the descendants' process ids, including zombies: their remaining threads may have children."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has exited
            # Read as bytes, because a process can have any name; the name ends at the last parenthesis.
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
    """Makes Linux kill this process when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _raise_terminated(number: int, frame: object) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
