"""Child processes that end with their parent: `end_with_parent` for Python, and a guard process around any command.

A script without packages; PARENT_PID 0 is its own:  `python -I parent_guard.py PARENT_PID GRACE_S REMOVE COMMAND...`

    parent ══ pipe (stdin) ══► guard ──► command, in a session of its own ──► its children

The guard ends the command when the pipe closes (the parent closed it, exited, or was killed with -9), when the parent
is gone (a forked child may still hold the pipe open), and on SIGTERM. SIGTERM comes first, with GRACE_S seconds to obey
it, or as many as the parent wrote into the pipe before it closed it; then SIGKILL, also for processes that left the
command's group: Linux gives them to the guard when their parents die. If the guard itself is killed, Linux kills the
command. The exit code is the command's, 128 + n for signal n. The file REMOVE is deleted at the end. Descriptors that
the parent passes to the guard (`pass_fds`) are the command's too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

_TICK_S = 0.25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def end_with_parent() -> None:
    """Ends this process soon after its parent; a thread watches."""
    parent = os.getppid()

    def watch() -> None:
        wait_for_parent(parent)
        os._exit(1)

    threading.Thread(target=watch, name="lightrl-parent", daemon=True).start()


def wait_for_parent(parent: int, pipe: int | None = None, *, until: Callable[[], bool] = lambda: False) -> None:
    """Returns when the process `parent` is gone, when nothing can write to `pipe` any more, or when `until` is true."""
    poller = select.poll()
    if pipe is not None:
        poller.register(pipe, 0)  # a hang-up is always reported
    while os.getppid() == parent and not until() and not poller.poll(_TICK_S * 1000):
        pass


def kill_group(group: int) -> None:
    """SIGKILL for all processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter for zombies on macOS
        os.killpg(group, signal.SIGKILL)


class _Terminated(Exception):
    """SIGTERM came."""


def main() -> int:
    parent, grace_s, remove, *command = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, _raise_terminated)
    process: subprocess.Popen[bytes] | None = None
    seconds = float(grace_s)
    try:
        process = started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent, close_fds=False
        )
        wait_for_parent(int(parent) or os.getppid(), 0, until=lambda: started.poll() is not None)
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
    while True:
        if process.poll() is None:
            process.kill()
        kill_group(process.pid)
        left = _descendants(os.getpid())
        for child in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _reap(process)
        if not left and process.poll() is not None:
            return
        time.sleep(0.02)


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Waits for orphans that became this process's children; its Popen waits for the command itself."""
    if process.poll() is None:
        return
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _descendants(ancestor: int) -> list[int]:
    """Process ids below this one, without zombies. Empty if there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:  # it is gone
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    descendants: list[int] = []
    ancestors = [ancestor]
    while ancestors:
        below = children.get(ancestors.pop(), [])
        descendants += below
        ancestors += below
    return descendants


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _raise_terminated(number: int, frame: object) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
