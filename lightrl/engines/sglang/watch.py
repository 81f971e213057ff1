"""The process between a trainer and a server of its: it ends the server and all that the server started, come what may.

Run as a script, standard library only: `python -I watch.py PARENT_PID GRACE_S REMOVE COMMAND...`

    trainer ══ pipe (stdin) ══► this process ──► server, in a session of its own ──► its workers

The server is ended when the pipe closes (the trainer let go of it, exited, or was killed with -9), when the trainer is
no longer this process's parent (a forked child may still hold the pipe open), and on SIGTERM. First politely, with
GRACE_S seconds, or with as many as the trainer wrote into the pipe as its last words; then by SIGKILL, including
processes that left the server's group: Linux gives them to this process when their parents die. Should this process
be killed itself, Linux kills the server. The exit code is the server's, 128 + n for signal n. REMOVE is a file that is
gone afterwards.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_TICK_S = 0.25
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


class _Terminated(Exception):
    """SIGTERM came."""


def main() -> int:
    parent, grace_s, remove, *command = sys.argv[1:]
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to act on
    signal.signal(signal.SIGTERM, _raise_terminated)
    server: subprocess.Popen[bytes] | None = None
    seconds = float(grace_s)
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        )
        seconds = _wait(server, int(parent), seconds)
    except _Terminated:
        pass
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error}\n")
        return 127
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if server is not None:
            _end(server, seconds)
        Path(remove).unlink(missing_ok=True)
    code = server.returncode if server is not None else 128 + signal.SIGTERM
    return code if code >= 0 else 128 - code


def _wait(server: subprocess.Popen[bytes], parent: int, grace_s: float) -> float:
    """Returns the seconds of grace when the server has exited or shall be ended."""
    words = b""
    while server.poll() is None and os.getppid() == parent:
        if not select.select([0], [], [], _TICK_S)[0]:
            continue
        read = os.read(0, 64)
        if not read:
            break
        words += read
    return float(words) if words else grace_s


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    if server.poll() is None and grace_s > 0:
        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
    while True:
        if server.poll() is None:
            server.kill()
        _signal_group(server.pid)
        left = _descendants(os.getpid())
        for process in left:
            _signal(process)
        _reap(server)
        if not left and server.poll() is not None:
            return
        time.sleep(0.02)


def _reap(server: subprocess.Popen[bytes]) -> None:
    """Orphans that became this process's children; the server itself is its Popen's to wait for."""
    if server.poll() is None:
        return
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _descendants(ancestor: int) -> list[int]:
    """Process ids below this one; zombies not counted. Empty where there is no /proc."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
        except OSError:  # it is gone
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(folder.name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _signal(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        return


def _signal_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _die_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _raise_terminated(number: int, frame: object) -> None:
    raise _Terminated


if __name__ == "__main__":
    sys.exit(main())
