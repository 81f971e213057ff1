"""LocalSandbox: runs an untrusted Python program with limits, and cleans up after it.

Each layer of protection is used if the system supports it. `Run.layers` and `Run.missing` say which layers were in
force in each run; missing layers are also logged when they change.

    namespaces     separate processes (which all die together), no network. Linux as root, also in containers, or as a
                   user who may create user namespaces
    disk, proc     parts of namespaces: a private, bounded memory disk; a /proc that shows only the program's processes.
                   Containers may refuse either
    private_user   Linux as root: a separate user id that owns nothing and cannot write anywhere; separate process count
    landlock       Linux 5.13: a program can read only Python and the system's libraries, and write only its folder
    seccomp        Linux on x86-64 and ARM64: no sockets, no access to other processes, no uncounted memory
    cgroup         a writable memory cgroup, v1 or v2: bounds the total memory of all processes
    limits         everywhere: CPU time, memory, size and number of files, output, wall clock; an empty environment

A program is refused if no layer protects other processes (namespaces, private_user, Landlock in Linux 6.12), files
(private_user, landlock) or the network (namespaces, seccomp); macOS has none of these. Without `namespaces`, files are
bounded individually but not in total, and a program may survive if the guard is killed by SIGKILL. Without
`cgroup`, memory in use is summed 20 times a second, so each process may briefly use the whole bound; shared memory
without a file is refused; the sum omits other kernel memory, such as pipe and socketpair buffers (13 MiB per process
with 64 open files). No layer stops attacks on the kernel; a Sandbox that uses a virtual machine can stop them.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from lightrl.checks.bounds import check_positive
from lightrl.concurrency.owner import own_prefix, remove_left_behind
from lightrl.errors import RewardError
from lightrl.rewards.sandbox.guard.layers import Json, is_root
from lightrl.rewards.sandbox.guard.memory import parent_of_groups

LAYERS = ("namespaces", "private_user", "landlock", "seccomp", "cgroup")

_logger = logging.getLogger(__name__)
# The guard is a separate package that imports neither lightrl nor its dependencies, to start fast.
_START = "import sys; sys.path.append(sys.argv[1]); from guard.guard import main; main()"
_PREFIX = "lightrl-sandbox-"  # begins the names of folders and cgroups
GUARD_COMMAND = [sys.executable, "-I", "-S", "-c", _START, str(Path(__file__).parent)]  # callers append a folder prefix
_RELAY = "import sys; sys.path.append(sys.argv[1]); from guard.network import serve_inside; serve_inside()"
RELAY_COMMAND = [sys.executable, "-I", "-S", "-c", _RELAY, str(Path(__file__).parent)]  # callers append its arguments
_GRACE_S = 10.0
_READ_BYTES = 1 << 16
SYSTEM_PATHS = (
    *("/usr", "/lib", "/lib64", "/bin", "/opt/lib"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
)

StoppedBy = Literal["time", "memory", "output", "processes"]


@dataclass(frozen=True)
class Limits:
    """Limits for a single program run."""

    cpu_s: float = 5.0  # per process; enforced in whole seconds, rounded up
    wall_s: float = 10.0
    memory_mib: int = 512  # all processes together
    max_processes: int = 16  # including threads
    max_open_files: int = 64
    max_files: int = 1000
    file_mib: int = 16  # per file; with namespaces, for all files together
    output_kib: int = 256  # standard output and error together

    def __post_init__(self) -> None:
        check_positive(**asdict(self))


@dataclass(frozen=True)
class Run:
    """The result of running a program."""

    stdout: str
    stderr: str
    exit_code: int | None  # negative: minus the signal that ended it; None if it reached a limit
    stopped_by: StoppedBy | None  # the limit that it reached
    wall_s: float
    cpu_s: float
    layers: frozenset[str] = field(default_factory=frozenset)  # the protections in force
    missing: frozenset[str] = field(default_factory=frozenset)  # layers that were requested but are not in force


class Sandbox(Protocol):
    """Runs programs. It has a single method, so a virtual machine or a service can replace LocalSandbox."""

    def run(self, program: str, stdin: str, limits: Limits) -> Run:
        """Runs a Python program with this text as standard input; returns when all its processes and files are gone."""
        ...


class LocalSandbox:
    """Runs programs on this machine, one after another, under a guard that lives as long as this process.

    Args:
        python: the interpreter that runs the programs.
        readable: additional files and folders that programs may read, for example a data set's.
        environment: environment variables for the programs, which inherit none from this process.
        layers: the protections to use if the system supports them.
        unprotected: run programs even if no layer protects other processes, files or the network; they then have all
            permissions of this user. Never allowed for root.
    """

    def __init__(
        self,
        *,
        python: str = sys.executable,
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        layers: Sequence[str] = LAYERS,
        unprotected: bool = False,
    ) -> None:
        unknown = sorted(set(layers) - set(LAYERS))
        if unknown:
            raise ValueError(f"Unknown layers {unknown}. Choose from {list(LAYERS)}.")
        prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(python).resolve().parent)}
        self._python = python
        self._request = {
            "readable": [*sorted(prefixes - {"/"}), *SYSTEM_PATHS, *readable],
            "environment": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **(environment or {})},
            "layers": list(layers),
            "unprotected": unprotected,
        }
        self._layers = frozenset(layers)
        self._guard: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._warned_of: frozenset[str] = frozenset()

    def run(self, program: str, stdin: str, limits: Limits) -> Run:
        """Runs a program; raises RewardError only if the sandbox itself fails, not if the program fails."""
        reply = self._ask(
            {
                **self._request,
                "command": [self._python, "-I", "-B", "-X", "utf8", "-X", "int_max_str_digits=0", "program.py"],
                "files": {"program.py": program},
                "stdin": stdin,
                "limits": asdict(limits),
            },
            limits.wall_s + _GRACE_S,
        )
        problem = reply.pop("problem")
        if problem is not None:
            raise RewardError(
                f"The sandbox cannot run programs on this system: {problem} (layers: {reply['layers']}). "
                f"{what_to_allow()} docs/security.md explains the layers. You can also use another Sandbox."
            )
        layers = frozenset(reply["layers"])
        run = Run(**{**reply, "layers": layers, "missing": self._missing(layers)})
        self._warn(run.missing)
        last_line = run.stderr.rstrip().rpartition("\n")[2]
        if run.stopped_by is None and run.exit_code == 1 and last_line.startswith("MemoryError"):
            run = Run(**{**vars(run), "stopped_by": "memory"})
        return run

    def close(self) -> None:
        """Stops the guard; the next run starts a new one."""
        with self._lock:
            self._end_guard()

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):  # if the constructor failed
            self._end_guard()

    def _ask(self, request: Json, timeout_s: float) -> Json:
        with self._lock:
            if self._guard is None or self._guard.poll() is not None:
                self._end_guard()
                self._guard = subprocess.Popen(
                    [*GUARD_COMMAND, guard_prefix()],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    start_new_session=True,
                )
            assert self._guard.stdin is not None
            assert self._guard.stdout is not None
            os.set_blocking(self._guard.stdin.fileno(), False)
            try:
                deadline = time.monotonic() + timeout_s
                left = memoryview(json.dumps(request).encode() + b"\n")
                while left and select.select([], [self._guard.stdin], [], max(0.0, deadline - time.monotonic()))[1]:
                    left = left[os.write(self._guard.stdin.fileno(), left) :]
                reply = None if left else _line(self._guard.stdout.fileno(), deadline)
            except OSError as error:
                self._end_guard()
                raise RewardError(f"The sandbox guard died: {error!r}.") from error
            if reply is None:
                self._end_guard()
                raise RewardError(
                    f"The sandbox guard died, or did not answer within {timeout_s:g} s. See its output above.",
                    reason="killed",
                )
            record: Json = json.loads(reply)
            return record

    def _end_guard(self) -> None:
        guard, self._guard = self._guard, None
        if guard is None:
            return
        assert guard.stdin is not None
        assert guard.stdout is not None
        guard.stdin.close()  # the guard then kills the program and exits
        try:
            guard.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
        guard.stdout.close()

    def _missing(self, layers: frozenset[str]) -> frozenset[str]:
        """Returns the requested layers that are not in force, except `private_user` if this process is not root."""
        parts = {"disk", "proc"} if "namespaces" in self._layers else set()
        return (self._layers | parts) - layers - (set() if is_root() else {"private_user"})

    def _warn(self, missing: frozenset[str]) -> None:
        if missing - self._warned_of:
            _logger.warning(
                "The sandbox runs without %s, which this system refuses; only the other layers restrict programs. %s "
                "See docs/security.md.",
                ", ".join(sorted(missing)),
                what_to_allow(missing=missing),
            )
        self._warned_of = missing


def guard_prefix() -> str:
    """Returns the prefix of a guard's folders and cgroups; first removes dead processes' folders and cgroups."""
    if (groups := parent_of_groups()) is not None:
        remove_left_behind(groups, f"{_PREFIX}*")
    return own_prefix(_PREFIX)


def what_to_allow(settings_folder: Path = Path("/proc/sys"), *, missing: Collection[str] = ()) -> str:
    """Returns advice on how to enable all layers, or the missing ones, on this system."""
    if set(missing) == {"cgroup"}:
        return "Start the run in a memory cgroup that it may write to: `systemd-run --user --scope` creates one."
    if sys.platform != "linux":
        return "Only Linux has these layers."
    settings = {
        "kernel/apparmor_restrict_unprivileged_userns": ("1", "0"),  # Ubuntu from 24.04
        "kernel/unprivileged_userns_clone": ("0", "1"),  # Debian
        "user/max_user_namespaces": ("0", "10000"),
    }
    for name, (closed, opened) in settings.items():
        file = settings_folder / name
        if file.is_file() and file.read_text().strip() == closed:
            profile = ", or load the AppArmor profile in docs/security.md" if "apparmor" in name else ""
            return f"Allow user namespaces: sudo sysctl -w {name.replace('/', '.')}={opened}{profile}."
    return (
        "Use Linux 5.13 or newer; in a container, allow unshare and mount: docker run --security-opt "
        "seccomp=unconfined --security-opt systempaths=unconfined."
    )


def _line(descriptor: int, deadline: float) -> bytes | None:
    """Returns the next line; None at the end of the file or after the deadline."""
    line = bytearray()
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
        data = os.read(descriptor, _READ_BYTES) if ready else b""
        if not data:
            return None
        line += data
    return bytes(line)
