"""Marks in names and locks on folders: they show which process owns a file or folder, and whether it is running.

A mark is `<process id>-<start time>-<host>`, because process ids are reused and hosts share folders. The start time is
the kernel's, in clock ticks since boot, or 0 on systems without /proc. Containers on one machine count as separate
hosts, because they may share /tmp but have separate process ids.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import zlib
from pathlib import Path

LOGS_KEPT_S = 86400.0  # how long logs are kept, so that they can be read after a crash
_MARK = re.compile(r"(\d+)-(\d+)-([0-9a-f]{8})")
_held: dict[Path, int] = {}  # lock file → its descriptor


def own_mark() -> str:
    """Returns the mark of this process; not cached, because a forked process needs a new mark."""
    return f"{os.getpid()}-{_started(os.getpid()) or 0}-{_host()}"


def may_run(mark: str) -> bool:
    """Whether the process with this mark may be running; always True for other hosts and for text that isn't a mark."""
    match = _MARK.fullmatch(mark)
    if match is None or match[3] != _host():
        return True
    process, started = int(match[1]), int(match[2])
    if started:
        return _started(process) == started
    try:
        os.kill(process, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def remove_left_behind(folder: Path, pattern: str, *, kept_s: float = 0.0) -> None:
    """Removes matching paths that have a dead process's mark in their name and are at least `kept_s` old."""
    for path in folder.glob(pattern):
        match = _MARK.search(path.name)
        if match is None or may_run(match[0]):
            continue
        with contextlib.suppress(OSError):  # another process removed it first
            if kept_s and path.lstat().st_mtime > time.time() - kept_s:
                continue
            if path.is_dir() and not path.is_symlink():
                with contextlib.suppress(RecursionError):  # the folders may be nested too deeply
                    shutil.rmtree(path, ignore_errors=True)
                if path.exists():
                    subprocess.run(["rm", "-rf", str(path)], check=False)
            else:
                path.unlink()


def own_prefix(prefix: str, folder: Path | None = None, *, kept_s: float = 0.0) -> str:
    """Returns a prefix for names in a folder (None: the temp folder), after removing dead processes' leftovers."""
    remove_left_behind(Path(tempfile.gettempdir()) if folder is None else folder, f"{prefix}*", kept_s=kept_s)
    return f"{prefix}{own_mark()}-"


def kill_owner(mark: str) -> None:
    """Sends SIGKILL to the process with this mark if it is running on this host."""
    match = _MARK.fullmatch(mark)
    if match is not None and match[3] == _host() and may_run(mark):
        with contextlib.suppress(OSError):
            os.kill(int(mark.partition("-")[0]), signal.SIGKILL)


def hold(folder: Path, setting: str) -> None:
    """Locks a folder for this process until `let_go`; on file systems that support it, other hosts respect the lock.

    Raises:
        ValueError: if another process holds the folder; the message names the setting.
    """
    lock = _lock_of(folder)
    while lock not in _held:
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError:
            return  # a write to the folder will also fail, with a clearer message
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise ValueError(
                f"{setting}={str(folder)!r} is in use by another run. Give each run its own folder."
            ) from None
        except OSError:  # a file system without locks
            pass
        with contextlib.suppress(FileNotFoundError):  # another run has just released it
            if os.path.samestat(os.fstat(descriptor), lock.stat()):
                _held[lock] = descriptor
                return
        os.close(descriptor)


def let_go(folder: Path) -> None:
    """Releases this process's lock on a folder, if it has one."""
    if (descriptor := _held.pop(_lock_of(folder), None)) is not None:
        _lock_of(folder).unlink(missing_ok=True)
        os.close(descriptor)


def _lock_of(folder: Path) -> Path:
    place = folder.resolve()
    return place.with_name(f".{place.name}.lock")


def _started(process: int) -> int | None:
    """Returns a process's start time in clock ticks since boot; None if it has exited, is a zombie, or has no /proc."""
    try:
        fields = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    has_ended = fields[0] in b"ZX" and int(fields[17]) <= 1  # a zombie with other threads is still ending
    return None if has_ended else int(fields[19])


def _host() -> str:
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # only Linux has namespaces
        name += str(Path("/proc/self/ns/pid").readlink())
    return f"{zlib.crc32(name.encode()):08x}"
