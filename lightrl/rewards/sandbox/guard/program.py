"""Starter, keeper and program: each forks the next; the last drops its privileges and executes Python."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import shutil
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

from . import layers, memory, network, view
from .layers import Json

READ_BYTES = 1 << 16
_FIRST_PRIVATE_UID = 0x50000000  # plus the guard's process id, so that it is unique
_WATCH_S = 0.05
_FICLONE = 0x40049409


class Program:
    """A program and the layers of protection around it; each process below the guard has a copy."""

    def __init__(self, request: Json) -> None:
        self.request = request
        self.limits = request["limits"]
        self.folder: str | None = request.get("folder")  # kept unless the guard kills the agent; None: temporary
        self.port: int | None = request.get("port")  # the port of an agent's endpoint; None for no network at all
        self.hosts: list[str] = []  # hosts that an agent may reach through the proxy
        self.has_network = request.get("network") == "allow"  # whether an agent uses the machine's network
        if isinstance(request.get("network"), list):
            self.hosts = request["network"]
        self.proxy_port: int | None = None
        self.root: list[tuple[str, str]] = request.get("root", [])  # folders to copy, and their names below /
        self.layers: set[str] = set(request["layers"]) if sys.platform == "linux" else set()
        self.uid = _FIRST_PRIVATE_UID + os.getpid()
        self.readable: list[str] = [*request["readable"], *request.get("needed", [])]
        private = [path for path in (request["command"][0], *request.get("needed", [])) if not layers.is_public(path)]
        self.needs_read_right = bool(private) and layers.landlock_version() > 0  # otherwise all files could be read
        if not layers.may_have_private_user(self.uid, self.needs_read_right):
            self.layers.discard("private_user")
        self.group: Path | None = None  # the cgroup that bounds its memory
        self.kind = layers.kind_of_namespaces("private_user" in self.layers) if "namespaces" in self.layers else None
        if self.kind is None:
            self.layers.discard("namespaces")
        self.relay: list[int] = []
        if self.kind is not None and self.port is not None and not self.has_network:
            self.relay = [network.open_relay(self.port, self.hosts)]
        if self.kind == "user":  # a user namespace has no other users
            self.layers.discard("private_user")


class _LastBlock:
    """Exits a forked process at the end of the block, after writing any error as a record: it must never return."""

    def __init__(self, records: int) -> None:
        self.records = records

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> NoReturn:
        try:
            # shutil.Error lists every file that was not copied; the first entry has the reason
            reason = error.args[0][0][2] if isinstance(error, shutil.Error) and error.args[0] else error
            _write_record(self.records, {"problem": f"{type(error).__name__}: {reason}"})
        finally:  # even if the guard is gone and nothing reads the record
            os._exit(126)


def start(program: Program, folder: str, streams: tuple[int, int, int], report: int, life: int) -> NoReturn:
    """Runs as the starter: enters the namespaces and forks the keeper, which is the first in its pid namespace.

    The program gets `streams` as stdin, stdout and stderr. Records go to `report`. `life` closes when the guard ends.
    """
    with _LastBlock(report):
        os.setsid()
        own_network = not program.has_network
        if program.kind is not None and not layers.enter_namespaces(program.kind, has_own_network=own_network):
            program.layers.discard("namespaces")
        if program.hosts and "namespaces" not in program.layers:
            raise OSError(
                f"network={program.hosts} needs a network namespace, which this system refuses. Set it to none or allow"
            )
        for relay in program.relay if "namespaces" in program.layers else ():
            assert program.port is not None
            program.proxy_port = network.send_ports(relay, program.port, has_proxy=bool(program.hosts))
        keeper = os.fork()
        if keeper:
            _write_record(report, {"keeper": keeper})
            os._exit(0)
        _keep(program, folder, streams, report, life)


def _keep(program: Program, folder: str, streams: tuple[int, int, int], report: int, life: int) -> NoReturn:
    """Runs as the keeper: prepares, starts and watches the program, and reports its end; exits if `life` closes."""
    _prepare(program, folder)
    layers.become_subreaper()
    started, started_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        for descriptor in (report, life, started):
            os.close(descriptor)
        with _LastBlock(started_end):
            _execute(program, folder, streams, started_end)
    for descriptor in {*streams, started_end}:
        os.close(descriptor)
    records = b""
    while data := os.read(started, READ_BYTES):  # until the program executes or fails to start
        records += data
    record = read_records(records)
    _write_record(report, record)
    group = program.group if "cgroup" in record.get("layers", ()) else None
    poller = select.poll()
    poller.register(life, 0)  # hang-ups are always reported
    with contextlib.suppress(AttributeError, OSError):  # pidfd_open: Linux 5.3
        poller.register(os.pidfd_open(pid), select.POLLIN)
    disk = memory.Disk(folder, program.limits["disk_mib"]) if program.limits.get("disk_mib") else None
    while True:
        if any(descriptor == life for descriptor, _ in poller.poll(_WATCH_S * 1000)):
            os._exit(0)
        exit_code = _reap(pid)
        stopped_by = memory.overuse(program.limits, group, disk, has_ended=exit_code is not None)
        if exit_code is None and stopped_by is not None:
            os.kill(pid, signal.SIGKILL)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            stopped_by = stopped_by if exit_code == -signal.SIGKILL else None  # it ended during the measurement
        if exit_code is not None:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu_s = usage.ru_utime + usage.ru_stime
            _write_record(report, {"exit_code": exit_code, "cpu_s": cpu_s, "stopped_by": stopped_by})
            while True:  # until the guard kills this process, and with it the namespace
                signal.pause()


def _prepare(program: Program, folder: str) -> None:
    """Writes the program's files to its folder, on a private disk if possible."""
    layers.hide_memory()
    owner = program.uid if "private_user" in program.layers else os.getuid()
    if "namespaces" in program.layers:
        program.layers |= layers.mount_own(None if program.folder else folder, owner, program.limits)
    if program.folder is not None:
        for name in ("work", "home", "tmp"):
            (Path(folder) / name).mkdir(parents=True)
        if program.request["template"] is not None:
            work = f"{folder}/work"
            shutil.copytree(program.request["template"], work, symlinks=True, dirs_exist_ok=True, copy_function=_clone)
        for source, name in program.root:
            target = f"{folder}/work/{name}"
            shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True, copy_function=_clone)
        for path, names, files in os.walk(folder):
            for name in (*names, *files):
                os.chown(Path(path) / name, owner, -1, follow_symlinks=False)
    for name, text in program.request["files"].items():
        (Path(folder) / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        os.chown(Path(folder) / name, owner, -1)
    os.chown(folder, owner, -1)
    if program.folder is not None:
        Path(folder).chmod(0o700)  # only the agent may enter
        Path(folder, "tmp").chmod(0o1777)
        if "namespaces" in program.layers:
            memory_mib = program.limits["memory_mib"]
            if view.show(folder, owner, program.readable, memory_mib, has_network=program.has_network):
                program.layers.add("view")
        if program.root:
            if "view" not in program.layers:
                raise OSError("folders at / need a mount namespace, which this system refuses")
            view.change_root(folder, [name for _, name in program.root])


def _clone(source: str, target: str) -> None:
    """Copies a file; on file systems with copy-on-write (XFS, Btrfs, ZFS), both share blocks until one changes."""
    if stat.S_ISREG(os.stat(source).st_mode):  # noqa: PTH116
        with contextlib.suppress(OSError), Path(source).open("rb") as old, Path(target).open("wb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            shutil.copystat(source, target)
            return
    shutil.copy2(source, target)


def _execute(program: Program, folder: str, streams: tuple[int, int, int], started: int) -> None:
    """Runs as the program: sets limits, drops privileges one by one, then executes Python."""
    os.setsid()
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    os.chdir(program.request.get("cwd") or (folder if program.folder is None else f"{folder}/work"))
    os.umask(0o077 if program.folder is None else 0o022)  # no other user can enter an agent's folder
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # if the machine runs out of memory, kill this process first
        Path("/proc/self/oom_score_adj").write_text("1000")
    remaining, is_root = program.layers, layers.is_root()
    if program.group is None or not memory.enter_group(program.group):
        remaining.discard("cgroup")
    counts_all = not remaining & {"private_user", "namespaces"}
    layers.set_limits(program.limits, counts_all_of_user=counts_all, bounds_reserved=program.port is None)
    layers.drop_privileges(program.uid if "private_user" in remaining else None, program.needs_read_right)
    if "landlock" in remaining:
        readable, writable = list(program.readable), [folder]
        no_tcp = 0 if program.has_network else layers.CONNECT_TCP  # an agent connects to its port
        if program.port is None:
            no_tcp = layers.BIND_TCP | layers.CONNECT_TCP
        else:
            readable += ["/proc"] if "proc" in remaining else []
            readable += view.readable_etc("view" in remaining)
            writable += view.WRITABLE if "view" in remaining else []
            writable += [f"/{name}" for _, name in program.root]
            no_tcp = 0 if "namespaces" in remaining else no_tcp
        version = layers.restrict_files(writable, readable, no_tcp, program.port)
        remaining.discard("landlock" if version == 0 else "")
        remaining.update({"landlock_signals"} if version >= 6 else ())
    if "seccomp" in remaining and not layers.refuse_calls("cgroup" in remaining):
        remaining.discard("seccomp")
    may_read_all = program.needs_read_right and "private_user" in remaining and "seccomp" not in remaining
    if may_read_all and not layers.refuse_file_handles():
        raise OSError("this system has no seccomp, without which a program in a private folder could read all files")
    unprotected = layers.unprotected_by(remaining)
    if is_root and not remaining & {"namespaces", "private_user"}:
        unprotected = unprotected or ["other processes from root"]
    elif program.request["unprotected"]:
        unprotected = []
    if unprotected:
        problem = f"nothing protects {' and '.join(unprotected)}"
        _write_record(started, {"layers": sorted(remaining), "problem": problem})
        os._exit(126)
    _write_record(started, {"layers": sorted(remaining)})
    os.closerange(3, started)  # `execve` closes `started` itself
    os.closerange(started + 1, 1024)
    command = program.request["command"]
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    environment |= program.request["environment"]
    if program.folder is not None:
        environment = {"USER": view.user_name(os.getuid()), "LOGNAME": view.user_name(os.getuid()), **environment}
        if "view" not in remaining:
            environment["GIT_CONFIG_NOSYSTEM"] = "1"  # /etc/gitconfig may contain keys; git fails on unreadable files
        elif environment["TMPDIR"] == f"{folder}/tmp":
            environment["TMPDIR"] = "/tmp"  # the same folder
        if program.proxy_port is not None:
            environment = {**network.proxy_environment(program.proxy_port), **environment}
    try:
        os.execve(command[0], command, environment)
    except OSError as error:
        raise OSError(why_not_run(command[0]) or str(error)) from error


def why_not_run(path: str) -> str:
    """Returns why this process cannot execute a file, or "" if it finds no reason; follows links and `#!`."""
    what = path
    for _ in range(5):  # Linux follows four interpreters
        real = os.path.realpath(path)
        place = what if real == path else f"{what}, a link to {real},"
        if not Path(real).exists():
            return f"{place} does not exist, or its folder cannot be entered in the sandbox"
        if not os.access(real, os.X_OK, effective_ids=True):
            return f"{place} is not executable for the sandbox's user"
        try:
            with Path(real).open("rb") as file:
                line = file.readline(4096)
        except OSError:
            return f"{place} cannot be read in the sandbox. Add its folder to readable"
        if not line.startswith(b"#!"):
            return "" if line.startswith(b"\x7fELF") else f"{place} is not a program and has no #! line"
        words = line[2:].split()
        if not words:
            return f"{place} has an empty #! line"
        path = os.fsdecode(words[0])
        what = f"{path}, the interpreter in the first line of {real},"
    return ""


def _reap(pid: int) -> int | None:
    """Reaps all children that have ended; returns the exit code of `pid` if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        for ended, status in iter(lambda: os.waitpid(-1, os.WNOHANG), (0, 0)):  # (0, 0): no other has ended
            if ended == pid:
                code = os.waitstatus_to_exitcode(status)
    return code


def _write_record(descriptor: int, record: Json) -> None:
    os.write(descriptor, json.dumps(record).encode() + b"\n")


def read_records(data: bytes | bytearray) -> Json:
    """Merges all records in the data into one."""
    merged: Json = {}
    for line in bytes(data).splitlines():
        merged.update(json.loads(line))
    return merged
