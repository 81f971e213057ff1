"""The guard of LocalSandbox: a helper process that runs one program after the other, and leaves nothing of it behind.

It is started as a script (standard library only), reads one JSON request per line from stdin and writes one JSON reply
per line to stdout. When its stdin closes, because the process that asked ended in whatever way, it kills
what runs and ends.

    guard ──fork──► starter: makes the namespaces, forks, ends
                       └──fork──► keeper: first process of the pid namespace, watches number and memory of processes
                                     └──fork──► program: gives up its rights one by one, then becomes Python

When the keeper dies, Linux kills all of its namespace at once; without namespaces the guard, to which all orphans fall
(PR_SET_CHILD_SUBREAPER), kills them until there are none. Each layer of protection is tried and reported; which ones
there are, and what each is good for, is said in sandbox.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

_NEWNS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_MS_NOSUID_NODEV, _MS_REC_PRIVATE = 0b0110, (1 << 14) | (1 << 18)
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_SECUREBITS = 4, 8, 22, 28
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 36, 38, 47, 2
_CAP_SETUID = 7
_CAP_DAC_READ_SEARCH = 2
_EXECUTE_AND_READ = 0b1101  # Landlock: execute, read a file, list a folder
_READ_AND_WRITE_FILE = 0b0110
# Refused by the filter: sockets, looking into other processes, namespaces and mounts, memory that no limit counts.
# In this order: socket, ptrace, unshare, setns, mount, umount2, add_key, request_key, keyctl, perf_event_open, bpf,
# userfaultfd, open_by_handle_at, process_vm_readv, process_vm_writev, io_uring_setup, memfd_create, shmget, mq_open.
_REFUSED_CALLS = {
    "x86_64": (
        0xC000003E,
        (41, 101, 272, 308, 165, 166, 248, 249, 250, 298, 321, 323, 304, 310, 311, 425, 319, 29, 240),
    ),
    "aarch64": (
        0xC00000B7,
        (198, 117, 97, 268, 40, 39, 217, 218, 219, 241, 280, 282, 265, 270, 271, 425, 279, 194, 180),
    ),
}
_FIRST_PRIVATE_UID = 0x50000000  # plus the guard's process id: nobody else's
_WATCH_S = 0.05
_READ_BYTES = 1 << 16

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for who asked
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    requests = bytearray()
    while True:
        while b"\n" not in requests:
            data = os.read(0, _READ_BYTES)
            if not data:
                return
            requests += data
        line, _, rest = bytes(requests).partition(b"\n")
        requests = bytearray(rest)
        reply = json.dumps(_Execution(json.loads(line)).run()).encode() + b"\n"
        while reply:
            reply = reply[os.write(1, reply) :]


class _Execution:
    """One program from its start to the end of all that it started."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.limits = request["limits"]
        self.layers: set[str] = set(request["layers"]) if sys.platform == "linux" else set()
        self.uid = _FIRST_PRIVATE_UID + os.getpid()
        self.needs_read_right = not _is_public(request["command"][0])
        if not _may_have_private_user(self.needs_read_right):
            self.layers.discard("private_user")
        self.keeper = 0

    def run(self) -> dict[str, Any]:
        folder = tempfile.mkdtemp(prefix="lightrl-sandbox-")
        try:
            return self._run_in(folder)
        finally:
            _remove(folder)

    def _run_in(self, folder: str) -> dict[str, Any]:
        stdin = _file_with(self.request["stdin"].encode(errors="surrogateescape"))
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        report, report_end = os.pipe()
        life_end, life = os.pipe()
        starter = os.fork()
        if starter == 0:
            for descriptor in (out, err, report, life):
                os.close(descriptor)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)  # the guard's own are not for programs; the numbers stay taken
            os.dup2(nothing, 1)
            _start(self, folder, stdin, out_end, err_end, report_end, life_end)
        for descriptor in (stdin, out_end, err_end, report_end, life_end):
            os.close(descriptor)
        try:
            os.waitpid(starter, 0)
            said = os.read(report, _READ_BYTES)  # perhaps all that the keeper will ever say
            self.keeper = _records(said).get("keeper", 0)
            return self._watch(out, err, report, said)
        finally:
            for descriptor in (life, out, err, report):
                os.close(descriptor)

    def _watch(self, out: int, err: int, report: int, said: bytes) -> dict[str, Any]:
        """Collects output until the report comes, a limit is reached, or nobody wants to know any more."""
        start = time.monotonic()
        found = {out: bytearray(), err: bytearray(), report: bytearray(said)}
        poller = select.poll()
        for descriptor in found:
            poller.register(descriptor, select.POLLIN)
        poller.register(0, 0)  # hang-up is always reported
        still_open = set(found)
        cause = ""
        while still_open:
            left_s = start + self.limits["wall_s"] - time.monotonic()
            if not cause:
                if len(found[out]) + len(found[err]) > self.limits["output_bytes"]:
                    cause = "output"
                elif b"exit_code" in found[report] or report not in still_open:  # no report: the keeper was killed
                    cause = "itself"
                elif left_s <= 0:
                    cause = "time"
                if cause:
                    self._kill()
            for descriptor, _ in poller.poll(None if cause else left_s * 1000 + 1):
                if descriptor == 0:
                    poller.unregister(0)
                    cause = cause or "nobody"
                    self._kill()
                elif data := os.read(descriptor, _READ_BYTES):
                    found[descriptor] += data
                else:
                    poller.unregister(descriptor)
                    still_open.discard(descriptor)
        if cause == "nobody":
            sys.exit()
        return self._reply(found[out], found[err], _records(found[report]), cause, time.monotonic() - start)

    def _reply(
        self, out: bytearray, err: bytearray, report: dict[str, Any], cause: str, wall_s: float
    ) -> dict[str, Any]:
        exit_code, cpu_s = report.get("exit_code"), report.get("cpu_s", 0.0)
        stopped_by = report.get("stopped_by") if cause == "itself" else cause
        if exit_code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= 0.9 * self.limits["cpu_s"]:
            stopped_by = "time"
        room = self.limits["output_bytes"]
        if len(out) + len(err) > room:  # it also ended by itself meanwhile
            stopped_by = "output"
        return {
            "stdout": out[:room].decode(errors="replace"),
            "stderr": err[-room:].decode(errors="replace"),
            "exit_code": exit_code,
            "stopped_by": stopped_by,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "layers": report.get("layers", []),
            "problem": report.get("problem"),
        }

    def _kill(self) -> None:
        """Ends the keeper and everything below it; returns when nothing is left."""
        if self.keeper:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper, signal.SIGKILL)
            self.keeper = 0  # from here on the number may be another's
        if "private_user" in self.layers:
            self._kill_private_user()
        while True:  # without a pid namespace orphans fall to this process, one generation after the other
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _kill_private_user(self) -> None:
        """All processes of the program's own user at once: a fork bomb cannot outrun that."""
        killer = os.fork()
        if killer == 0:
            with contextlib.suppress(OSError):
                os.setresuid(self.uid, self.uid, self.uid)
                if os.getuid() == os.geteuid() == self.uid:  # as root this would be everybody
                    os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(killer, 0)


def _start(execution: _Execution, folder: str, stdin: int, out: int, err: int, report: int, life: int) -> NoReturn:
    """The starter: namespaces first, since a pid namespace begins with the next child."""
    try:
        os.setsid()
        if "namespaces" in execution.layers and not _enter_namespaces():
            execution.layers.discard("namespaces")
        keeper = os.fork()
        if keeper:
            _write_record(report, {"keeper": keeper})
            os._exit(0)
        _keep(execution, folder, stdin, out, err, report, life)
    except BaseException as error:  # noqa: BLE001  # whatever it is, this must not go on as a second guard
        _write_record(report, {"problem": f"{type(error).__name__}: {error}"})
        os._exit(1)


def _keep(execution: _Execution, folder: str, stdin: int, out: int, err: int, report: int, life: int) -> NoReturn:
    """The keeper: prepares the folder, starts the program, watches it, reports how it ended."""
    layers, limits = execution.layers, execution.limits
    _prctl(_PR_SET_DUMPABLE, 0)  # nobody looks into this process
    owner = execution.uid if "private_user" in layers else os.getuid()
    if "namespaces" in layers:
        _mount("none", "/", None, _MS_REC_PRIVATE, "")
        size = f"size={limits['file_bytes']},nr_inodes={limits['max_files']},mode=700,uid={owner},gid={owner}"
        _mount("tmpfs", folder, "tmpfs", _MS_NOSUID_NODEV, size)
        has_own_proc = _mount("proc", "/proc", "proc", _MS_NOSUID_NODEV, "")
    else:
        has_own_proc = False
    for name, text in execution.request["files"].items():
        (Path(folder) / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        os.chown(Path(folder) / name, owner, -1)
    os.chown(folder, owner, -1)
    layers_read, layers_end = os.pipe()
    program = os.fork()
    if program == 0:
        for descriptor in (report, life, layers_read):
            os.close(descriptor)
        try:
            _become(execution, folder, stdin, out, err, layers_end)
        except BaseException as error:  # noqa: BLE001  # reported, and the program does not start
            _write_record(layers_end, {"problem": f"{type(error).__name__}: {error}"})
        os._exit(126)
    for descriptor in (stdin, out, err, layers_end):
        os.close(descriptor)
    started = _records(os.read(layers_read, _READ_BYTES))
    _write_record(report, started)
    poller = select.poll()
    poller.register(life, 0)
    with contextlib.suppress(AttributeError, OSError):  # pidfd_open: Linux 5.3
        poller.register(os.pidfd_open(program), select.POLLIN)
    stopped_by = None
    while True:
        hung_up = any(descriptor == life for descriptor, _ in poller.poll(_WATCH_S * 1000))
        if hung_up:
            os._exit(0)
        ended = _reap(program)
        if ended is None and has_own_proc and (stopped_by := _overuse(limits)) is not None:
            os.kill(program, signal.SIGKILL)
            ended = -signal.SIGKILL
        if ended is not None:
            usage = resource.getrusage(resource.RUSAGE_CHILDREN)
            record = {"exit_code": ended, "cpu_s": usage.ru_utime + usage.ru_stime, "stopped_by": stopped_by}
            _write_record(report, record)
            while True:  # the guard kills this process, and with it the namespace
                signal.pause()


def _become(execution: _Execution, folder: str, stdin: int, out: int, err: int, started: int) -> None:
    """The program's process: limits, then rights given up one after the other, then Python."""
    layers = execution.layers
    os.setsid()
    for descriptor, number in ((stdin, 0), (out, 1), (err, 2)):
        os.dup2(descriptor, number)
    os.chdir(folder)
    os.umask(0o077)
    for number in range(1, signal.NSIG):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError):  # if the machine runs out of memory, this goes first
        Path("/proc/self/oom_score_adj").write_text("1000")
    _set_limits(execution)
    if "private_user" in layers:
        _change_user(execution.uid, execution.needs_read_right)
    elif os.getuid() == 0 and sys.platform == "linux":
        _prctl(_PR_SET_SECUREBITS, 0b11)  # being root gives no rights at the next exec
        _set_capabilities(0)
    if sys.platform == "linux":
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    if "landlock" in layers:
        version = _restrict_files(folder, execution.request["readable"])
        layers.discard("landlock" if version == 0 else "")
        layers.update({"landlock_signals"} if version >= 6 else ())
    if "seccomp" in layers and not _refuse_calls():
        layers.discard("seccomp")
    missing = _missing_protection(layers)
    is_root_of_all = os.getuid() == 0 and not layers & {"namespaces", "private_user"}
    if is_root_of_all or (missing and not execution.request["unprotected"]):
        _write_record(
            started,
            {
                "layers": sorted(layers),
                "problem": f"nothing protects {' and '.join(missing or ['other processes from root'])}",
            },
        )
        os._exit(126)
    _write_record(started, {"layers": sorted(layers)})
    os.closerange(3, 1024)
    command = execution.request["command"]
    environment = {"HOME": folder, "TMPDIR": folder, "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    os.execve(command[0], command, {**environment, **execution.request["environment"]})


def _missing_protection(layers: set[str]) -> list[str]:
    """What of this machine a program could harm in spite of these layers."""
    needed = {
        "other processes": {"namespaces", "private_user", "landlock_signals"},
        "files": {"private_user", "landlock"},
        "the network": {"namespaces", "seccomp"},
    }
    return [what for what, any_of in needed.items() if not layers & any_of]


def _set_limits(execution: _Execution) -> None:
    limits = execution.limits
    cpu_s = max(1, -(-int(limits["cpu_s"] * 1000) // 1000))
    memory_bytes, file_bytes = limits["memory_bytes"], limits["file_bytes"]
    num_processes = limits["max_processes"]
    if "private_user" not in execution.layers and "namespaces" not in execution.layers:
        num_processes += _num_threads_of_user()  # they count too
    wanted = {
        resource.RLIMIT_CPU: (cpu_s, cpu_s + 1),  # the first sends SIGXCPU, the second SIGKILL
        resource.RLIMIT_DATA: (memory_bytes, memory_bytes),
        resource.RLIMIT_AS: (memory_bytes + (1 << 30), memory_bytes + (1 << 30)),  # shared libraries, reserved ranges
        resource.RLIMIT_FSIZE: (file_bytes, file_bytes),
        resource.RLIMIT_NOFILE: (limits["max_open_files"], limits["max_open_files"]),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NPROC: (num_processes, num_processes),
    }
    for what, (soft, hard) in wanted.items():
        _, allowed = resource.getrlimit(what)
        if allowed != resource.RLIM_INFINITY:
            soft, hard = min(soft, allowed), min(hard, allowed)
        with contextlib.suppress(OSError, ValueError):  # macOS has no bound on memory
            resource.setrlimit(what, (soft, hard))


def _enter_namespaces() -> bool:
    """Own processes, network, mounts and shared memory; as an ordinary user through a user namespace."""
    flags = _NEWPID | _NEWNET | _NEWNS | _NEWIPC
    user, group = os.getuid(), os.getgid()
    if user != 0:
        flags |= _NEWUSER
    if _libc.unshare(flags) != 0:
        return False
    if user != 0:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return True


def _change_user(uid: int, needs_read_right: bool) -> None:
    if needs_read_right:
        _prctl(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    if needs_read_right:  # the interpreter lies in a folder like /root; Landlock bounds what may be read
        _set_capabilities(1 << _CAP_DAC_READ_SEARCH)
        _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH)


def _restrict_files(folder: str, readable: list[str]) -> int:
    """Landlock: reads below `readable`, writes below `folder`; from version 4 no TCP, from 6 no signals to others.

    Returns:
        Its version, 0 if it is not in force.
    """
    version: int = _libc.syscall(444, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return 0
    all_files = (1 << (13 + (version >= 2) + (version >= 3))) - 1
    if version >= 5:
        all_files |= 1 << 15
    attributes = struct.pack("=QQQ", all_files, 0b11 if version >= 4 else 0, 0b11 if version >= 6 else 0)
    size = 8 * (1 + (version >= 4) + (version >= 6))
    ruleset = _libc.syscall(444, attributes, ctypes.c_size_t(size), 0)
    if ruleset < 0:
        return 0
    devices = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    rules = [(folder, all_files)]
    rules += [(path, _EXECUTE_AND_READ if Path(path).is_dir() else 0b101) for path in readable]
    rules += [(path, _READ_AND_WRITE_FILE) for path in devices]
    for path, rights in rules:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        _libc.syscall(445, ruleset, 1, struct.pack("=Qi", rights, descriptor), 0)
        os.close(descriptor)
    is_done = _libc.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return version if is_done else 0


def _refuse_calls() -> bool:
    """A seccomp filter that answers EPERM to `_REFUSED_CALLS`."""
    if platform.machine() not in _REFUSED_CALLS:
        return False
    architecture, calls = _REFUSED_CALLS[platform.machine()]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    allow, refuse = 0x7FFF0000, 0x00050001
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, refuse)]  # x86-64's second table of calls
    for call in calls:
        code += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    code.append((answer, 0, 0, allow))
    buffer = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    program = struct.pack("@HP", len(code), ctypes.addressof(buffer))
    return bool(_libc.prctl(_PR_SET_SECCOMP, 2, program, 0, 0) == 0)


def _set_capabilities(bits: int) -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _libc.capset(header, struct.pack("=6I", bits, bits, bits, 0, 0, 0))


def _may_have_private_user(needs_read_right: bool) -> bool:
    if sys.platform != "linux" or os.getuid() != 0:
        return False
    needed = (1 << _CAP_SETUID) | ((1 << _CAP_DAC_READ_SEARCH) if needs_read_right else 0)
    lines = Path("/proc/self/status").read_text().splitlines()
    has = next(int(line.split()[1], 16) for line in lines if line.startswith("CapPrm:"))
    return has & needed == needed


def _is_public(path: str) -> bool:
    """Whether every user may reach and run this file, and the file that it is a link to."""
    folders = {*Path(path).absolute().parents, *Path(path).resolve().parents}
    return all(folder.stat().st_mode & 0o001 for folder in folders)


def _overuse(limits: dict[str, Any]) -> str | None:
    """Which limit all processes of the namespace exceed together, the keeper aside."""
    num_threads, num_bytes = 0, 0
    page = resource.getpagesize()
    for entry in os.listdir("/proc"):  # noqa: PTH208  # every 50 ms
        if not entry.isdigit() or entry == "1":
            continue
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        num_threads += int(fields[17])
        num_bytes += int(fields[21]) * page
    if num_threads > limits["max_processes"]:
        return "processes"
    return "memory" if num_bytes > limits["memory_bytes"] else None


def _num_threads_of_user() -> int:
    num = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            if folder.stat().st_uid == os.getuid():
                num += int((folder / "stat").read_text().rpartition(")")[2].split()[17])
    return num


def _reap(program: int) -> int | None:
    """Takes leave of all children that ended; the exit code of the program if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
    return code


def _children() -> list[int]:
    pid = os.getpid()
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _file_with(data: bytes) -> int:
    """A descriptor from which this can be read, of a file without a name."""
    number, name = tempfile.mkstemp(prefix="lightrl-sandbox-stdin-")
    with os.fdopen(number, "wb") as file:
        file.write(data)
    descriptor = os.open(name, os.O_RDONLY)
    Path(name).unlink()
    return descriptor


def _remove(folder: str) -> None:
    for path, names, _ in os.walk(folder):  # what the program locked
        for name in names:
            entry = Path(path) / name
            if not entry.is_symlink():
                entry.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> bool:
    encoded = None if kind is None else kind.encode()
    result = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), options.encode())
    return bool(result == 0)


def _prctl(*arguments: int) -> None:
    _libc.prctl(*(ctypes.c_ulong(argument) for argument in (*arguments, 0, 0, 0, 0, 0)[:5]))


def _write_record(descriptor: int, record: dict[str, Any]) -> None:
    os.write(descriptor, json.dumps(record).encode() + b"\n")


def _records(data: bytes | bytearray) -> dict[str, Any]:
    """All records in it as one."""
    found: dict[str, Any] = {}
    for line in bytes(data).splitlines():
        found.update(json.loads(line))
    return found


if __name__ == "__main__":
    main()
