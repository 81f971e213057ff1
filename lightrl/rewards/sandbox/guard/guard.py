"""The guard: serves requests, collects a program's output, stops it at a limit, and kills everything it started."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from .layers import Json, become_subreaper
from .memory import make_group, remove_group
from .program import READ_BYTES, Program, read_records, start


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the requesting process
    become_subreaper()
    requests = bytearray()
    while True:
        while b"\n" not in requests:
            data = os.read(0, READ_BYTES)
            if not data:
                return
            requests += data
        line, _, rest = bytes(requests).partition(b"\n")
        requests = bytearray(rest)
        reply = json.dumps(Execution(json.loads(line)).run()).encode() + b"\n"
        while reply:
            reply = reply[os.write(1, reply) :]


class Execution:
    """One program, from its start until every process that it started has exited."""

    def __init__(self, request: Json) -> None:
        self.stdin = request["stdin"]
        self.limits = request["limits"]
        self.program = Program(request)
        self.keeper = 0  # its process id while it lives

    def run(self) -> Json:
        folder = self.program.folder or tempfile.mkdtemp(prefix=sys.argv[2])  # the prefix identifies the requester
        name = f"{sys.argv[2]}{Path(folder).name}" if self.program.folder else Path(folder).name
        group = make_group(name, self.limits) if "cgroup" in self.program.layers else None
        self.program.group = group
        is_kept = False
        try:
            reply = self._run_in(folder)
            if self.program.folder is not None and reply["exit_code"] is not None:
                try:
                    reply["removed"] = _remove_foreign(folder, tuple(f"/{name}/" for _, name in self.program.root))
                    is_kept = True
                except (OSError, RecursionError) as error:  # nested too deeply to be checked
                    if reply["exit_code"] == 0:
                        reply |= {"exit_code": None, "problem": f"its folder cannot be checked: {error}"}
            return reply
        finally:
            if group is not None:
                remove_group(group)
            if not is_kept:
                remove_folder(folder)

    def _run_in(self, folder: str) -> Json:
        stdin = _file_with(self.stdin.encode(errors="surrogatepass"))
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        report, report_end = os.pipe()
        life_end, life = os.pipe()  # closes when the guard ends; the keeper then exits
        starter = os.fork()  # forks the keeper, see `start`
        if starter == 0:
            for descriptor in (out, err, report, life):
                os.close(descriptor)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)  # hides the guard's own pipes and keeps their numbers in use
            os.dup2(nothing, 1)
            streams = (stdin, out_end, err_end if self.program.port is None else out_end)
            start(self.program, folder, streams, report_end, life_end)
        for descriptor in (stdin, out_end, err_end, report_end, life_end, *self.program.relay):
            os.close(descriptor)
        try:
            os.waitpid(starter, 0)
            first_records = os.read(report, READ_BYTES)  # may contain all of the keeper's reports
            self.keeper = read_records(first_records).get("keeper", 0)
            return self._watch(out, err, report, first_records)
        finally:
            for descriptor in (life, out, err, report):
                os.close(descriptor)

    def _watch(self, out: int, err: int, report: int, first_records: bytes) -> Json:
        """Collects output until the report arrives, a limit is reached, or stdin closes."""
        start_s = time.monotonic()
        received = {out: bytearray(), err: bytearray(), report: bytearray(first_records)}
        poller = select.poll()
        for descriptor in received:
            poller.register(descriptor, select.POLLIN)
        poller.register(0, 0)  # hang-ups are always reported
        still_open = set(received)
        cause = ""
        while still_open:
            left_s = start_s + self.limits["wall_s"] - time.monotonic()
            if not cause:
                if len(received[out]) + len(received[err]) > self.limits["output_kib"] << 10:
                    cause = "output"
                elif b"exit_code" in received[report] or report not in still_open:  # no report: the keeper was killed
                    cause = "exit"
                elif left_s <= 0:
                    cause = "time"
                if cause:
                    self._kill()
            for descriptor, _ in poller.poll(None if cause else left_s * 1000 + 1):
                if descriptor == 0:
                    poller.unregister(0)
                    cause = cause or "abandoned"
                    self._kill()
                elif data := os.read(descriptor, READ_BYTES):
                    received[descriptor] += data
                    if self.program.port is not None and descriptor == out:
                        del received[out][: -(self.limits["output_kib"] << 10)]  # an agent may print more
                else:
                    poller.unregister(descriptor)
                    still_open.discard(descriptor)
        if cause == "abandoned":
            sys.exit()
        wall_s = time.monotonic() - start_s
        return self.reply(received[out], received[err], read_records(received[report]), cause, wall_s)

    def reply(self, out: bytearray, err: bytearray, report: Json, cause: str, wall_s: float) -> Json:
        exit_code, cpu_s = report.get("exit_code"), report.get("cpu_s", 0.0)
        stopped_by = report.get("stopped_by") if cause == "exit" else cause
        used_up = stopped_by is None and cpu_s >= 0.9 * self.limits["cpu_s"]  # the report lags behind the limit's clock
        if exit_code == -signal.SIGXCPU or (exit_code == -signal.SIGKILL and used_up):
            stopped_by = "time"
        max_bytes = self.limits["output_kib"] << 10
        if len(out) + len(err) > max_bytes:  # even if it exited before it was killed
            stopped_by = "output"
        return {
            "stdout": out[:max_bytes].decode(errors="replace"),
            "stderr": err[-max_bytes:].decode(errors="replace"),
            "exit_code": exit_code,
            "stopped_by": stopped_by,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "layers": report.get("layers", []),
            "problem": report.get("problem"),
        }

    def _kill(self) -> None:
        """Kills the keeper and all its descendants; returns when none is left."""
        if self.keeper:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.keeper, signal.SIGKILL)
            self.keeper = 0  # another process may get its number now
        if "private_user" in self.program.layers:
            self._kill_private_user()
        while True:  # without a pid namespace, this process inherits one generation of orphans after another
            for child in _children():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return

    def _kill_private_user(self) -> None:
        """Kills all processes of the program's user with one call, which a fork bomb cannot outrun."""
        uid = self.program.uid
        killer = os.fork()
        if killer == 0:
            with contextlib.suppress(OSError):
                os.setresuid(uid, uid, uid)
                if os.getuid() == os.geteuid() == uid:  # as root, it would kill every process
                    os.kill(-1, signal.SIGKILL)
            os._exit(0)
        os.waitpid(killer, 0)


def _children() -> list[int]:
    pid = os.getpid()
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _file_with(data: bytes) -> int:
    """Returns a descriptor for reading this data from an unnamed file."""
    number, name = tempfile.mkstemp(prefix=sys.argv[2])
    with os.fdopen(number, "wb") as file:
        file.write(data)
    descriptor = os.open(name, os.O_RDONLY)
    Path(name).unlink()
    return descriptor


def _remove_foreign(folder: str, own: tuple[str, ...] = ()) -> list[str]:
    """Removes symbolic and hard links that lead out of the folder, and pipes, sockets and devices; returns their names.

    Pipes, sockets and devices could block a reader. Call this only after all processes in the folder have ended.

    Args:
        own: prefixes of absolute paths that led into the folder while its program ran.
    """

    def failed(error: OSError) -> None:
        raise error

    root = os.path.realpath(folder)
    status_of: dict[Path, os.stat_result] = {}
    for path, folders, names in os.walk(root, onerror=failed):
        for entry in (Path(path) / name for name in (*folders, *names)):
            status = entry.lstat()
            if stat.S_ISDIR(status.st_mode):
                entry.chmod(status.st_mode | 0o700)
            else:
                status_of[entry] = status
    num_links = Counter((status.st_dev, status.st_ino) for status in status_of.values())
    foreign = []
    for entry, status in status_of.items():
        is_link = stat.S_ISLNK(status.st_mode)
        is_own = is_link and f"{os.path.normpath(entry.readlink())}/".startswith(own)
        leads_out = is_link and not is_own and not f"{os.path.realpath(entry)}/".startswith(f"{root}/")
        is_shared = status.st_nlink > num_links[status.st_dev, status.st_ino]
        if leads_out or is_shared or not (is_link or stat.S_ISREG(status.st_mode)):
            entry.unlink()
            foreign.append(str(entry.relative_to(root)))
    return foreign


def remove_folder(folder: str) -> None:
    """Removes a folder with all its contents, including folders that the program made inaccessible."""
    with contextlib.suppress(OSError, RecursionError):  # folders may be nested very deeply
        for path, names, _ in os.walk(folder):
            for name in names:
                entry = Path(path) / name
                if not entry.is_symlink():
                    entry.chmod(0o700)
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if Path(folder).exists():
        os.spawnlp(os.P_WAIT, "rm", "rm", "-rf", folder)
