"""TorchrunLauncher: a script per host for whatever can start a command there; torchrun starts the host's ranks.

Servers are scripts of their own, a second job. This launcher starts nothing: it writes the scripts and prints what to
start where.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping

from lightrl.concurrency import parent_guard
from lightrl.launch.launcher import Launcher, LaunchState, inside, script_head
from lightrl.launch.plan import Plan, Process


class TorchrunLauncher(Launcher):
    """Writes a plan's scripts; `write` gets what to start where."""

    def __init__(self, plan: Plan, *, write: Callable[[str], object] = sys.stdout.write) -> None:
        self.plan = plan
        self._write = write

    def files(self) -> Mapping[str, str]:
        """`trainer-HOST.sh` and `servers-HOST.sh`; further arguments of the former are those of `lightrl fit`."""
        return {name: self._script(process) for name, process in self._scripts().items()}

    def start(self) -> None:
        """Prints what to start where."""
        LaunchState(self.plan).set({}, state="written")
        lines = [
            f"  on {self.plan.hosts[process.host]}:  bash {shlex.quote(f'{self.plan.folder}/{name}')}"
            for name, process in self._scripts().items()
        ]
        text = "\n".join(lines)
        self._write(f"\nStart these, all at once; each writes its log below {self.plan.folder}:\n{text}\n")
        self._write("After a failure start all again, the trainer's with `--ckpt_path last`.\n")

    def _scripts(self) -> dict[str, Process]:
        """One for each host and role; the first rank of a host stands for all of them."""
        scripts: dict[str, Process] = {}
        for process in self.plan.processes:
            scripts.setdefault(f"{process.role}-{self.plan.hosts[process.host]}.sh", process)
        return scripts

    def _script(self, process: Process) -> str:
        plan = self.plan
        folder = shlex.quote(f"{plan.folder}/{plan.hosts[process.host]}")
        name = process.role if process.role == "trainer" else process.name
        before = [f"mkdir -p {folder}", f"exec > >(tee -a {folder}/{name}.log) 2>&1"]
        environment = {key: value for key, value in process.environment.items() if not key.startswith("MASTER_")}
        command = list(process.command)
        if process.role == "trainer":
            main = {"nnodes": plan.trainer_hosts, "nproc-per-node": plan.ranks_per_host, "node-rank": process.host}
            words = [f"--{key}={value}" for key, value in main.items()]
            words += [f"--master-addr={plan.hosts[0]}", f"--master-port={plan.port}"]
            # A rank must not outlive its torchrun, not even one that is killed.
            guard = ["-m", parent_guard.__name__, "0", str(plan.launch.warning_s), f"{plan.log_file(process)}.none"]
            command = [command[0], "-m", "torch.distributed.run", *words, "--no-python", command[0], *guard, *command]
        end = ' "$@" < /dev/null' if process.role == "trainer" else ""
        return "\n".join([*script_head(plan, environment, before=before), f"exec {inside(plan, command)}{end}"]) + "\n"
