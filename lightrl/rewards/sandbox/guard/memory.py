"""Limits a program's file sizes and memory. A cgroup limits memory; without one, the processes' memory is polled."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from .layers import Json

_RMDIR_S = 2.0
_DISK_S = 1.0


def parent_of_groups(process: str = "/proc/self") -> Path | None:
    """Returns the nearest cgroup folder, v1 or v2, in which this process may create groups that bound memory."""
    groups = [line.split(":", 2) for line in _text(Path(process, "cgroup")).splitlines()]
    path_of = {controller: path for _, controllers, path in groups for controller in controllers.split(",")}
    for line in _text(Path(process, "mountinfo")).splitlines():
        _, _, _, root, mount, *_, kind, _, options = line.split(" ")
        is_v1 = kind == "cgroup" and "memory" in options.split(",")
        path = os.path.relpath(path_of.get("memory" if is_v1 else "", "/"), root)
        if ".." in path or not (is_v1 or kind == "cgroup2"):
            continue
        folder = Path(mount, path)
        for each in [folder] if is_v1 else [folder, *folder.parents]:  # in v2, only leaves have processes
            has_memory = is_v1 or "memory" in _text(each / "cgroup.subtree_control").split()
            if has_memory and os.access(each, os.W_OK):
                return each
    return None


def make_group(name: str, limits: Json) -> Path | None:
    """Makes a cgroup for a program's memory, including files on a memory disk; returns None if that is impossible."""
    if (parent := parent_of_groups()) is None:
        return None
    group, num_bytes = parent / name, limits["memory_mib"] << 20
    bounds = {"memory.max": num_bytes, "memory.swap.max": 0}
    bounds |= {"memory.limit_in_bytes": num_bytes, "memory.memsw.limit_in_bytes": num_bytes}  # v1
    try:
        group.mkdir()
        for bound in filter(Path.exists, map(group.joinpath, bounds)):
            bound.write_text(str(bounds[bound.name]))
    except OSError:
        remove_group(group)
        return None
    return group


def enter_group(group: Path) -> bool:
    """Moves this process and its future children into the group; returns whether that worked."""
    with contextlib.suppress(OSError):
        return (group / "cgroup.procs").write_text("0") > 0
    return False


def has_killed(group: Path) -> bool:
    """Returns whether Linux has killed a process of the group because it was out of memory."""
    events = _text(group / "memory.events") + _text(group / "memory.oom_control")
    return any(int(number) for number in re.findall(r"^oom_kill (\d+)", events, re.MULTILINE))


def remove_group(group: Path) -> None:
    """Removes a group whose processes have ended; waits while the kernel still cleans up the last one."""
    deadline = time.monotonic() + _RMDIR_S
    while group.exists() and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.005)


def overuse(limits: Json, group: Path | None, disk: Disk | None, *, has_ended: bool) -> str | None:
    """Returns the limit that the processes below the keeper exceed in total, or None; called every 50 ms.

    With a group, Linux enforces the memory limit; without one, a page counts once for each process that shares it.
    A program that has ended was stopped by no limit, unless Linux killed one of its processes.
    """
    if has_ended:
        return "memory" if group is not None and has_killed(group) else None
    num_threads = num_kib = 0
    for process in _processes():
        with contextlib.suppress(OSError):
            threads, held = _threads_and_kib(f"/proc/{process}")
            num_threads, num_kib = num_threads + threads, num_kib + held
    if num_threads > limits["max_processes"]:
        return "processes"
    has_too_much = num_kib > limits["memory_mib"] << 10 if group is None else has_killed(group)
    return "memory" if has_too_much else "disk" if disk is not None and disk.is_overused() else None


class Disk:
    """The files of a folder, whose sizes are added up about once a second, or less often if there are many.

    Deleted files count as long as a process has them open; a program can exceed the bound until the next check.
    """

    def __init__(self, folder: str, max_mib: int) -> None:
        self.folder = folder
        self.max_bytes = max_mib << 20
        self.next_s = 0.0

    def is_overused(self) -> bool:
        start_s = time.monotonic()
        if start_s < self.next_s:
            return False
        size_of: dict[tuple[int, int], int] = {}
        is_hidden = _add_sizes(self.folder, size_of)
        _add_open_files(Path(self.folder).stat().st_dev, size_of)
        end_s = time.monotonic()
        self.next_s = end_s + max(_DISK_S, 10 * (end_s - start_s))
        return is_hidden or sum(size_of.values()) > self.max_bytes


def _add_sizes(folder: str, size_of: dict[tuple[int, int], int]) -> bool:
    """Adds the sizes of a folder's files by device and inode number; returns whether a part cannot be read."""
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        size_of[status.st_dev, status.st_ino] = status.st_blocks << 9
                        if entry.is_dir(follow_symlinks=False):
                            waiting.append(entry.path)
        except OSError as error:
            if error.errno in (errno.ENAMETOOLONG, errno.EACCES):
                return True
    return False


def _add_open_files(device: int, size_of: dict[tuple[int, int], int]) -> None:
    for process in _processes():
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{process}/fd"):  # noqa: PTH208
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{process}/fd/{number}")  # noqa: PTH116
                    if status.st_dev == device and stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        size_of[status.st_dev, status.st_ino] = status.st_blocks << 9


def _processes() -> Iterator[str]:
    """Yields the ids of this process's descendants."""
    waiting = ["self"]
    while waiting:
        with contextlib.suppress(OSError):  # it has ended
            for children in Path("/proc", waiting.pop(), "task").glob("*/children"):
                waiting += (processes := _text(children).split())
                yield from processes


def _threads_and_kib(process: str) -> tuple[int, int]:
    """Returns a process's thread count and KiB of memory; if its main thread has ended, reads another thread's."""
    status = Path(process, "status").read_bytes()
    if b"\nState:\tZ" in status:
        for thread in os.listdir(f"{process}/task"):  # noqa: PTH208
            status = max(status, Path(process, "task", thread, "status").read_bytes(), key=_kib)
    threads = re.search(rb"\nThreads:\s+(\d+)", status)
    return (0 if threads is None else int(threads[1])), _kib(status)


def _kib(status: bytes) -> int:
    """Returns the KiB in use, including swapped memory."""
    return sum(map(int, re.findall(rb"\nVm(?:RSS|Swap):\s+(\d+)", status)))


def _text(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text(errors="surrogateescape")
    return ""
