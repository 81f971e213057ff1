"""LocalLauncher: runs all ranks and servers on this machine, each with its share of the GPUs.

A guard (concurrency/parent_guard.py) between the launcher and each process ends the process and everything it started
when the launcher ends, even if the launcher is killed with `kill -9`.

    start ─► all run ── one fails ──► stop the others ─► retries left? restart all from the newest checkpoint
                   ├─── servers fail ──► retries left? restart only the servers; they get the run's weights
                   └─── the trainer is done, or Ctrl-C ──► stop the trainer, then the servers
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from lightrl.checks.printable import end_of_log
from lightrl.commands.launch.launcher import TOKEN_FILE, FollowedLog, Launcher, LaunchState
from lightrl.commands.launch.plan import Plan, Process
from lightrl.concurrency.child_process import KILL_WAIT_S, ChildProcess, ending_of
from lightrl.engines.servers.addresses import TOKEN_VARIABLE

_TICK_S = 0.2
_FAILED_GRACE_S = 10.0  # after one process has failed, the others cannot continue and may hang
_SERVERS_GRACE_S = 15.0
_TAIL_LINES, _TAIL_BYTES = 15, 16384
LOST = -1  # used as the exit code of a process whose host is lost
RESUME = ("--ckpt_path", "last")


class GuardedProcesses:
    """Starts and stops named commands on this host; they are killed when this process ends.

    No method blocks, so a launcher on another host can also call them.
    """

    def __init__(self) -> None:
        self.children: dict[str, ChildProcess] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        secret_files: Mapping[str, str],
        log_file: str,
        grace_s: float,
        folder: str,
    ) -> None:
        """Starts a command, replacing a finished one with the same name.

        Args:
            environment: variables to add to this process's environment.
            secret_files: variable → the file that contains its value.
            log_file: the file to which the command's output is appended.
            grace_s, folder: see ChildProcess.
        """
        secrets = {variable: Path(file).read_text().strip() for variable, file in secret_files.items()}
        variables = {**os.environ, **environment, **secrets}
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        with Path(log_file).open("ab") as log:
            self.children[name] = ChildProcess(
                command, environment=variables, grace_s=grace_s, log=log.fileno(), folder=folder
            )

    def codes(self) -> dict[str, int | None]:
        """Returns the exit code of each command; see `ChildProcess.code`."""
        return {name: child.code for name, child in self.children.items()}

    def ask_to_end(self, names: Collection[str], grace_s: float) -> None:
        """Asks these commands to exit; ignores names of commands that this object did not start."""
        for child in (self.children[name] for name in names if name in self.children):
            child.ask_to_end(grace_s)

    def kill(self, name: str) -> None:
        if name in self.children:
            self.children[name].kill()


class LocalLauncher(Launcher):
    """Starts a plan's processes as children of this process; passes messages and the output of rank 0 to `write`."""

    def __init__(self, plan: Plan, *, write: Callable[[str], object] = sys.stderr.write) -> None:
        self.plan = plan
        self.hosts: list[GuardedProcesses] = [GuardedProcesses()]
        self._write = write
        self._state: LaunchState | None = None
        self._logs: list[FollowedLog] = []
        self._num_restarts = 0

    def start(self) -> None:
        """Starts the servers and the ranks together; the ranks wait for the servers."""
        if self._state is None:
            self._state = LaunchState(self.plan, pid=os.getpid())
        self._place()
        for process in sorted(self.plan.processes, key=lambda one: one.role):  # servers first: they start slowly
            self._start(process)
        self._note(state="running", restarts=self._num_restarts)

    def wait(self) -> int:
        """Waits for the run and restarts it as often as `recover` allows; returns 0 or the exit code of a failure."""
        while True:
            failed = self._watch()
            if failed is None:
                self.end()
                return 0
            name, code = failed
            host = f" {self.plan.hosts[self._process(name).host]}" if code == LOST else ""
            failure = f"{name} failed with {_as_text(code)}{host}"
            self._write(f"{failure}. The end of {self._log_file(name)}:\n{self._tail(name)}\n")
            retries = self.plan.launch.recover.retries
            has_retry = self._num_restarts < retries
            # separate servers can restart on their GPUs while the ranks wait for them
            is_separate = self._process(name).role == "servers" and self.plan.layout.placement == "separate"
            restarts_alone = is_separate and self._ranks_run()
            if not (has_retry and restarts_alone):
                self._stop([one.name for one in self.plan.processes], _FAILED_GRACE_S)
            if not has_retry:
                self._note(state="failed", error=failure)
                return code if code > 0 else 1
            self._num_restarts += 1
            what = f"{name} again" if restarts_alone else "again from the newest checkpoint"
            self._write(f"Starting {what} ({self._num_restarts} of {retries} retries).\n")
            if not restarts_alone:
                self.start()
                continue
            self._place(while_ranks_run=True)
            self._start(self._process(name))
            self._note(restarts=self._num_restarts)

    def end(self) -> None:
        """Stops the ranks, which have `warning_s` to save a checkpoint, then the servers. Safe to call twice."""
        self._stop([one.name for one in self.plan.of("trainer")], self.plan.launch.warning_s)
        self._stop([one.name for one in self.plan.of("servers")], _SERVERS_GRACE_S)
        self._note(state="ended")

    def _place(self, *, while_ranks_run: bool = False) -> None:
        """In subclasses, finds hosts for the plan's processes; with `while_ranks_run`, gives up if the ranks exit."""

    def _watch(self) -> tuple[str, int] | None:
        """Waits until all ranks are done, or returns the name and exit code of a process that failed."""
        trainers = {one.name for one in self.plan.of("trainer")}
        while True:
            for log in self._logs:
                log.follow()
            codes = self._codes()
            if all(codes[name] == 0 for name in trainers):
                return None
            if failed := [name for name, code in codes.items() if code]:
                # skip ranks that failed only because another rank had failed first
                causes = (name for name in failed if "because another rank failed first" not in self._tail(name))
                first = next(causes, failed[0])
                return first, int(codes[first] or 1)
            if ended := [name for name, code in codes.items() if code == 0 and name not in trainers]:
                return ended[0], 1  # servers must not end before the ranks
            time.sleep(_TICK_S)

    def _ranks_run(self) -> bool:
        codes = self._codes()
        return all(codes[one.name] is None for one in self.plan.of("trainer"))

    def _start(self, process: Process) -> None:
        log_file = self._log_file(process.name)
        if process.name == "trainer-0":
            self._logs = [FollowedLog(Path(log_file), f"{process.name} | ", self._write)]
        command = [*process.command, *(RESUME if self._num_restarts and process.role == "trainer" else ())]
        self.hosts[process.host].start(
            process.name,
            shell_command(self.plan, command),
            environment={**process.environment, **process.rank_environment},
            secret_files={TOKEN_VARIABLE: f"{self.plan.folder}/{TOKEN_FILE}"},
            log_file=log_file,
            grace_s=_SERVERS_GRACE_S if process.role == "servers" else self.plan.launch.warning_s,
            folder=str(Path.cwd()),
        )

    def _stop(self, names: Collection[str], grace_s: float) -> None:
        """Asks these processes to exit, and waits; after `grace_s` their guards kill them."""
        for host in self.hosts:
            host.ask_to_end(names, grace_s)
        deadline = time.monotonic() + grace_s + KILL_WAIT_S
        while running := [name for name, code in self._codes().items() if name in names and code is None]:
            if time.monotonic() > deadline:
                deadline = float("inf")
                for name in running:
                    self._write(f"The guard of {name} does not respond; killing it.\n")
                    self.hosts[self._process(name).host].kill(name)
            for log in self._logs:
                log.follow()
            time.sleep(_TICK_S / 4)
        self._note()

    def _codes(self) -> dict[str, int | None]:
        return {name: code for host in self.hosts for name, code in host.codes().items()}

    def _note(self, **facts: object) -> None:
        states = {name: "running" if code is None else _as_text(code) for name, code in self._codes().items()}
        if self._state is not None:
            self._state.set(states, **facts)

    def _process(self, name: str) -> Process:
        return next(one for one in self.plan.processes if one.name == name)

    def _log_file(self, name: str) -> str:
        return self.plan.log_file(self._process(name))

    def _tail(self, name: str) -> str:
        return "\n".join(end_of_log(Path(self._log_file(name)), _TAIL_BYTES).splitlines()[-_TAIL_LINES:])


def shell_command(plan: Plan, command: list[str]) -> list[str]:
    """Returns a process's command, preceded by the launch's setup lines and inside its container."""
    inside = [*shlex.split(plan.launch.container or ""), *command]
    if not plan.launch.setup:
        return inside
    return ["bash", "-c", "\n".join(["set -e", *plan.launch.setup, f"exec {shlex.join(inside)}"])]


def _as_text(code: int) -> str:
    return "the loss of its host" if code == LOST else ending_of(code)
