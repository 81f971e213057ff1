"""LocalLauncher: all ranks and servers of a run on this machine, each with its share of the GPUs.

Between the launcher and each process is a guard (concurrency/parent_guard.py), which ends the process and everything it
started when the launcher ends, also by `kill -9`.

    start ─► all run ── one fails ──► the others end ─► retries left? start again from the newest checkpoint
                   └─── the trainer is done, or Ctrl-C ──► trainer ends, then servers
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightrl.checks.printable import end_of_log
from lightrl.concurrency import parent_guard
from lightrl.engines.sglang.addresses import TOKEN_VARIABLE
from lightrl.launch.followed_log import FollowedLog
from lightrl.launch.launcher import TOKEN_FILE, LaunchState
from lightrl.launch.plan import Plan, Process

_TICK_S = 0.2
_FAILED_GRACE_S = 10.0  # for the others after one has failed: they cannot go on, and may hang
_SERVERS_GRACE_S = 15.0
_KILL_WAIT_S = 10.0  # beyond the grace, for the guards to kill what is left
_TAIL_LINES, _TAIL_BYTES = 15, 16384
RESUME = ("--ckpt_path", "last")


class LocalLauncher:
    """Starts a plan's processes as children of this one.

    Args:
        write: gets the followed output, a line at a time with the process's name before it.
    """

    def __init__(self, plan: Plan, *, write: Callable[[str], object] = sys.stderr.write) -> None:
        self.plan = plan
        self._write = write
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._state: LaunchState | None = None
        self._logs: list[FollowedLog] = []
        self._num_restarts = 0

    def files(self) -> Mapping[str, str]:
        """None: the processes are children of the launcher."""
        return {}

    def start(self) -> None:
        """Starts the servers and the ranks at once; the ranks wait for the servers."""
        if self._state is None:
            self._state = LaunchState(self.plan, pid=os.getpid())
        for process in sorted(self.plan.processes, key=lambda one: one.role):  # servers need longer
            self._running[process.name] = self._start(process)
        self._state.set(dict.fromkeys(self._running, "running"), state="running", restarts=self._num_restarts)

    def wait(self) -> int:
        """The exit code of the first process that failed, else 0; restarts everything as `recover` says."""
        while True:
            failed = self._watch()
            if failed is None:
                self.end()
                return 0
            name, code = failed
            self._write(
                f"{name} failed with {_as_text(code)}. The end of {self._log_file(name)}:\n{self._tail(name)}\n"
            )
            self._stop(self._running, _FAILED_GRACE_S)
            if self._num_restarts >= self.plan.launch.recover.retries:
                self._note(state="failed", error=f"{name} failed with {_as_text(code)}")
                return code if code > 0 else 1
            self._num_restarts += 1
            retries = self.plan.launch.recover.retries
            self._write(f"Starting again from the newest checkpoint ({self._num_restarts} of {retries} retries).\n")
            self.start()

    def end(self) -> None:
        """Ends ranks, which may save a checkpoint for `warning_s`, then servers. May be called twice."""
        trainers = {one.name for one in self.plan.of("trainer")}
        self._stop({name: one for name, one in self._running.items() if name in trainers}, self.plan.launch.warning_s)
        self._stop(self._running, _SERVERS_GRACE_S)
        self._note(state="ended")

    def _watch(self) -> tuple[str, int] | None:
        """Returns when all ranks are done, or with the name and exit code of a process that failed."""
        trainers = {one.name for one in self.plan.of("trainer")}
        while True:
            for log in self._logs:
                log.follow()
            codes = {name: process.poll() for name, process in self._running.items()}
            if failed := [name for name, code in codes.items() if code]:
                first = next((name for name in failed if not self._is_echo(name)), failed[0])
                return first, int(codes[first] or 1)
            if all(codes[name] == 0 for name in trainers):
                return None
            if gone := [name for name, code in codes.items() if code == 0 and name not in trainers]:
                return gone[0], 1  # servers that end while there are ranks
            time.sleep(_TICK_S)

    def _is_echo(self, name: str) -> bool:
        """Whether it only failed because another rank had failed first."""
        return "because another rank failed first" in self._tail(name)

    def _start(self, process: Process) -> subprocess.Popen[bytes]:
        log_file = Path(self._log_file(process.name))
        log_file.parent.mkdir(parents=True, exist_ok=True)
        if process.name == "trainer-0":
            self._logs = [FollowedLog(log_file, f"{process.name} | ", self._write)]
        command = list(process.command)
        if self._num_restarts and process.role == "trainer":
            command += RESUME
        grace = _SERVERS_GRACE_S if process.role == "servers" else self.plan.launch.warning_s
        guard = [sys.executable, "-I", parent_guard.__file__, str(os.getpid()), str(grace), f"{log_file}.none"]
        with log_file.open("ab") as log:
            return subprocess.Popen(
                [*guard, *shell_command(self.plan, command)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **process.environment, **process.rank_environment, TOKEN_VARIABLE: self._token()},
            )

    def _stop(self, processes: Mapping[str, subprocess.Popen[bytes]], grace_s: float) -> None:
        """Asks these processes to end, all at once, and waits; after the grace their guards kill them.

        A guard that does not answer, as one that was stopped, is killed; Linux then kills its process.
        """
        for process in processes.values():
            assert process.stdin is not None
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.write(f"{grace_s}".encode())
                process.stdin.flush()
            with contextlib.suppress(OSError):
                process.stdin.close()
        deadline = time.monotonic() + grace_s + _KILL_WAIT_S
        for name, process in processes.items():
            while process.poll() is None:
                if time.monotonic() > deadline:
                    self._write(f"The guard of {name} (process {process.pid}) does not answer; killed.\n")
                    process.kill()
                for log in self._logs:
                    log.follow()
                time.sleep(_TICK_S / 4)
        self._note()
        for name in list(processes):
            self._running.pop(name, None)

    def _note(self, **facts: object) -> None:
        codes = {name: process.poll() for name, process in self._running.items()}
        states = {name: "running" if code is None else _as_text(code) for name, code in codes.items()}
        if self._state is not None:
            self._state.set(states, **facts)

    def _token(self) -> str:
        return (Path(self.plan.folder) / TOKEN_FILE).read_text().strip()

    def _log_file(self, name: str) -> str:
        return next(self.plan.log_file(one) for one in self.plan.processes if one.name == name)

    def _tail(self, name: str) -> str:
        return "\n".join(end_of_log(Path(self._log_file(name)), _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def shell_command(plan: Plan, command: list[str]) -> list[str]:
    """A process's command after the launch's setup lines and inside its container."""
    inside = [*shlex.split(plan.launch.container or ""), *command]
    if not plan.launch.setup:
        return inside
    return ["bash", "-c", "\n".join(["set -e", *plan.launch.setup, f"exec {shlex.join(inside)}"])]


def _as_text(code: int) -> str:
    return f"exit code {code}" if code <= 128 else f"signal {code - 128}"
